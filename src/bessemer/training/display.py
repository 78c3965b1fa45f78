"""What a terminal shows of a run: its first lines, and its steps.

The first lines say what is about to run, with which rates, kernels and derived numbers. Steps are a rich bar on a
terminal, plain lines in a file, JSON rows for programs, or tqdm.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bessemer.config import Config
from bessemer.console import compact, counted, duration, figure, in_parts, shown
from bessemer.data.tokenize.chat import can_chat, stop_ids
from bessemer.data.tokenize.documents import describe_turn_rows
from bessemer.models.protocol import KernelChoice, group_of
from bessemer.registry import objectives
from bessemer.report.summary import too_small
from bessemer.scaling import fine_tuning_rate
from bessemer.training.output import optimizer_groups
from bessemer.training.persistence import frozen
from bessemer.training.settings import BaseTrainerConfig
from bessemer.training.setup.compiled import Functions, Programs, RunPlan, programs_so_far
from bessemer.training.setup.horizon import is_shipped, repeats, starts_from_own_weights
from bessemer.training.setup.initial_weights import tree_in
from bessemer.training.setup.model import ModelParts, flops_formula
from bessemer.training.setup.schema import without_effect

# --- the first lines ---


TABLES = ("embedding", "head")  # groups of parameters with a row for each token


def header(plan: RunPlan, functions: Functions) -> Iterator[str]:
    """Yield the lines that state what is about to run, and each derived number with its reason."""
    context, parts, data = plan.context, plan.model, plan.data
    settings, topology, config = context.settings, context.topology, context.config
    yield f"run        {shown(context.directory.path)}"
    yield f"model      {settings.family}, {parts.counts['total']:,} parameters ({parts.counts['scaling']:,} scaling)"
    if (trained := frozen.describe(parts)) is not None:
        yield f"trains     {trained}"
    for name, stats in data.plan.stats.items():
        yield from data_lines(settings, shown(name), stats, data.validation_count)
    epochs = data.plan.epoch(data.steps)
    yield (
        f"batch      {data.batch_size} × {settings.block_size} tokens{in_parts(functions.accumulate_steps)}; "
        f"{data.steps:,} steps, {compact(plan.tokens)} tokens, {epochs:.2f} epochs"
    )
    yield f"rates      {'; '.join(rates(functions))}"
    yield (
        f"FLOPs      {compact(parts.flops_per_token)} per token = {flops_formula(parts, settings.block_size)}; "
        f"{compact(parts.flops_per_token_causal)} with causal attention counted once"
    )
    axes = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.shape.items() if size > 1)
    yield f"devices    {topology.device_count} {topology.platform}{f' ({axes})' if axes else ''}{kernels(plan)}"
    notes = (
        *topology.notes,
        *config.notes,
        *without_effect(config, len(plan.stages)),
        *repeats(config, epochs),
        *shipped_rates(config, parts.counts["total"]),
    )
    for note in notes:
        yield f"note       {note}"
    for warning in untrained_end(settings, parts):
        yield f"warning    {warning}"
    if data.validation is not None and (small := too_small(data.validation.description)):
        yield f"warning    {small}"
    for name, entry in context.notes.derived.items():
        if name not in context.notes.given:
            yield f"{name:<30} {figure(entry['value']):<12} {entry['reason']}"


def data_lines(settings: BaseTrainerConfig, name: str, stats: dict[str, Any], held_out: int) -> Iterator[str]:
    known = [f"{stats[key]:,} {key}" for key in ("documents", "prompts", "tokens") if key in stats]
    if "pairs" in stats:
        known = [f"{stats['pairs']:,} pairs in {stats['rows']:,} rows", *known[1:]]
        known += [f"{stats['padding_share']:.1%} padding", f"{stats['truncated']:,} prompts truncated"]
        known += [f"{stats['without_targets']:,} left out"]
    yield f"data       {name}: {', '.join(known)}; {counted(held_out, 'row')} held out"
    if stats.get("unverified"):
        yield (
            f"note       {name}: prepared before stores had checksums, so damage would go unnoticed; prepare it again "
            "to have every chunk verified"
        )
    for why, count in stats.get("files_left_out", {}).items():
        yield f"note       {name}: {counted(count, 'file')} left out: {why}"
    for remark in supervision(settings, stats):
        yield f"note       {name}: {remark}"


def kernels(plan: RunPlan) -> str:
    """Return the chosen kernels, unless they are derived numbers with a reason: on a CPU."""
    model = plan.model.model
    if "architecture.attention" in plan.context.notes.derived or not isinstance(model, KernelChoice):
        return ""
    return "; " + ", ".join(f"{name}: {kernel}" for name, (kernel, _) in model.chosen_kernels().items())


def rates(functions: Functions) -> Iterator[str]:
    """Yield the peak rate and decay of each group of parameters."""
    for row in optimizer_groups(functions):
        rate = "rate of its own" if row["lr"] is None else f"{row['lr']:.4g}"
        decay = f", decay {row['weight_decay']:.4g}" if row["weight_decay"] else ""
        yield f"{row['group']} {rate}{decay} ({counted(row['tensors'], 'tensor')})"


def shipped_rates(config: Config, parameters: int) -> list[str]:
    """Return a note where the weights are the caller's but the rates are an optimizer's or a small demonstration's.

    Where a rate is derived from the model (`rate_for_weights`), there is none.
    """
    rates = [key for key in config.provenance if key.startswith("optimization/") and "lr" in key]
    if not rates or not all(is_shipped(config, key) for key in rates) or not starts_from_own_weights(config):
        return []
    share = objectives.entry(config["objective"]).traits.get("rate_share") or 1.0
    rate = fine_tuning_rate(parameters, share, adapters=config["lora/rank"] > 0).value
    name = "" if config["optimization/name"] == "adamw" else "optimization.name=adamw "
    return [
        f"these rates are not for pretrained weights and can undo what was learned. Try {name}optimization.lr={rate:g}"
    ]


def untrained_end(settings: BaseTrainerConfig, parts: ModelParts) -> list[str]:
    """Return a warning for adapters that cannot learn to end a turn: the base was trained on documents alone, so its
    rows for the tokens of turns are as they were drawn, and the head and the embedding are frozen."""
    start, tokenizer, group = settings.init, parts.tokenizer, group_of(parts.model)
    if not parts.split.lora.rank or start is None or tokenizer is None or group is None or not Path(start).exists():
        return []
    if tokenizer.chat_template is not None or not can_chat(tokenizer):
        return []
    before = str(tree_in(Path(start)).get("objective"))
    frozen = {kind: ["/".join(path) for path in parts.split.frozen if group(path) == kind] for kind in TABLES}
    if not frozen["head"] or before not in objectives or _trains_turns(before) or not _trains_turns(settings.objective):
        return []
    end = tokenizer.decode(stop_ids(tokenizer))
    whole = ",".join([*parts.split.lora.whole, *(name for names in frozen.values() for name in names)])
    return [
        f"the base (objective {before}) was never trained on {end}, and the head is frozen: adapters alone hardly "
        f"learn to end a turn. Train those tables whole beside them: 'lora.whole=[{whole}]'"
    ]


def _trains_turns(objective: str) -> bool:
    return bool(objectives.entry(objective).traits.get("chat"))


def supervision(settings: BaseTrainerConfig, stats: dict[str, Any]) -> list[str]:
    """Notes on conversations of which unusual tokens are learned, or without what comes before them."""
    if settings.objective != "sft" or "documents" not in stats:
        return []
    remarks = []
    if stats["target_tokens"] >= stats["tokens"] - stats["documents"]:
        remarks.append("texts without turns; every token is learned, not only those of an assistant")
    if turns := stats.get("turn_rows"):
        remarks.append(describe_turn_rows(turns))
    if split := stats.get("split_documents"):
        remarks.append(
            f"{split:,} of {stats['documents']:,} conversations are longer than "
            f"architecture.block_size={settings.block_size} and learned in pieces, of which only the first sees "
            "the beginning; a larger block keeps them whole, the style PADDED truncates them"
        )
    return remarks


# --- steps ---


class ProgressBar(Protocol):
    """What `create_progress_bar` returns."""

    def update(self, step: int, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ShowsActivity(Protocol):
    """A progress bar that can also show activity besides the steps; optional."""

    def note(self, text: str) -> None: ...


def clock(seconds: float | None) -> str:
    """75 -> 1:15, 3675 -> 1:01:15."""
    if seconds is None:
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def facts(row: dict[str, Any]) -> str:
    """Return the numbers worth a glance, without unknown ones (MFU on an unknown chip); for a row that is not a
    step's, its first numbers under their own names."""
    if "loss" not in row:
        return "  ".join(f"{name} {compact(value)}" for name, value in numbers(row).items())
    parts = [f"loss {float(row.get('loss_smooth') or row['loss']):.4f}"]
    if row.get("reward") is not None:
        parts.append(f"reward {float(row['reward']):.3f}")
    if row.get("time/tok_per_s") is not None:
        parts.append(f"{compact(row['time/tok_per_s'])} tok/s")
    if row.get("time/mfu") is not None:
        parts.append(f"MFU {row['time/mfu']:.1%}")
    if row.get("mem/peak_gib") is not None:
        parts.append(f"{row['mem/peak_gib']:.1f} GiB")
    if "time/eta" in row:
        parts.append(f"left {clock(row['time/eta'])}")
    return "  ".join(parts)


SHOWN = 4
"""Numbers of a row without a loss that a bar has room for."""


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the first few values of a row that are single numbers, also of a device."""
    found = {
        name: float(value)
        for name, value in row.items()
        if name != "step" and (isinstance(value, int | float) or getattr(value, "size", 0) == 1)
    }
    return dict(list(found.items())[:SHOWN])


def as_json(value: Any) -> Any:
    """Return an array as numbers; what JSON has no form for as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class NoBar:
    def update(self, step: int, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class RichBar:
    """One line that fits 80 columns."""

    def __init__(self, console: Console, total: int, description: str):
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self.task = self.progress.add_task(description, total=total, facts="")
        self.facts = ""
        self.progress.start()

    def update(self, step: int, row: dict[str, Any]) -> None:
        self.facts = facts(row) if row else self.facts
        self.progress.update(self.task, completed=step, facts=self.facts)

    def note(self, text: str) -> None:
        """Show `text` in place of the facts, until the next step."""
        self.progress.update(self.task, facts=text)

    def close(self) -> None:
        self.progress.stop()


class PlainLines(NoBar):
    """One line per report: for files, pipes and continuous integration."""

    PATIENCE = 10.0  # seconds without a line after which an activity gets one

    def __init__(self, say: Callable[[str], None], total: int, description: str):
        self.say, self.total, self.description = say, total, description
        self._last = time.monotonic()

    def update(self, step: int, row: dict[str, Any]) -> None:
        if row:
            self._line(f"{self.description} {step:>6}/{self.total}  {facts(row)}")

    def note(self, text: str) -> None:
        if time.monotonic() - self._last >= self.PATIENCE:
            self._line(f"           {text}")

    def _line(self, text: str) -> None:
        self._last = time.monotonic()
        self.say(text)


class JsonLines(NoBar):
    """One line of JSON per report, on stdout."""

    def update(self, step: int, row: dict[str, Any]) -> None:
        if row:
            print(json.dumps(row, default=as_json), flush=True)


class TqdmBar:
    def __init__(self, total: int, description: str):
        from tqdm import tqdm

        self.bar = tqdm(total=total, desc=description, file=sys.stderr)

    def update(self, step: int, row: dict[str, Any]) -> None:
        if row:
            self.bar.set_postfix_str(facts(row), refresh=False)
        self.bar.update(step - self.bar.n)

    def note(self, text: str) -> None:
        self.bar.set_postfix_str(text)

    def close(self) -> None:
        self.bar.close()


def make_progress(kind: str, console: Console, say: Callable[[str], None], total: int, desc: str) -> ProgressBar:
    """`kind` is the setting logging/progress; auto looks at the terminal."""
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "rich":
        return RichBar(console, total, desc)
    if kind == "tqdm":
        return TqdmBar(total, desc)
    if kind == "json":
        return JsonLines()
    return PlainLines(say, total, desc) if kind == "plain" else NoBar()


SLOW = 2.0
"""Seconds of a first step that a forecast is made from; a shorter one is mostly one-time work."""


class StartUp:
    """Where the time before the first step goes: `lap(name)` adds the time since the last lap to a part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.compiled = Programs()
        self.done = False
        self.elsewhere = 0.0  # seconds that the run of `init=recipe:NAME` took before this trainer was made
        self._made = self._last = self._first = time.monotonic()
        self._programs = programs_so_far()

    def began(self, moment: float) -> None:
        """Record that the program began at `moment` (of time.monotonic), before the trainer was made."""
        self._first = moment
        self.parts = {"imports and devices": max(0.0, self._made - moment - self.elsewhere), **self.parts}

    @property
    def age(self) -> float:
        """Seconds since the program began, or, if that is unknown, since the trainer was made."""
        return time.monotonic() - self._first

    def lap(self, name: str) -> None:
        if self.done:
            return
        now, programs = time.monotonic(), programs_so_far()
        self.parts[name] = self.parts.get(name, 0.0) + now - self._last
        if name == "compile":
            self.compiled = programs - self._programs
        self._last, self._programs = now, programs

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def line(self) -> str:
        """first step after 21.3 s: imports and devices 4.1, …, compile 9.8 (cache miss), …"""
        notes = {"compile": f" ({self.compiled.words})"}
        parts = [f"{name} {seconds:.1f}{notes.get(name, '')}" for name, seconds in self.parts.items()]
        return f"first step after {self.seconds:.1f} s: {', '.join(parts)}"

    def forecast(self, steps: int) -> str | None:
        """Return a note if `steps` like the first would take more than an hour: reports may be many minutes apart."""
        one = self.parts.get("first step", 0.0)
        if one < SLOW or one * steps < 3600:
            return None
        return (
            f"at the pace of the first step the run takes {duration(one * steps)} ({steps:,} steps of {one:.0f} s). "
            "Fewer training.steps, a smaller model.depth or a shorter architecture.block_size take less; "
            "`bessemer plan` with the same arguments estimates it beforehand"
        )

    def facts(self) -> dict[str, Any] | None:
        """Return the parts for facts.json; None until the first step is done."""
        if not self.done:
            return None
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        return {"seconds": round(self.seconds, 3), "parts": parts, "cache": self.compiled.words}
