"""What a run prints and leaves behind: log.txt, facts.json, derived.json, the last lines, the final weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from bessemer.config import Config, dotted
from bessemer.config.bounded import read_json
from bessemer.config.values import plain
from bessemer.console import compact, duration, fit, markdown_table, shown, wrapped
from bessemer.data import show_progress
from bessemer.data.stores.catalog import is_code
from bessemer.errors import InputError, printable, runnable, this_python
from bessemer.generate.base import MergedArrays, read_record
from bessemer.generate.load import base_arrays
from bessemer.interop.config import TreeArrays
from bessemer.interop.folder import export_folder
from bessemer.job import RunDirectory
from bessemer.job.trust import mark_origin
from bessemer.models.llama import Llama
from bessemer.models.lora import merge_adapters
from bessemer.models.protocol import Decoding, ValueModel
from bessemer.registry import SELECTORS, datasets, models, objectives
from bessemer.report import baselines, write_report
from bessemer.report.metrics import MetricsFile
from bessemer.report.summary import NOTHING_TO_LEARN, nothing_to_learn, too_small, training_seconds
from bessemer.storage.files import atomic_write, storage
from bessemer.storage.weights import OURS, Arrays, flatten, write_file
from bessemer.training import stages
from bessemer.training.feed import fetch
from bessemer.training.persistence.checkpoints import Branch, asset_files, versions, write_branches
from bessemer.training.settings import RunContext
from bessemer.training.setup.compiled import Functions, RunPlan, programs_so_far
from bessemer.training.setup.model import flops_formula, mfu_peak
from bessemer.training.state import TrainState

# --- the last lines: what the run reached, against what, a sample, and what to do next ---
BAR = "  | "
SAMPLE_LINES = 8
WATCH = "  bessemer dash                              # all runs in a browser"
OWN_TEXT = "  bessemer train {}training.dataset=my.txt     # the same on your own text"
DEFAULT_RECIPE = "quickstart"
TEACH = "  bessemer train sft init={} training.dataset=chats.jsonl"


def final_lines(plan: RunPlan, compressors: dict[str, float], width: int) -> list[str]:
    directory, held_out = plan.context.directory, plan.data.validation
    rows = list(MetricsFile(directory.metrics).rows())
    samples = list(MetricsFile(directory.samples).rows())
    validations = [row for row in rows if row.get("val_loss") is not None]
    before = "untrained" if plan.context.settings.init is None else "before"
    error = validations[-1].get("val_bpb_se") if validations else None
    small = None if held_out is None else too_small(held_out.description, error)
    path = shown(directory.path)
    curves = f", curves in {path}/plots" if plan.context.logging.plots else ""
    return [
        "",
        *reward_line(rows),
        *result_table(validations, compressors, before),
        *([f"warning: {small}"] if small else []),
        *evaluated(validations),
        *speed_lines(rows),
        "",
        *(sample_lines(samples[-1], width, trains_chat(plan)) if samples else []),
        *closing_lines(path, next_commands(plan, samples, shlex.quote(path)), curves),
    ]


def closing_lines(path: str, commands: Iterable[str], curves: str = "") -> list[str]:
    return [f"run     {path}", f"report  {path}/report.md{curves}", "", "next", *map(runnable, commands)]


def next_commands(plan: RunPlan, samples: list[dict[str, Any]], path: str) -> list[str]:
    """Return commands that work on this run. None of them imports code of the user's (generate/load.py), so a model of
    their own is used from Python."""
    model, given = plan.model.model, plan.context.given
    writes = plan.model.tokenizer is not None and isinstance(model, Decoding)
    names = last_names(plan)
    has_data = given.dataset_train is None and not any(map(names_own_code, names))
    report = f"  bessemer report {path} --html"
    if given.model is not None or is_own(model):
        has_data = given.dataset_train is None and not any(map(is_code, names))  # a registered one is imported too
        usable = from_python(model, path, writes, has_data) if given.model is None else []
        return [*usable, report, WATCH, *([same_on_own_text(plan)] if plan.context.has_recipe_data else [])]
    if isinstance(model, ValueModel) or (trains_chat(plan) and not writes):  # a reward model writes no text
        return [report, WATCH]
    if trains_chat(plan):
        return [f"  bessemer chat {path}", f"  bessemer serve {path}", WATCH]
    teach = [f"{TEACH.format(path)}     # teach it to answer"] if writes else []
    return [
        *([f"  bessemer sample {path} --prompt {shlex.quote(prompt_to_try(samples))}"] if writes else []),
        f"  bessemer eval {path} --tasks bpb" if has_data else report,
        WATCH,
        *([same_on_own_text(plan)] if plan.context.has_recipe_data else teach),
    ]


def is_own(part: Any) -> bool:
    """Return whether the class of a part is not one of Bessemer's."""
    return type(part).__module__.partition(".")[0] != "bessemer"


def names_own_code(dataset: str) -> bool:
    """Return whether the name of a dataset stands for code of the user's, which an evaluation never imports."""
    if dataset in datasets:
        function = datasets.get(dataset)
        function = function.func if isinstance(function, functools.partial) else function
        return str(getattr(function, "__module__", "")).partition(".")[0] != "bessemer"
    return is_code(dataset)


def last_names(plan: RunPlan) -> list[str]:
    """Return the names of the last stage's datasets."""
    return [sampling.name for sampling in plan.context.settings.datasets[-1]] if plan.context.settings.datasets else []


def from_python(model: Any, path: str, writes: bool, has_data: bool) -> list[str]:
    """Return a line for Python that uses a registered model of the user's; none if it would not find the model."""
    name = next((entry.name for entry in models if entry.value is type(model)), None)
    file = getattr(sys.modules.get(type(model).__module__), "__file__", None)
    if name is None or file is None or not (writes or has_data):
        return []
    place, call = Path(file).resolve(), "sample('def ')" if writes else "evaluate(['bpb'])"
    before = "" if place.parent == Path.cwd().resolve() else f"PYTHONPATH={shlex.quote(shown(place.parent))} "
    code = f"import {place.stem}, bessemer as bm; print(bm.Run({shlex.split(path)[0]!r}).{call})"
    return [f"  {before}{this_python()} -c {shlex.quote(code)}"] if place.stem.isidentifier() else []


def same_on_own_text(plan: RunPlan) -> str:
    """Return the command that trains the same recipe, with the same parts, on other text."""
    config = plan.context.config
    recipe = config.provenance["training/dataset"].detail
    asked = config.asked("plugins", "job", *(key for key in SELECTORS if key in config))
    values = {dotted(key): plain(config[key]) for key in dict.fromkeys(asked)}
    if "plugins" in values:
        values["plugins"] = [shown(word) for word in values["plugins"]]
    texts = {
        key: f"[{','.join(map(str, value))}]" if isinstance(value, list) else value for key, value in values.items()
    }
    begin = [] if recipe == DEFAULT_RECIPE and not texts else [recipe]
    given = shlex.join([*begin, *(f"{key}={value}" for key, value in texts.items())])
    return OWN_TEXT.format(f"{given} " if given else "")


def reward_line(rows: list[dict[str, Any]]) -> list[str]:
    """Return the first and last reward of a run that has rewards: greedy on held-out prompts, or else of what was
    sampled; and a warning if no group ever had two rewards."""
    held_out, sampled = ([row for row in rows if row.get(name) is not None] for name in ("val_reward", "reward"))
    found, name = (held_out, "val_reward") if held_out else (sampled, "reward")
    if not found:
        return []
    what = "on held-out prompts, greedy" if held_out else "of sampled answers"
    first, last = found[0], found[-1]
    lines = [f"reward {what}: {first[name]:.3f} at step {first['step']}, {last[name]:.3f} at step {last['step']}"]
    flat = [row["flat_groups"] for row in rows if row.get("flat_groups") is not None]
    return [*lines, f"warning: {NOTHING_TO_LEARN}"] if nothing_to_learn(flat) else lines


def trains_chat(plan: RunPlan) -> bool:
    """Return whether the objective trains on conversations, so that compressing text is not its goal."""
    return "chat" in objectives.entry(plan.context.settings.objective).traits


def result_table(
    validations: list[dict[str, Any]], compressors: dict[str, float], before: str = "untrained"
) -> list[str]:
    """Bits per byte of the held-out text, worst first, with a bar each: shorter is better."""
    known = [row for row in validations if row.get("val_bpb") is not None]
    if not known:
        return [f"validation loss {row['val_loss']:.4f} at step {row['step']}{ranked(row)}" for row in validations[-1:]]
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
    """Return a line per evaluation: before the first step and after the last."""
    if not validations:
        return []
    first, last = validations[0], validations[-1]
    return [
        f"  {key.removeprefix('eval/')}: {first[key]:.4f} before, {last[key]:.4f} after"
        for key in last
        if key.startswith("eval/") and key in first and first["step"] == 0 < last["step"]
    ]


def ranked(row: dict[str, Any]) -> str:
    """Return the share of pairs ranked correctly, for a run that compares answers."""
    if "val_pref_acc" not in row:
        return ""
    return f"; {row['val_pref_acc']:.1%} of held-out pairs ranked correctly, margin {row['val_margin']:.3f}"


def speed_lines(rows: list[dict[str, Any]]) -> list[str]:
    timed = [row for row in rows if row.get("time/tok_per_s")]
    if not timed:
        return []
    speed = sorted(row["time/tok_per_s"] for row in timed)[len(timed) // 2]
    spent = duration(training_seconds(timed))
    return [f"  {compact(timed[-1]['tokens'])} tokens in {spent} of training, {compact(speed)} tokens/s"]


def prompt_to_try(samples: list[dict[str, Any]]) -> str:
    """Return the first line of the last preview's prompt, cut to fit the screen."""
    lines = samples[-1]["prompt"].strip().splitlines() if samples else []
    return lines[0][:32].strip() if lines else "Once upon a time"


def sample_lines(sample: dict[str, Any], width: int, chat: bool) -> list[str]:
    width -= len(BAR)
    text = fit(sample["prompt"], 3 * width) + ("▸" if chat else "") + sample["completion"]
    lines = [part for line in text.splitlines() for part in wrapped(line, width)]
    return ["sample", *(f"{BAR}{line}" for line in lines[:SAMPLE_LINES]), ""]


# --- the first files: facts.json holds what a report needs beyond configuration and metrics ---
BASELINE_BYTES = 16 << 20
"""Held-out text up to this size is also compressed with gzip and xz; more would take minutes."""


def run_facts(
    plan: RunPlan, functions: Functions, trained: int, total_flops: float, start_up: dict[str, Any] | None
) -> dict[str, Any]:
    """Counts, FLOPs, devices and versions. trained: number of trained parameters. start_up: StartUp.facts()."""
    parts, held_out, topology = plan.model, plan.data.validation, plan.context.topology.describe()
    base = read_record(plan.context.directory)
    return {
        "data": plan.data.plan.stats,
        "validation_sequences": plan.data.validation_count,
        "validation": {} if held_out is None else held_out.description,
        "parameters": parts.counts,
        "trained_parameters": trained,
        "base": None if base is None else {"path": base.source or base.path, "sha256": base.sha256},
        "flops_per_token": parts.flops_per_token,
        "flops_per_token_causal": parts.flops_per_token_causal,
        "flops_formula": flops_formula(parts, plan.context.settings.block_size),
        "mfu_peak": mfu_peak(plan.context.topology, parts.model),
        "total_flops": total_flops,
        "optimizer": optimizer_groups(functions),
        "steps": plan.data.steps,
        "tokens": plan.tokens,
        "accumulate_steps": functions.accumulate_steps,
        "devices": topology,
        "determinism": "bit-exact" if topology["deterministic"] else "fast (not bit-repeatable)",
        "versions": versions(),
        "start_up": start_up,
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


def derivation(context: RunContext) -> dict[str, Any]:
    """Derived numbers with their reasons. A resumed run reads most of them from its configuration instead of deriving
    them: the rows of its first start stay, as long as the numbers are the same."""
    config, derived, given = context.config, context.notes.derived, context.notes.given
    try:
        saved = read_json(context.directory.derived)
    except (OSError, ValueError):  # a first start, or a damaged file
        saved = {}
    rows = saved.items() if isinstance(saved, dict) else ()
    return derived | {
        name: row for name, row in rows if still_holds(config, derived.get(name), name, row, given=name in given)
    }


def still_holds(config: Config, now: dict[str, Any] | None, name: str, row: Any, given: bool) -> bool:
    """Return whether `now`, this start's row of a derived number, adds nothing to the saved `row` of the same value.

    given: this start did not derive the number; it was set, as by the configuration of the run.
    """
    if not isinstance(row, dict) or "value" not in row:
        return False
    if now is not None:
        return bool(given and now["value"] == row["value"])
    return bool(name not in config or plain(config[name]) == row["value"])


def write_facts(directory: RunDirectory, facts: Mapping[str, Any]) -> None:
    atomic_write(directory.facts, json.dumps(facts, indent=1, default=str))


def write_setup(plan: RunPlan, branches: Sequence[Branch]) -> None:
    """Write config.yaml with every key, and derived.json with each derived or chosen number and its reason."""
    context, directory = plan.context, plan.context.directory
    write_branches(directory, branches)  # first: it explains why config.yaml is not as it was
    write_config(directory, context.config, context.notes.say)
    atomic_write(directory.derived, json.dumps(derivation(context), indent=1))
    if len(plan.stages) > 1:
        atomic_write(directory.stages, json.dumps(stages.described(plan.stages, plan.tokens_per_step), indent=1))


def write_config(directory: RunDirectory, config: Config, say: Callable[[str], None]) -> None:
    """Write config.yaml, and mark the run as started here."""
    atomic_write(directory.config, config.to_yaml(), sync=True)
    if problem := mark_origin(directory, config.tree()):
        say(f"note: this run cannot be marked as started here, so resume may ask for --trust: {problem}")


def validation_text(plan: RunPlan) -> bytes | None:
    """Return the held-out bytes the validation measures, in their order; None without text or if there are too many."""
    held_out, tokenizer = plan.data.validation, plan.model.tokenizer
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


def conclude(plan: RunPlan, step: int, facts: Mapping[str, Any], width: int) -> None:
    """Write the report and print the last lines; process 0 only."""
    context, text = plan.context, None if trains_chat(plan) else validation_text(plan)
    compressors = baselines(text) if text else {}
    write_facts(context.directory, {**facts, "baselines": compressors})
    context.directory.write_status(state="done", step=step)
    write_report(context.directory, curves=context.logging.plots)
    for line in final_lines(plan, compressors, width):
        context.notes.say(line)


def compile_shown(compile_steps: Callable[[], bool], compiled: bool, say: Callable[[str], None]) -> None:
    """Call `compile_steps`; print how long it took and whether the compiler or the cache made the programs."""
    start, before = time.monotonic(), programs_so_far()
    if not compiled:
        say("programs   preparing the training and validation steps")
    if compile_steps():
        made, seconds = programs_so_far() - before, time.monotonic() - start
        if made.all_found:
            say(f"loaded     from the cache in {seconds:.1f} s")
        else:
            say(f"compiled   in {seconds:.1f} s ({made.words}); the next start is quick")


# --- the screen and log.txt ---
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
        text = printable(text)  # a preview is whatever the model writes
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
    def preparing(self) -> Iterator[Any]:
        """Yield a progress callback for data that must be prepared first; silent if it is prepared already."""
        if not self.enabled:
            yield None
            return
        with show_progress() as progress:
            yield progress

    def open_log(self) -> None:
        self._open = self.enabled
        self._write()

    def log(self, text: str) -> None:
        """Write to log.txt alone, for text that the screen gets in another way."""
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


# --- the final weights as plain files ---
INFORMATION = "information.md"
"""What `save_information` writes beside the weights."""


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """Writes the parameters of a state of `step`, and the files needed to use them elsewhere.

    gather: replicates an array over all devices. save_information: writes a description of the run to a path.
    """

    plan: RunPlan
    step: int
    gather: Callable[[Any], Any]
    save_information: Callable[[Path], None]

    @property
    def writes(self) -> bool:
        return self.plan.context.topology.is_process_zero

    def save(self, state: TrainState, directory: str | Path | None) -> Path:
        """Write model.safetensors, config.json, tokenizer.json. With LoRA: adapters alone where the base stays outside
        the run, else the merged model, and the adapters beside it."""
        target = self.plan.context.directory.model if directory is None else Path(directory)
        texts, split = model_texts(self.plan), self.plan.model.split
        alone = read_record(self.plan.context.directory) is not None
        beside = split.adapted and not alone
        if self.writes:
            with storage("cannot create the directory for the weights"):  # the run's own directory is there
                target.mkdir(parents=directory is not None, exist_ok=True)
            about = {**dataclasses.asdict(split.lora), "scale": split.lora.scale}
            about |= {"base": self.plan.context.settings.init, "adapted": ["/".join(path) for path in split.adapted]}
            adapters = {"adapters.json": json.dumps(about, indent=1)} if beside else {}
            for name, text in (texts | adapters).items():
                (target / name).write_text(text, encoding="utf-8")
        # after the texts, whose checksums they hold
        for name, params in (("model", state.params), ("ema", state.ema)):
            if params is not None:
                self._write(params if alone else state.whole(params), target / f"{name}.safetensors", texts)
        if beside:
            self._write(state.params, target / "adapters.safetensors", ["adapters.json"])
        if self.writes:
            self.save_information(target / INFORMATION)
        return target

    def save_for_torch(self, state: TrainState, directory: str | Path | None) -> Path:
        """Write the layout that transformers loads, in `model.weights_dtype`; RUN/model-hf unless a directory is
        given. Adapters of a quantized base are merged into the base as it is stored."""
        model: Any = self.plan.model.model
        if not isinstance(model, Llama):
            raise InputError(
                f"the {self.plan.context.settings.family} family has no Hugging Face layout; "
                "save_pretrained(to_torch=False) writes plain safetensors."
            )
        target = self.plan.context.directory.path / "model-hf" if directory is None else Path(directory)
        record, split = read_record(self.plan.context.directory), self.plan.model.split
        arrays: Arrays
        if split.quantized and record is not None:
            arrays = MergedArrays(base_arrays(self.plan.context.directory, record), self._arrays(state.params), split)
        else:
            arrays = self._arrays(state.whole())
        if self.writes:
            export_folder(arrays, model, self.plan.model.tokenizer, target, dtype=model.weights_dtype)
            self.save_information(target / INFORMATION)
        return target

    def _write(self, params: Any, path: Path, beside: Iterable[str]) -> None:
        """Parameters by path, written by process 0 one at a time."""
        arrays = self._arrays(params)
        if self.writes:
            about = {"format": OURS, "step": str(self.step)}
            write_file(path, arrays.signature(), arrays.read, about, beside=beside)

    def _arrays(self, params: Any) -> TreeArrays:
        """Parameters by path, for process 0 to read. Several processes gather them first, before anything is written:
        a full disk on process 0 must not leave the others waiting."""
        leaves = flatten(merge_adapters(params))
        if jax.process_count() > 1:
            leaves = {name: fetch(self.gather(leaf)) for name, leaf in leaves.items()}
        return TreeArrays(leaves, fetch)


def model_texts(plan: RunPlan) -> dict[str, str]:
    """Return the files beside the weights: the model's settings, which name the base of adapters, and those of
    `asset_files`."""
    tree = plan.context.config.tree()
    shape = {name: tree.get(name, {}) for name in ("model", "architecture")}
    if (base := read_record(plan.context.directory)) is not None:
        shape |= {"lora": tree.get("lora", {}), "base": base.as_json()}
    return {"config.json": json.dumps(shape, indent=1), **asset_files(plan.model)}


def information(name: str, plan: RunPlan, functions: Functions) -> str:
    """Return a short Markdown description: parameters, derived numbers, optimizer groups."""
    counts = [(group, f"{count:,}") for group, count in plan.model.counts.items()]
    derived = [(number, row["value"], row["reason"]) for number, row in plan.context.notes.derived.items()]
    groups = []
    for row in optimizer_groups(functions):
        rate = "-" if row["lr"] is None else f"{row['lr']:g}"
        groups.append((row["group"], row["tensors"], f"{row['parameters']:,}", rate, f"{row['weight_decay']:g}"))
    lines = [
        f"# {name}",
        "",
        *markdown_table(("parameters", "count"), counts),
        "",
        *markdown_table(("derived", "value", "why"), derived),
        "",
        *markdown_table(("group", "tensors", "parameters", "rate", "decay"), groups),
    ]
    return "\n".join(lines) + "\n"
