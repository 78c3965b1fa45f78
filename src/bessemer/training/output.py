"""What a run shows and leaves behind: the header, log.txt, status.json, the final weights."""

from __future__ import annotations

import contextlib
import errno
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bessemer.checkpoint.arrays import explain
from bessemer.data import show_progress
from bessemer.errors import BessemerError, InputError, StorageError, TrainingError
from bessemer.job import RunDirectory, RunLock, atomic_write
from bessemer.job.files import remove_leftovers, storage
from bessemer.report import write_report
from bessemer.training.facts import compressor_baselines, write_facts
from bessemer.training.fetch import fetch
from bessemer.training.finale import final_lines, shown
from bessemer.training.progress import compact
from bessemer.training.report import NonFinite

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

DISK_FAILURES = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.EIO,
    errno.ESTALE,
)


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


@contextlib.contextmanager
def opened(trainer: BaseTrainer) -> Iterator[None]:
    """Own the run directory for the time of the run; the status file says how it ended, whatever the end."""
    directory = trainer.run_directory
    if not trainer.is_process_zero:
        with explained(trainer):
            take_over(trainer)
            yield
        return
    directory.create(exist_ok=trainer.continues)
    with RunLock(directory) as lock:
        trainer.output.open_log()
        if lock.message:
            trainer.say(lock.message)
        try:
            write_setup(trainer)
            directory.write_status(state="running", step=trainer.step, exit_code=None, message="")
            with explained(trainer):
                take_over(trainer)
                yield
            reason = trainer.loop_state.finished or ""
            directory.write_status(state="done", step=trainer.step, exit_code=0, message=reason)
        except BaseException as error:
            record_failure(trainer, error)
            raise


def take_over(trainer: BaseTrainer) -> None:
    """With the lock held: remove what a killed save left, and set checkpoints beyond the restored one aside."""
    if trainer.is_process_zero:
        remove_leftovers(trainer.run_directory.path)
    trainer.checkpoint_manager.clean()
    if trainer.continues:
        trainer.checkpoint_manager.set_aside_after(trainer.step)


def record_failure(trainer: BaseTrainer, error: BaseException) -> None:
    """status.json and log.txt say what happened; where the disk is the problem, stderr still does."""
    code = error.exit_code if isinstance(error, BessemerError) else 1
    state = "stopped" if code == 75 else "failed"
    with contextlib.suppress(OSError, BessemerError):  # the first error is the one to report
        if code == 1:
            trainer.output.log_error(error)
            error.logged_in = trainer.run_directory.log  # type: ignore[attr-defined]
        trainer.run_directory.write_status(state=state, exit_code=code, message=str(error))


@contextlib.contextmanager
def explained(trainer: BaseTrainer) -> Iterator[None]:
    """Turn what training can meet into errors that name cause and remedy."""
    import jax

    try:
        yield
    except NonFinite as error:
        raise TrainingError(
            f"{error} {_last_checkpoint(trainer)} Try a lower optimization.lr or a longer warm-up "
            "(training.warmup_pct), or look at the data near that step."
        ) from error
    except (jax.errors.JaxRuntimeError, MemoryError) as error:  # the device's memory, or the host's
        raise _runtime_error(trainer, error) from error
    except OSError as error:
        if error.errno not in DISK_FAILURES:
            raise
        raise StorageError(
            f"reading or writing {error.filename or 'the run directory'} failed: {error.strerror}. "
            f"{_last_checkpoint(trainer)} "
            f"Free or restore the disk, then: bessemer resume {trainer.run_directory.path}"
        ) from error


def _runtime_error(trainer: BaseTrainer, error: Exception) -> Exception:
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return TrainingError(
            f"out of memory with {trainer.functions.micro} sequences in one pass "
            f"(training.per_device_batch_size). {_last_checkpoint(trainer)} Halve training.per_device_batch_size "
            "(the update stays the same), or set architecture.remat=block."
        )
    import jax

    if jax.process_count() > 1:
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        return StorageError(
            f"another process of this run was lost ({first}). {_last_checkpoint(trainer)} "
            f"Start all processes again with: bessemer resume {trainer.run_directory.path}"
        )
    return error


def _last_checkpoint(trainer: BaseTrainer) -> str:
    steps = trainer.checkpoint_manager.committed()
    return f"The last good checkpoint is step {steps[-1]}." if steps else "There is no checkpoint yet."


def write_setup(trainer: BaseTrainer) -> None:
    """config.yaml with every key, and derived.json with each derived or chosen number and its reason."""
    atomic_write(trainer.run_directory.config, trainer.config.to_yaml(), sync=True)
    atomic_write(trainer.run_directory.derived, json.dumps(trainer.derived, indent=1))
    write_facts(trainer)


def conclude(trainer: BaseTrainer) -> None:
    """The report, and the last lines on the screen: what was reached, against what, and what to do next."""
    if not trainer.is_process_zero:
        return
    compressors = compressor_baselines(trainer)
    write_facts(trainer, baselines=compressors)
    trainer.run_directory.write_status(state="done", step=trainer.step)
    write_report(trainer.run_directory)
    for line in final_lines(trainer, compressors):
        trainer.say(line)


def compile_shown(trainer: BaseTrainer) -> None:
    """Compile ahead of the loop and say how long it took; programs are kept, so the next start is quick."""
    start = time.monotonic()
    if trainer.compile_aot():
        trainer.say(f"compiled   in {time.monotonic() - start:.1f} s")


def header(trainer: BaseTrainer) -> None:
    """The few lines that say what is about to run, and each derived number with its reason."""
    counts, data, topology = trainer.model_parts.counts, trainer.data, trainer.topology
    trainer.say(f"run        {shown(trainer.run_directory.path)}")
    trainer.say(
        f"model      {trainer.settings.family}, {counts['total']:,} parameters ({counts['scaling']:,} scaling)"
    )
    for name, stats in data.plan.stats.items():
        known = [f"{stats[key]:,} {key}" for key in ("documents", "tokens") if key in stats]
        trainer.say(f"data       {shown(name)}: {', '.join(known)}; {data.validation_count:,} rows held out")
    epochs = data.plan.epoch(data.steps)
    trainer.say(
        f"batch      {data.batch_size} × {trainer.settings.block_size} tokens in {trainer.functions.accumulate_steps}"
        f" part(s); {data.steps:,} steps, {compact(data.steps * trainer.tokens_per_step)} tokens, {epochs:.2f} epochs"
    )
    axes = " × ".join(f"{axis} {size}" for axis, size in topology.mesh.shape.items() if size > 1)
    trainer.say(f"devices    {topology.device_count} {topology.platform}{f' ({axes})' if axes else ''}")
    for note in trainer.config.notes:
        trainer.say(f"note       {note}")
    for name, entry in trainer.derived.items():
        if not entry["reason"].endswith("given"):
            trainer.say(f"{name:<30} {entry['value']!s:<12} {entry['reason']}")


def save_pretrained(trainer: BaseTrainer, state: Any, directory: Any, to_torch: bool) -> Path:
    """model.safetensors, config.json, tokenizer.json: what is needed to use the model elsewhere."""
    if to_torch:
        raise InputError(
            "the GPT family has no Hugging Face layout; save_pretrained(to_torch=False) writes plain safetensors."
        )
    target = Path(directory) if directory is not None else trainer.run_directory.model
    if trainer.is_process_zero:
        with storage("cannot create the directory for the weights"):  # never the run's own, which is there
            target.mkdir(parents=directory is not None, exist_ok=True)
    for name, params in (("model", state.params), ("ema", state.ema)):
        if params is not None:
            write_weights(trainer, params, target / f"{name}.safetensors")
    if not trainer.is_process_zero:
        return target
    tree = trainer.config.tree()
    shape = {name: tree.get(name, {}) for name in ("model", "architecture")}
    (target / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")
    if trainer.tokenizer is not None:
        (target / "tokenizer.json").write_text(trainer.tokenizer.to_json(), encoding="utf-8")
    return target


def write_weights(trainer: BaseTrainer, params: Any, path: Path) -> None:
    """Parameters by path, gathered one at a time (all processes take part), written by process 0."""
    from flax.traverse_util import flatten_dict
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    leaves = flatten_dict(params).items()
    flat = {"/".join(names): fetch(trainer.gather(leaf)) for names, leaf in leaves}
    if trainer.is_process_zero:
        temporary = path.with_name(path.name + ".tmp")
        try:
            save_file(flat, temporary, metadata={"format": "bessemer", "step": str(trainer.step)})
        except SafetensorError as error:  # the library's name for a full or vanished disk
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise explain(f"cannot write {path}", error) from error
        temporary.replace(path)


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
