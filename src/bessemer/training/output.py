"""What a run shows and leaves behind: the header, log.txt, status.json, the final weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console

from bessemer.checkpoint.tree import flatten
from bessemer.checkpoint.weights import write_file
from bessemer.data import show_progress
from bessemer.errors import InputError, StorageError
from bessemer.interop.give import export_folder
from bessemer.interop.names import TreeArrays
from bessemer.job import RunDirectory, atomic_write
from bessemer.job.files import storage
from bessemer.job.trust import mark_origin
from bessemer.models.allocation import FILE as ALLOCATION
from bessemer.models.llama_settings import LlamaSettings
from bessemer.report import write_report
from bessemer.training import frozen, stages
from bessemer.training.facts import compressor_baselines, write_facts
from bessemer.training.fetch import fetch
from bessemer.training.finale import final_lines, shown
from bessemer.training.horizon import repeats
from bessemer.training.idle import idle
from bessemer.training.progress import compact

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


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
        self.console.print(text, markup=False, soft_wrap=True)
        self._early.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if self._open:
            self._write()

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
    atomic_write(trainer.run_directory.config, trainer.config.to_yaml(), sync=True)
    atomic_write(trainer.run_directory.derived, json.dumps(trainer.derived, indent=1))
    if len(trainer.stages) > 1:
        atomic_write(trainer.run_directory.stages, json.dumps(stages.described(trainer), indent=1))
    try:
        mark_origin(trainer.run_directory, trainer.config.tree())
    except StorageError as error:
        trainer.say(f"note: `bessemer resume` will ask for --trust, as this run could not be marked: {error}")
    write_facts(trainer)


def conclude(trainer: BaseTrainer) -> None:
    """The report, and the last lines on the screen: what was reached, against what, and what to do next."""
    if not trainer.is_process_zero:
        return
    compressors = compressor_baselines(trainer)
    write_facts(trainer, baselines=compressors)
    trainer.run_directory.write_status(state="done", step=trainer.step)
    write_report(trainer.run_directory, curves=trainer.logging.plots)
    for line in final_lines(trainer, compressors):
        trainer.say(line)


def compile_shown(trainer: BaseTrainer) -> None:
    """Compile ahead of the loop and say how long it took; programs are kept, so the next start is quick."""
    start = time.monotonic()
    if not trainer.functions.compiled:
        trainer.say("compiling  the training and validation steps; kept, so that the next start is quick")
    if trainer.compile_aot():
        trainer.say(f"compiled   in {time.monotonic() - start:.1f} s")


def header(trainer: BaseTrainer) -> None:
    """The few lines that say what is about to run, and each derived number with its reason."""
    counts, data, topology = trainer.model_parts.counts, trainer.data, trainer.topology
    trainer.say(f"run        {shown(trainer.run_directory.path)}")
    trainer.say(
        f"model      {trainer.settings.family}, {counts['total']:,} parameters ({counts['scaling']:,} scaling)"
    )
    if (trained := frozen.describe(trainer)) is not None:
        trainer.say(f"trains     {trained}")
    for name, stats in data.plan.stats.items():
        known = [f"{stats[key]:,} {key}" for key in ("documents", "prompts", "tokens") if key in stats]
        if "pairs" in stats:
            known = [f"{stats['pairs']:,} pairs in {stats['rows']:,} rows", *known[1:]]
            known += [f"{stats['padding_share']:.1%} padding", f"{stats['truncated']:,} prompts truncated"]
            known += [f"{stats['without_targets']:,} left out"]
        trainer.say(f"data       {shown(name)}: {', '.join(known)}; {data.validation_count:,} rows held out")
        for remark in supervision(trainer, stats):
            trainer.say(f"note       {shown(name)}: {remark}")
    epochs = data.plan.epoch(data.steps)
    trainer.say(
        f"batch      {data.batch_size} × {trainer.settings.block_size} tokens in {trainer.functions.accumulate_steps}"
        f" part(s); {data.steps:,} steps, {compact(data.steps * trainer.tokens_per_step)} tokens, {epochs:.2f} epochs"
    )
    axes = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.shape.items() if size > 1)
    trainer.say(f"devices    {topology.device_count} {topology.platform}{f' ({axes})' if axes else ''}")
    for note in (*topology.notes, *trainer.config.notes, *idle(trainer), *repeats(trainer.config, epochs)):
        trainer.say(f"note       {note}")
    for name, entry in trainer.derived.items():
        if not entry["reason"].endswith("given"):
            trainer.say(f"{name:<30} {entry['value']!s:<12} {entry['reason']}")


def supervision(trainer: BaseTrainer, stats: dict[str, Any]) -> list[str]:
    """What is unusual about which tokens of conversations are learnt, and with what before them."""
    if trainer.settings.objective != "sft" or "documents" not in stats:
        return []
    remarks = []
    if stats["target_tokens"] >= stats["tokens"] - stats["documents"]:
        remarks.append("texts without turns; every token is learnt, not only those of an assistant")
    if split := stats.get("split_documents"):
        remarks.append(
            f"{split:,} of {stats['documents']:,} conversations are longer than "
            f"architecture.block_size={trainer.settings.block_size} and learnt in pieces, of which only the first sees "
            "the beginning; a larger block keeps them whole, the style PADDED truncates them"
        )
    return remarks


def save_pretrained(trainer: BaseTrainer, state: Any, directory: Any, to_torch: bool) -> Path:
    """model.safetensors, config.json, tokenizer.json: what is needed to use the model elsewhere."""
    if to_torch:
        return save_for_torch(trainer, state, directory)
    target = Path(directory) if directory is not None else trainer.run_directory.model
    if trainer.is_process_zero:
        with storage("cannot create the directory for the weights"):  # never the run's own, which is there
            target.mkdir(parents=directory is not None, exist_ok=True)
    for name, params in (("model", state.whole()), ("ema", state.ema and state.whole(state.ema))):
        if params is not None:
            write_weights(trainer, params, target / f"{name}.safetensors")
    if (split := trainer.model_parts.split).adapted:
        write_weights(trainer, state.params, target / "adapters.safetensors")
        if trainer.is_process_zero:
            about = {
                **dataclasses.asdict(split.lora),
                "scale": split.lora.scale,
                "base": trainer.settings.init,
            }
            about |= {"adapted": ["/".join(path) for path in split.adapted]}
            (target / "adapters.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    if not trainer.is_process_zero:
        return target
    tree = trainer.config.tree()
    shape = {name: tree.get(name, {}) for name in ("model", "architecture")}
    (target / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")
    if trainer.tokenizer is not None:
        trainer.tokenizer.save(target)
    if (allocation := getattr(trainer.model, "allocation", None)) is not None:
        (target / ALLOCATION).write_text(allocation.to_json(), encoding="utf-8")
    return target


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
    return target


def write_weights(trainer: BaseTrainer, params: Any, path: Path) -> None:
    """Parameters by path, written by process 0 one at a time."""
    arrays = TreeArrays(readable(trainer, params), fetch)
    if trainer.is_process_zero:
        about = {"format": "bessemer", "step": str(trainer.step)}
        write_file(path, arrays.signature(), arrays.read, about)


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
    for row in trainer.functions.optimizer.describe(trainer.functions.abstract_state.params):
        lines.append(f"| {row.group} | {row.tensors} | {row.parameters:,} | {row.lr:g} | {row.decay:g} |")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
