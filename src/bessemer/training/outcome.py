"""How a run ends: it owns its directory while it runs, and whatever the end, status and message say what and why."""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from bessemer.errors import BessemerError, Stopped, StorageError, TrainingError
from bessemer.job import RunLock
from bessemer.storage.files import remove_leftovers
from bessemer.topology import absent_processes, barrier, farewell, first_line
from bessemer.training.console.output import write_setup
from bessemer.training.persistence import frozen
from bessemer.training.persistence.mirror import mirrored
from bessemer.training.setup import microbatch
from bessemer.training.signals import leaving, setting_up
from bessemer.training.state import Unstable

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


# Goodput: the share of wall time, over all starts of a run, that went into steps which are in its result.
#
#     goodput = Σ time of kept steps, less waiting for data  /  Σ time of all starts, each to its last sign of life
#
# What lowers it: start-up, compilation, validation, saving, and steps that were done again because a process
# died before the next checkpoint. Time in a queue, when there was no process, does not count. The numerator
# is in the loop state, so that a restart forgets the steps it forgets; the denominator is in status.json,
# which a kill leaves behind.


def begin(trainer: BaseTrainer) -> dict[str, Any]:
    """Fields of status.json: how often the run was started, when it was now, and the seconds of the starts before."""
    status = trainer.run_directory.read_status() if trainer.continues else {}
    last = max(0.0, status.get("heartbeat", 0.0) - status["began"]) if "began" in status else 0.0
    trainer.wall_before = status.get("wall_before", 0.0) + last
    return {
        "starts": status.get("starts", 0) + 1,
        "began": time.time() - trainer.startup.age,
        "wall_before": trainer.wall_before,
    }


def wall_seconds(trainer: BaseTrainer) -> float:
    """Of all starts so far."""
    return trainer.wall_before + trainer.startup.age


TOGETHER_SECONDS = 3600.0

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


@contextlib.contextmanager
def opened(trainer: BaseTrainer) -> Iterator[None]:
    """Own the run directory for the time of the run; the status file says how it ended, whatever the end."""
    directory = trainer.run_directory
    if not trainer.is_process_zero:
        with (
            explained(trainer),
            leaving(functools.partial(leave, trainer, None)),
            farewell(functools.partial(lost, trainer, None)),
        ):
            take_over(trainer)
            yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(mirrored(trainer))
        with setting_up():
            directory.create(exist_ok=trainer.continues)
            lock = trainer.lock = stack.enter_context(RunLock(directory))
            trainer.output.open_log()
            if lock.message:
                trainer.say(lock.message)
            stack.enter_context(leaving(functools.partial(leave, trainer, lock)))
            stack.enter_context(farewell(functools.partial(lost, trainer, lock)))
            stack.enter_context(recorded(trainer))
            write_setup(trainer)
            start_status(trainer)
        with explained(trainer):
            take_over(trainer)
            yield
        lock.check_intact()
        reason = trainer.loop_state.finished or ""
        directory.write_status(state="done", step=trainer.step, exit_code=0, message=reason)


def together(done: str) -> None:
    """Every process waits until all have come here. Collectives wait for half a minute at most, and a process that
    compiles while another found its programs in the cache is further behind than that."""
    barrier(f"every process has {done}", TOGETHER_SECONDS)


def start_status(trainer: BaseTrainer) -> None:
    change = {"data_change": trainer.data_change} if trainer.data_change else {}
    trainer.run_directory.write_status(
        state="running", step=trainer.step, exit_code=None, message="", **change, **begin(trainer)
    )


@contextlib.contextmanager
def recorded(trainer: BaseTrainer) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        record_failure(trainer, error)
        raise


def leave(trainer: BaseTrainer, lock: RunLock | None, reason: str) -> tuple[int, str]:
    """A signal while there is no loop to finish its step: before the first step, or after the last.

    Called in another thread than the run's, which is ended after this; `lock` is process 0's.
    """
    steps = trainer.checkpoint_manager.committed()
    after = (
        f"with the checkpoint of step {steps[-1]}"
        if steps
        else "before the first checkpoint: it starts again"
    )
    error = Stopped(
        f"{reason}: stopped {after}, as the same run. "
        f"Continue with: bessemer resume {trainer.run_directory.word}"
    )
    if lock is not None:
        record_failure(trainer, error)
        lock.release()
    return error.exit_code, str(error)


def lost(trainer: BaseTrainer, lock: RunLock | None, what: str) -> str:
    """Another process was lost while this one waits for it; the same thread and end as in `leave`."""
    error = StorageError(
        f"{what} {_last_checkpoint(trainer)} "
        f"Start all processes again with: bessemer resume {trainer.run_directory.word}"
    )
    if lock is not None:
        record_failure(trainer, error)
        lock.release()
    return str(error)


def take_over(trainer: BaseTrainer) -> None:
    """With the lock held: remove what a killed save left, and set checkpoints beyond the restored one aside."""
    if trainer.is_process_zero:
        remove_leftovers(trainer.run_directory.path)
    trainer.checkpoint_manager.clean()
    if trainer.continues:
        trainer.checkpoint_manager.set_aside_after(trainer.step)
        frozen.drop_after(trainer, trainer.step)


def record_failure(trainer: BaseTrainer, error: BaseException) -> None:
    """status.json and log.txt say what happened; where the disk is the problem, stderr still does."""
    if trainer.lock is not None and not trainer.lock.is_intact():
        return  # the directory was deleted: nothing is made again in it
    code = error.exit_code if isinstance(error, BessemerError) else 1
    state = "stopped" if code == 75 else "failed"
    with contextlib.suppress(OSError, BessemerError):  # the first error is the one to report
        if code == 1:
            trainer.output.log_error(error)
            error.logged_in = trainer.run_directory.log  # type: ignore[attr-defined]
        else:
            trainer.output.log(f"{state:<10} {error}")
        trainer.run_directory.write_status(state=state, exit_code=code, message=str(error))


@contextlib.contextmanager
def explained(trainer: BaseTrainer) -> Iterator[None]:
    """Turn what training can meet into errors that name cause and remedy."""
    try:
        yield
    except Unstable as error:
        raise TrainingError(f"{error} {_last_checkpoint(trainer)} {_remedy(trainer, error)}") from error
    except (jax.errors.JaxRuntimeError, MemoryError) as error:  # the device's memory, or the host's
        raise _runtime_error(trainer, error) from error
    except OSError as error:
        if error.errno not in DISK_FAILURES:
            raise
        raise StorageError(
            f"reading or writing {error.filename or 'the run directory'} failed: {error.strerror}. "
            f"{_last_checkpoint(trainer)} "
            f"Free or restore the disk, then: bessemer resume {trainer.run_directory.word}"
        ) from error


def _runtime_error(trainer: BaseTrainer, error: Exception) -> Exception:
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        what, remedy = _memory_remedy(trainer, error)
        return TrainingError(
            f"out of memory in {what} ({first_line(error)}). {_last_checkpoint(trainer)} {remedy}"
        )
    if jax.process_count() > 1:
        absent = ", ".join(map(str, absent_processes()))
        lost = f"process {absent} gives no sign of life" if absent else "all processes still answer"
        return StorageError(
            f"process {jax.process_index()} could not work with the others: {lost} ({first_line(error)}). "
            f"{_last_checkpoint(trainer)} "
            f"Start all processes again with: bessemer resume {trainer.run_directory.word}"
        )
    return error


def _remedy(trainer: BaseTrainer, error: Unstable) -> str:
    """What to try. A run that never made an update has not learnt too fast: it began with what is no number."""
    if trainer.loop_state.skipped_steps >= error.step:
        begun = "" if trainer.settings.init is None else f" in the weights of init={trainer.settings.init},"
        return (
            f"No step ever gave an update, so the learning rate is not the cause: look for it{begun} in the data, or "
            "in the model."
        )
    spikes = " If these are no true spikes, raise guard.spike_sigma." if trainer.guard.spike_sigma > 0 else ""
    return (
        "Try a new run with a lower optimization.lr or a longer warm-up (training.warmup_pct), and look at the data "
        f"near that step.{spikes}"
    )


def _last_checkpoint(trainer: BaseTrainer) -> str:
    steps = trainer.checkpoint_manager.committed()
    return f"The last good checkpoint is step {steps[-1]}." if steps else "There is no checkpoint yet."


class Activity(NamedTuple):
    """What runs now, and what to change when memory does not suffice for it; no change: a smaller micro-batch."""

    what: str
    change: str | None = None


def _memory_remedy(trainer: BaseTrainer, error: Exception) -> tuple[str, str]:
    """(what ran out of memory, what to do)."""
    micro = f"a pass over {trainer.functions.micro} sequences"
    activity = trainer.activity or Activity(micro)
    change = activity.change
    if isinstance(error, MemoryError):
        change = "Free memory on this machine, or lower data.prefetch and data.workers"
    if change is None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # a device that can no longer even compile
            return activity.what, microbatch.remedy(trainer)
        change = "Set a smaller training.per_device_batch_size (the update stays the same)"
    return activity.what, f"{change}, then continue with: bessemer resume {trainer.run_directory.word}"


@contextlib.contextmanager
def doing(trainer: BaseTrainer, what: str, change: str | None = None) -> Iterator[None]:
    """Something besides the steps that may run out of memory; kept on an error, so that it can be named."""
    before, trainer.activity = trainer.activity, Activity(what, change)
    yield
    trainer.activity = before
