"""How a run ends: it owns its directory while it runs, and status.json and log.txt say how it ended and why."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from bessemer.checkpoint import Checkpoints
from bessemer.errors import BessemerError, Stopped, StorageError, TrainingError
from bessemer.job import RunDirectory, RunLock
from bessemer.storage.files import remove_leftovers
from bessemer.topology import absent_processes, barrier, farewell, first_line
from bessemer.training.output import Output
from bessemer.training.persistence import reference
from bessemer.training.persistence.mirror import Mirror, mirrored
from bessemer.training.settings import RunContext
from bessemer.training.signals import handle_signals_with, signals_delayed
from bessemer.training.state import Activity, RunState, Unstable

# Goodput: the share of wall time, over all starts of a run, spent on steps that are part of its result.
#
#     goodput = Σ time of kept steps, less waiting for data  /  Σ time of all starts, each to its last heartbeat
#
# Startup, compilation, validation, saving and steps repeated after a crash lower it; time in a queue, without a
# process, does not count. The numerator is in the loop state, so a restart forgets the steps that it repeats; the
# denominator is in status.json, which survives a kill.


def goodput_fields(directory: RunDirectory, continues: bool, age: float) -> dict[str, Any]:
    """Return fields of status.json: the number of starts, when this one began (`age` seconds ago), and the seconds of
    earlier ones."""
    status = directory.read_status() if continues else {}
    last = max(0.0, status.get("heartbeat", 0.0) - status["began"]) if "began" in status else 0.0
    return {
        "starts": status.get("starts", 0) + 1,
        "began": time.time() - age,
        "wall_before": status.get("wall_before", 0.0) + last,
    }


WAIT_SECONDS = 3600.0

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


def wait_for_all(done: str) -> None:
    """Wait until every process gets here. Collectives time out after half a minute, and a process that compiles lags
    further than that behind one that found its programs in the cache."""
    barrier(f"every process has {done}", WAIT_SECONDS)


@contextlib.contextmanager
def doing(run: RunState, what: str, change: str | None = None) -> Iterator[None]:
    """Name an activity besides the steps that may run out of memory. After an error the name stays, for the message."""
    before, run.activity = run.activity, Activity(what, change)
    yield
    run.activity = before


@dataclass
class Owner:
    """Owns the directory of a run while it runs.

    micro: sequences of one forward pass. memory_remedy: returns what to change if the steps run out of memory.
    """

    context: RunContext
    run: RunState
    output: Output
    micro: int
    memory_remedy: Callable[[], str]
    lock: RunLock | None = None  # process 0 holds it

    @contextlib.contextmanager
    def opened(self, mirror: Mirror | None, continues: bool, set_up: Callable[[], None]) -> Iterator[RunLock | None]:
        """Hold the run directory: process 0 locks it, calls `set_up` to write the first files, and records the end."""
        if not self.context.topology.is_process_zero:
            with self.explained(), handle_signals_with(self.leave), farewell(self.lose_peer):
                yield None
            return
        directory = self.context.directory
        with contextlib.ExitStack() as stack:
            stack.enter_context(mirrored(mirror, continues))
            with signals_delayed():
                directory.create(exist_ok=continues)
                lock = self.lock = stack.enter_context(RunLock(directory))
                self.output.open_log()
                if lock.message:
                    self.context.notes.say(lock.message)
                stack.enter_context(handle_signals_with(self.leave))
                stack.enter_context(farewell(self.lose_peer))
                stack.enter_context(self.recorded())
                set_up()
            with self.explained():
                yield lock
            lock.check_intact()
            reason = self.run.loop_state.finished or ""
            directory.write_status(state="done", step=self.run.step, exit_code=0, message=reason)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an error in status.json and log.txt."""
        try:
            yield
        except BaseException as error:
            self.record_failure(error)
            raise

    def record_failure(self, error: BaseException) -> None:
        """Write what happened to status.json and log.txt, as far as the disk allows."""
        if self.lock is not None and not self.lock.is_intact():
            return  # the directory was deleted: nothing is created in it again
        code = error.exit_code if isinstance(error, BessemerError) else 1
        state = "stopped" if code == 75 else "failed"
        with contextlib.suppress(OSError, BessemerError):  # the first error is the one to report
            if code == 1:
                self.output.log_error(error)
                error.logged_in = self.context.directory.log  # type: ignore[attr-defined]
            else:
                self.output.log(f"{state:<10} {error}")
            self.context.directory.write_status(state=state, exit_code=code, message=str(error))

    def leave(self, reason: str) -> tuple[int, str]:
        """Handle a signal that arrives outside the loop; return the exit code and the last message.

        Called in another thread than the run's, which is ended after this.
        """
        steps = committed_steps(self.context.directory)
        after = f"with the checkpoint of step {steps[-1]}" if steps else "before the first checkpoint: it starts again"
        error = Stopped(
            f"{reason}: stopped {after}, as the same run. Continue with: bessemer resume {self.context.directory.word}"
        )
        self._release(error)
        return error.exit_code, str(error)

    def lose_peer(self, what: str) -> str:
        """Handle the loss of a process that this one waits for, as `leave` does; return the last message."""
        error = StorageError(f"{what} {self._last_checkpoint()} {self._start_again()}")
        self._release(error)
        return str(error)

    def _release(self, error: BessemerError) -> None:
        if self.lock is not None:
            self.record_failure(error)
            self.lock.release()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of training into errors that name cause and remedy."""
        try:
            yield
        except Unstable as error:
            raise TrainingError(f"{error} {self._last_checkpoint()} {self._remedy(error)}") from error
        except (jax.errors.JaxRuntimeError, MemoryError) as error:  # the device's memory, or the host's
            raise self._runtime_error(error) from error
        except OSError as error:
            if error.errno not in DISK_FAILURES:
                raise
            raise StorageError(
                f"reading or writing {error.filename or 'the run directory'} failed: {error.strerror}. "
                f"{self._last_checkpoint()} "
                f"Free or restore the disk, then: bessemer resume {self.context.directory.word}"
            ) from error

    def _runtime_error(self, error: Exception) -> Exception:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            what, remedy = self._explain_memory(error)
            return TrainingError(f"out of memory in {what} ({first_line(error)}). {self._last_checkpoint()} {remedy}")
        if jax.process_count() > 1:
            absent = ", ".join(map(str, absent_processes()))
            lost = f"process {absent} is not responding" if absent else "all processes still answer"
            return StorageError(
                f"process {jax.process_index()} could not work with the others: {lost} ({first_line(error)}). "
                f"{self._last_checkpoint()} {self._start_again()}"
            )
        return error

    def _explain_memory(self, error: Exception) -> tuple[str, str]:
        """Return (what ran out of memory, what to do)."""
        activity = self.run.activity or Activity(f"a pass over {self.micro} sequences")
        change = activity.change
        if isinstance(error, MemoryError):
            change = "Free memory on this machine, or lower data.prefetch and data.workers"
        if change is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # a device that can no longer even compile
                return activity.what, self.memory_remedy()
            change = "Set a smaller training.per_device_batch_size (the update stays the same)"
        return (activity.what, f"{change}, then continue with: bessemer resume {self.context.directory.word}")

    def _remedy(self, error: Unstable) -> str:
        """Return what to try. If no step ever updated the weights, the learning rate is not the cause."""
        if self.run.loop_state.skipped_steps >= error.step:
            init = self.context.settings.init
            begun = "" if init is None else f" in the weights of init={init},"
            return (
                f"No step ever gave an update, so the learning rate is not the cause: look for it{begun} in the data, "
                "or in the model."
            )
        guarded = self.context.guard.spike_sigma > 0
        spikes = " If these are not real spikes, raise guard.spike_sigma." if guarded else ""
        return (
            "Try a new run with a lower optimization.lr or a longer warm-up (training.warmup_pct), and look at the "
            f"data near that step.{spikes}"
        )

    def _last_checkpoint(self) -> str:
        steps = committed_steps(self.context.directory)
        return f"The last good checkpoint is step {steps[-1]}." if steps else "There is no checkpoint yet."

    def _start_again(self) -> str:
        return f"Start all processes again with: bessemer resume {self.context.directory.word}"


def committed_steps(directory: RunDirectory) -> list[int]:
    return Checkpoints(directory.checkpoints).committed()


def take_over(context: RunContext, run: RunState, manager: Checkpoints, continues: bool) -> None:
    """Remove what a killed save left, and set checkpoints beyond the restored one aside. The lock is held."""
    if context.topology.is_process_zero:
        remove_leftovers(context.directory.path)
    manager.clean()
    if continues:
        manager.set_aside_after(run.step)
        reference.drop_after(context, run.step)
