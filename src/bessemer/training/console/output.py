"""What a run shows and leaves behind: log.txt, derived.json, the final weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Console

from bessemer.config.bounded import read_json
from bessemer.config.values import plain
from bessemer.console import duration, fit, wrapped
from bessemer.data import show_progress
from bessemer.errors import InputError, runnable
from bessemer.interop.config import TreeArrays
from bessemer.interop.export_hf import export_folder
from bessemer.job import RunDirectory, atomic_write
from bessemer.job.trust import mark_origin
from bessemer.models.allocation import FILE as ALLOCATION
from bessemer.models.llama import LlamaSettings
from bessemer.registry import objectives
from bessemer.report import baselines, write_report
from bessemer.report.metrics import MetricsFile
from bessemer.report.summary import too_small, training_seconds
from bessemer.storage.files import storage
from bessemer.storage.weights import OURS, flatten, write_file
from bessemer.training import stages
from bessemer.training.console.progress import compact
from bessemer.training.feed import fetch
from bessemer.training.persistence.checkpoints import versions, write_branches
from bessemer.training.setup.compiled import Functions, check_step, programs_so_far
from bessemer.training.setup.model import flops_formula, mfu_peak

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


# The end of a run on the screen: what it reached, against what, a sample, and what to do next.


BAR = "  | "
SAMPLE_LINES = 8
WATCH = "  bessemer dash                              # all runs in a browser"
OWN_TEXT = "  bessemer train training.dataset=my.txt     # the same on your own text"
TEACH = "  bessemer train sft init={} training.dataset=chats.jsonl"


def final_lines(trainer: BaseTrainer, compressors: dict[str, float]) -> list[str]:
    rows = list(MetricsFile(trainer.run_directory.metrics).rows())
    validations = [row for row in rows if row.get("val_loss") is not None]
    before = "untrained" if trainer.settings.init is None else "before"
    table = result_table(validations, compressors, before)
    held_out = trainer.data.validation
    error = validations[-1].get("val_bpb_se") if validations else None
    small = None if held_out is None else too_small(held_out.description, error)
    table += [f"warning: {small}"] if small else []
    results = [*reward_line(rows), *table, *evaluated(validations)]
    lines = ["", *results, *speed_lines(rows), ""]
    lines += sample_lines(trainer)
    path = shown(trainer.run_directory.path)
    curves = f", curves in {path}/plots" if trainer.logging.plots else ""
    return [
        *lines,
        f"run     {path}",
        f"report  {path}/report.md{curves}",
        "",
        "next",
        *map(runnable, next_commands(trainer, shlex.quote(path))),
    ]


def next_commands(trainer: BaseTrainer, path: str) -> list[str]:
    if teaches_chat(trainer):
        return [f"  bessemer chat {path}", f"  bessemer serve {path}", WATCH]
    if hasattr(trainer.model, "values"):  # it judges answers and was not taught to write them
        return [f"  bessemer report {path} --html", WATCH]
    can_sample = trainer.tokenizer is not None and hasattr(trainer.model, "decode")
    return [
        *([f"  bessemer sample {path} --prompt {shlex.quote(a_prompt(trainer))}"] if can_sample else []),
        f"  bessemer eval {path} --tasks bpb",
        WATCH,
        OWN_TEXT if trainer.has_recipe_data else f"{TEACH.format(path)}     # teach it to answer",
    ]


def reward_line(rows: list[dict[str, Any]]) -> list[str]:
    """From the first to the last greedy reward on held-out prompts, of a run that has rewards."""
    found = [row for row in rows if row.get("val_reward") is not None]
    if not found:
        return []
    first, last = found[0], found[-1]
    return [
        f"reward on held-out prompts, greedy: {first['val_reward']:.3f} at step {first['step']}, "
        f"{last['val_reward']:.3f} at step {last['step']}"
    ]


def teaches_chat(trainer: BaseTrainer) -> bool:
    """Whether the objective teaches conversations, so that compressing text is not what it is about."""
    return "chat" in objectives.entry(trainer.settings.objective).traits


def shown(path: str | Path) -> str:
    """A path as the user would type it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


def result_table(
    validations: list[dict[str, Any]], compressors: dict[str, float], before: str = "untrained"
) -> list[str]:
    """Bits per byte of the held-out text, worst first, with a bar each: shorter is better."""
    known = [row for row in validations if row.get("val_bpb") is not None]
    if not known:
        return [
            f"validation loss {row['val_loss']:.4f} at step {row['step']}{ranked(row)}"
            for row in validations[-1:]
        ]
    values = {f"this model, {before}": known[0]["val_bpb"]} if known[0]["step"] == 0 else {}
    values |= {{"gzip": "gzip -9", "xz": "xz -9e"}[name]: value for name, value in compressors.items()}
    values["this model, trained"] = known[-1]["val_bpb"]
    errors = {"this model, trained": known[-1].get("val_bpb_se")}
    if known[0]["step"] == 0:
        errors[f"this model, {before}"] = known[0].get("val_bpb_se")
    width = 24 / max(values.values())
    known_error = ", ± standard error" if any(errors.values()) else ""
    lines = [f"bits per byte of held-out {'text' if compressors else 'data'} (lower is better{known_error})"]
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        error = f" ± {errors[name]:.3f}" if errors.get(name) is not None else ""
        lines.append(f"  {name:<22} {value:6.3f}{error:<8}  {'█' * max(1, round(value * width))}")
    if "gzip" in compressors:
        gain = 1 - known[-1]["val_bpb"] / compressors["gzip"]
        word = "fewer" if gain >= 0 else "more"
        lines.append(f"  {abs(gain):.1%} {word} bits than gzip -9")
    return lines


def evaluated(validations: list[dict[str, Any]]) -> list[str]:
    """Each evaluation before the first step and after the last."""
    if not validations:
        return []
    first, last = validations[0], validations[-1]
    return [
        f"  {key.removeprefix('eval/')}: {first[key]:.4f} before, {last[key]:.4f} after"
        for key in last
        if key.startswith("eval/") and key in first and first["step"] == 0 < last["step"]
    ]


def ranked(row: dict[str, Any]) -> str:
    """Of a run that compares answers."""
    if "val_pref_acc" not in row:
        return ""
    return f"; {row['val_pref_acc']:.1%} of held-out pairs ranked right, margin {row['val_margin']:.3f}"


def speed_lines(rows: list[dict[str, Any]]) -> list[str]:
    timed = [row for row in rows if row.get("time/tok_per_s")]
    if not timed:
        return []
    speed = sorted(row["time/tok_per_s"] for row in timed)[len(timed) // 2]
    spent = duration(training_seconds(timed))
    return [f"  {compact(timed[-1]['tokens'])} tokens in {spent} of training, {compact(speed)} tokens/s"]


def a_prompt(trainer: BaseTrainer) -> str:
    """Something to try: the first line of the last preview's prompt, cut to fit the screen."""
    samples = list(MetricsFile(trainer.run_directory.samples).rows())
    lines = samples[-1]["prompt"].strip().splitlines() if samples else []
    return lines[0][:32].strip() if lines else "Once upon a time"


def sample_lines(trainer: BaseTrainer) -> list[str]:
    samples = list(MetricsFile(trainer.run_directory.samples).rows())
    if not samples:
        return []
    last, width = samples[-1], trainer.output.console.width - len(BAR)
    between = "▸" if teaches_chat(trainer) else ""
    text = fit(last["prompt"], 3 * width) + between + last["completion"]
    lines = [part for line in text.splitlines() for part in wrapped(line, width)]
    return ["sample", *(f"{BAR}{line}" for line in lines[:SAMPLE_LINES]), ""]


# facts.json: what a report says about a run that its configuration and metrics do not.


BASELINE_BYTES = 16 << 20
"""Held-out text up to this size is also given to gzip and xz; more would take them minutes."""


def run_facts(trainer: BaseTrainer) -> dict[str, Any]:
    """Counts, FLOPs, devices and versions, known before the first step."""
    parts, topology = trainer.model_parts, trainer.topology.describe()
    return {
        "data": trainer.data.plan.stats,
        "validation_sequences": trainer.data.validation_count,
        "validation": trainer.data.validation.description if trainer.data.validation is not None else {},
        "parameters": parts.counts,
        "trained_parameters": trainer.count_model_parameters(trainer.functions.abstract_state.params),
        "flops_per_token": parts.flops_per_token,
        "flops_per_token_causal": parts.flops_per_token_causal,
        "flops_formula": flops_formula(parts, trainer.settings.block_size),
        "mfu_peak": mfu_peak(trainer.topology, parts.model),
        "total_flops": trainer.calculate_number_total_flops(),
        "optimizer": optimizer_groups(trainer.functions),
        "steps": trainer.steps,
        "tokens": trainer.steps * trainer.tokens_per_step,
        "accumulate_steps": trainer.functions.accumulate_steps,
        "devices": topology,
        "determinism": "bit-exact" if topology["deterministic"] else "fast (not bit-repeatable)",
        "versions": versions(),
        "start_up": trainer.startup.facts(),
    }


def optimizer_groups(functions: Functions) -> list[dict[str, Any]]:
    """Peak rate, decay at step 0 and betas of each group of parameters, as it is trained."""
    rows = functions.optimizer.describe(functions.abstract_state.params)
    return [
        {
            "group": row.group,
            "tensors": row.tensors,
            "parameters": row.parameters,
            "lr": None if row.lr != row.lr else row.lr,  # nan: inside an optax transformation
            "weight_decay": row.decay,
            "betas": list(row.betas),
        }
        for row in rows
    ]


def derivation(trainer: BaseTrainer) -> dict[str, Any]:
    """Derived numbers with their reasons. A resumed run finds most of them in its configuration and derives them no
    more: the rows of its first start stay, as long as they are the same numbers."""
    try:
        saved = read_json(trainer.run_directory.derived)
    except (OSError, ValueError):  # a first start, or a file that is damaged
        saved = {}
    rows = saved.items() if isinstance(saved, dict) else ()
    return trainer.derived | {name: row for name, row in rows if still_holds(trainer, name, row)}


def still_holds(trainer: BaseTrainer, name: str, row: Any) -> bool:
    """Whether this start says no more about the number than that it is given, and it is the same."""
    if not isinstance(row, dict) or "value" not in row:
        return False
    if (now := trainer.derived.get(name)) is not None:
        return bool(now["reason"].endswith("given") and now["value"] == row["value"])
    return bool(name not in trainer.config or plain(trainer.config[name]) == row["value"])


def write_facts(trainer: BaseTrainer, **more: Any) -> None:
    facts = run_facts(trainer) | more
    atomic_write(trainer.run_directory.facts, json.dumps(facts, indent=1, default=str))


def validation_text(trainer: BaseTrainer) -> bytes | None:
    """The held-out bytes the validation measures, in their order; None without text or when there are too many."""
    held_out, tokenizer = trainer.data.validation, trainer.tokenizer
    if held_out is None or tokenizer is None:
        return None
    order = np.lexsort((held_out.rows.index, held_out.rows.source))
    pieces, size = [], 0
    for position in order:
        targets = held_out.read(int(position), 1)["target_ids"][0]
        text = tokenizer.decode(targets[targets >= 0].tolist()).encode("utf-8", errors="replace")
        pieces.append(text)
        size += len(text)
        if size > BASELINE_BYTES:
            return None
    return b"".join(pieces)


def compressor_baselines(trainer: BaseTrainer) -> dict[str, float]:
    """Bits per byte of gzip -9 and xz -9e on the validation text; empty when it is not known."""
    text = None if teaches_chat(trainer) else validation_text(trainer)
    return baselines(text) if text else {}


INFORMATION = "information.md"
"""What `save_information` writes beside the weights."""


COMMAND = re.compile(r"  (\S+/)?(python\S* -m )?bessemer ")


class Output:
    """Lines go to the screen at once and to log.txt as soon as the run directory exists; process 0 only."""

    def __init__(self, directory: RunDirectory, enabled: bool):
        self.directory = directory
        self.enabled = enabled
        self.console = Console(highlight=False, quiet=not enabled)
        self._early: list[str] = []
        self._open = False

    def say(self, text: str) -> None:
        if not self.enabled:
            return
        self.console.print(self._fitted(text), markup=False, soft_wrap=True)
        self._early.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if self._open:
            self._write()

    def _fitted(self, text: str) -> str:
        """Broken at words on a terminal; in files and pipes, and of a command to copy, lines stay whole."""
        if not self.console.is_terminal or COMMAND.match(text):
            return text
        return "\n".join(part for line in text.split("\n") for part in wrapped(line, self.console.width))

    @contextlib.contextmanager
    def preparing(self, name: str) -> Iterator[Any]:
        """A progress callback for data that has to be prepared first; silent when it is there already."""
        if not self.enabled:
            yield None
            return
        with show_progress() as progress:
            yield progress

    def open_log(self) -> None:
        self._open = self.enabled
        self._write()

    def log(self, text: str) -> None:
        """To log.txt alone, for what the screen gets in another way."""
        self._early.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._write()

    def log_error(self, error: BaseException) -> None:
        self._early.append("".join(traceback.format_exception(error)))
        self._write()

    def _write(self) -> None:
        if self._open and self.directory.path.is_dir():
            with open(self.directory.log, "a", encoding="utf-8") as log:
                log.writelines(self._early)
            self._early = []


def write_setup(trainer: BaseTrainer) -> None:
    """config.yaml with every key, and derived.json with each derived or chosen number and its reason."""
    write_branches(
        trainer.run_directory, trainer.branches
    )  # first: it explains why config.yaml is not as it was
    atomic_write(trainer.run_directory.config, trainer.config.to_yaml(), sync=True)
    atomic_write(trainer.run_directory.derived, json.dumps(derivation(trainer), indent=1))
    if len(trainer.stages) > 1:
        atomic_write(
            trainer.run_directory.stages,
            json.dumps(stages.described(trainer.stages, trainer.tokens_per_step), indent=1),
        )
    if problem := mark_origin(trainer.run_directory, trainer.config.tree()):
        trainer.say(
            f"note: this run cannot be marked as started here, so resume may ask for --trust: {problem}"
        )
    write_facts(trainer)


def conclude(trainer: BaseTrainer) -> None:
    """The report, and the last lines on the screen: what was reached, against what, and what to do next."""
    if not trainer.is_process_zero:
        return
    if trainer.lock is not None:
        trainer.lock.check_intact()
    compressors = compressor_baselines(trainer)
    write_facts(trainer, baselines=compressors)
    trainer.run_directory.write_status(state="done", step=trainer.step)
    write_report(trainer.run_directory, curves=trainer.logging.plots)
    for line in final_lines(trainer, compressors):
        trainer.say(line)


def compile_shown(trainer: BaseTrainer) -> None:
    """Make the programs ahead of the loop, and say how long it took and whether the compiler or the cache made them."""
    start, before = time.monotonic(), programs_so_far()
    if not trainer.functions.compiled:
        trainer.say("programs   preparing the training and validation steps")
    if trainer.compile_aot():
        made, seconds = programs_so_far() - before, time.monotonic() - start
        if made.all_found:
            trainer.say(f"loaded     from the cache in {seconds:.1f} s")
        else:
            trainer.say(f"compiled   in {seconds:.1f} s ({made.words}); the next start is quick")
    check_step(trainer.plan, trainer.hooks, trainer.functions)


def save_pretrained(trainer: BaseTrainer, state: Any, directory: Any, to_torch: bool) -> Path:
    """model.safetensors, config.json, tokenizer.json: what is needed to use the model elsewhere."""
    if to_torch:
        return save_for_torch(trainer, state, directory)
    target = Path(directory) if directory is not None else trainer.run_directory.model
    if trainer.is_process_zero:
        with storage("cannot create the directory for the weights"):  # never the run's own, which is there
            target.mkdir(parents=directory is not None, exist_ok=True)
    texts = model_texts(trainer)
    split = trainer.model_parts.split
    if trainer.is_process_zero:
        about = {**dataclasses.asdict(split.lora), "scale": split.lora.scale, "base": trainer.settings.init}
        about |= {"adapted": ["/".join(path) for path in split.adapted]}
        adapters = {"adapters.json": json.dumps(about, indent=1)} if split.adapted else {}
        for name, text in (texts | adapters).items():
            (target / name).write_text(text, encoding="utf-8")
    # After the texts, whose checksums they hold.
    for name, params in (("model", state.whole()), ("ema", state.ema and state.whole(state.ema))):
        if params is not None:
            write_weights(trainer, params, target / f"{name}.safetensors", texts)
    if split.adapted:
        write_weights(trainer, state.params, target / "adapters.safetensors", ["adapters.json"])
    if trainer.is_process_zero:
        trainer.save_information(target / INFORMATION)
    return target


def model_texts(trainer: BaseTrainer) -> dict[str, str]:
    """The files beside the weights: the model's settings, the tokenizer, the rows of lookup layers."""
    tree = trainer.config.tree()
    shape = {name: tree.get(name, {}) for name in ("model", "architecture")}
    texts = {"config.json": json.dumps(shape, indent=1)}
    if trainer.tokenizer is not None:
        texts |= trainer.tokenizer.files
    if (allocation := getattr(trainer.model, "allocation", None)) is not None:
        texts[ALLOCATION] = allocation.to_json()
    return texts


def save_for_torch(trainer: BaseTrainer, state: Any, directory: Any) -> Path:
    """The layout that transformers loads, in `model.weights_dtype`; RUN/model-hf unless a directory is given."""
    model: Any = trainer.model
    if not isinstance(model, LlamaSettings):
        raise InputError(
            f"the {trainer.settings.family} family has no Hugging Face layout; save_pretrained(to_torch=False) writes "
            "plain safetensors."
        )
    target = Path(directory) if directory is not None else trainer.run_directory.path / "model-hf"
    arrays = TreeArrays(readable(trainer, state.whole()), fetch)
    if trainer.is_process_zero:
        export_folder(arrays, model, trainer.tokenizer, target, dtype=model.weights_dtype)
        trainer.save_information(target / INFORMATION)
    return target


def write_weights(trainer: BaseTrainer, params: Any, path: Path, beside: Iterable[str]) -> None:
    """Parameters by path, written by process 0 one at a time."""
    arrays = TreeArrays(readable(trainer, params), fetch)
    if trainer.is_process_zero:
        about = {"format": OURS, "step": str(trainer.step)}
        write_file(path, arrays.signature(), arrays.read, about, beside=beside)


def readable(trainer: BaseTrainer, params: Any) -> dict[str, Any]:
    """Parameters by path, for process 0 to read. Of several processes all take part, and before anything is written: a
    disk that fails the one must not leave the others waiting."""
    leaves = flatten(params)
    if jax.process_count() == 1:
        return leaves
    return {name: fetch(trainer.gather(leaf)) for name, leaf in leaves.items()}


def save_information(trainer: BaseTrainer, path: Any) -> None:
    """A short markdown description: shape, horizon, data, optimizer groups."""
    counts = trainer.model_parts.counts
    lines = [f"# {trainer.spec.name}", "", "| parameters | count |", "|---|---|"]
    lines += [f"| {group} | {count:,} |" for group, count in counts.items()]
    lines += ["", "| derived | value | why |", "|---|---|---|"]
    lines += [f"| {name} | {entry['value']} | {entry['reason']} |" for name, entry in trainer.derived.items()]
    lines += ["", "| group | tensors | parameters | rate | decay |", "|---|---|---|---|---|"]
    for row in optimizer_groups(trainer.functions):
        rate = "-" if row["lr"] is None else f"{row['lr']:g}"
        lines.append(
            f"| {row['group']} | {row['tensors']} | {row['parameters']:,} | {rate} | {row['weight_decay']:g} |"
        )
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
