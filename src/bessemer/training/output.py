"""What a run shows and leaves behind: log.txt, derived.json, the final weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console

from bessemer.checkpoint.tree import flatten
from bessemer.checkpoint.weights import OURS, write_file
from bessemer.data import show_progress
from bessemer.errors import InputError
from bessemer.interop.give import export_folder
from bessemer.interop.names import TreeArrays
from bessemer.job import RunDirectory, atomic_write
from bessemer.job.files import storage
from bessemer.job.trust import mark_origin
from bessemer.models.allocation import FILE as ALLOCATION
from bessemer.models.llama_settings import LlamaSettings
from bessemer.report import write_report
from bessemer.report.table import wrapped
from bessemer.training import microbatch, stages
from bessemer.training.branches import write_branches
from bessemer.training.cache import programs_so_far
from bessemer.training.facts import compressor_baselines, derivation, optimizer_groups, write_facts
from bessemer.training.fetch import fetch
from bessemer.training.finale import final_lines

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


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
        atomic_write(trainer.run_directory.stages, json.dumps(stages.described(trainer), indent=1))
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
    microbatch.check_step(trainer)


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
    for row in optimizer_groups(trainer):
        rate = "-" if row["lr"] is None else f"{row['lr']:g}"
        lines.append(
            f"| {row['group']} | {row['tensors']} | {row['parameters']:,} | {rate} | {row['weight_decay']:g} |"
        )
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
