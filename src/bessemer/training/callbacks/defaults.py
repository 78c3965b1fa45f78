"""metrics.jsonl: one flushed row a report, and the run's status beside it."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import jax

from bessemer.config import field
from bessemer.console import with_error
from bessemer.errors import runnable
from bessemer.registry import callbacks
from bessemer.report.metrics import MetricsFile
from bessemer.topology import StepAgreement
from bessemer.training.callbacks.base import Callback
from bessemer.training.console.output import write_facts
from bessemer.training.console.progress import ShowsActivity
from bessemer.training.loop import Loop


@callbacks.register("metric_logger")
class MetricLogger(Callback):
    """Writes on process 0 only. Rows beyond the step a run continues from are removed first: no duplicates."""

    def on_train_begin(self, loop: Loop) -> None:
        self.file: MetricsFile | None = None
        self.validated: set[int] = set()
        if loop.trainer.is_process_zero:
            self.file = MetricsFile(loop.trainer.run_directory.metrics)
            self.file.truncate_after(loop.step if loop.step > 0 else -1)
            self.validated = {
                row["step"] for row in self.file.rows() if "val_loss" in row or "val_reward" in row
            }

    def on_rollback(self, loop: Loop) -> None:
        self.on_train_begin(loop)
        if self.file is not None:
            loop.trainer.run_directory.write_status(step=loop.step, rollbacks=loop.loop_state.rollbacks)

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.append(row)
            loop.trainer.run_directory.write_status(step=row["step"])

    def on_evaluation(self, loop: Loop, row: dict[str, Any]) -> None:
        self.on_metrics(loop, row)

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        # a run killed after its last validation is validated again on resume: same numbers, no second row
        if self.file is not None and row["step"] not in self.validated:
            self.validated.add(row["step"])
            self.file.append(row)


# The progress bar of a run: loss, tokens per second, MFU, memory and the time left.


@callbacks.register("progress_bar")
class ProgressBarCallback(Callback):
    bar: Any = None

    def on_train_begin(self, loop: Loop) -> None:
        trainer = loop.trainer
        self.bar = trainer.create_progress_bar(loop.steps, "step", disabled=not trainer.is_process_zero)
        self.bar.update(loop.step, {})

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        loop.trainer.log_metrics(row, self.bar, row["step"])

    def on_batch_end(self, loop: Loop) -> None:
        self.bar.update(loop.step, {})

    def on_progress(self, loop: Loop, text: str) -> None:
        if isinstance(self.bar, ShowsActivity):
            self.bar.note(text)

    def on_error(self, loop: Loop, error: BaseException) -> None:
        if self.bar is not None:
            self.bar.close()

    def on_train_end(self, loop: Loop) -> None:
        self.bar.close()


# The end of start-up: one line that says how long the first step took to come, and why.


@callbacks.register("start_up")
class StartUpCallback(Callback):
    """Waits once, for the first step of the process; every later step passes untouched."""

    def on_train_begin(self, loop: Loop) -> None:
        jax.block_until_ready(loop.trainer.state.step)
        loop.trainer.startup.lap("state")

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        loop.trainer.startup.lap("validation")

    def on_optimizer_step(self, loop: Loop) -> None:
        trainer = loop.trainer
        if trainer.startup.done:
            return
        jax.block_until_ready(trainer.state.step)
        trainer.startup.lap("first step")
        trainer.startup.done = True
        trainer.say(trainer.startup.line())
        forecast = trainer.startup.forecast(loop.steps - loop.step)
        # elsewhere the first step also loads kernels, and says little
        if forecast is not None and trainer.topology.platform == "cpu":
            trainer.say(runnable(f"note       {forecast}"))
        if trainer.is_process_zero:
            write_facts(trainer)


# Shows each validation result as it comes.


@callbacks.register("validation")
class Validation(Callback):
    """One line a validation: loss or reward, bits per byte where they are known, how many pairs are ranked right, and
    whether it is the best."""

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        name = "val_loss" if "val_loss" in row else "val_reward"
        line = f"step {row['step']:>6}  {name.replace('_', ' ')} {row[name]:.4f}"
        if "val_loss" in row and "val_reward" in row:
            line += f"  reward {row['val_reward']:.4f}"
        if row.get("val_bpb") is not None:
            line += f"  bits/byte {with_error(row['val_bpb'], row.get('val_bpb_se'))}"
        if "val_pref_acc" in row:
            line += f"  right {row['val_pref_acc']:.1%}  margin {row['val_margin']:.3f}"
        best = loop.loop_state.best_step == row["step"] and row["step"] > 0
        loop.trainer.say(line + ("  (best)" if best else ""))


# Checkpoints by the clock (logging.checkpoint_minutes), and the newest one in the status file.


@callbacks.register("checkpoint")
@dataclass
class Checkpoint(Callback):
    """The loop saves at logging.checkpoint_interval; this also asks for a save when the last one is long ago.

    Process 0 looks at the clock, and all save at the step that they agree on. A save only reads the state, and a
    rollback never goes back to one of these, so the run's results do not depend on when it happens.
    """

    minutes: float = field(
        "logging/checkpoint_minutes",
        default=0.0,
        minimum=0,
        help="also save when the last checkpoint is this many minutes old; 0 = off",
    )

    def on_train_begin(self, loop: Loop) -> None:
        self.agreement = StepAgreement("save")
        self.saved = time.monotonic()

    def on_rollback(self, loop: Loop) -> None:
        self.on_train_begin(loop)

    def on_batch_end(self, loop: Loop) -> None:
        if self.minutes == 0:
            return
        if loop.trainer.is_process_zero and time.monotonic() - self.saved >= 60 * self.minutes:
            self.agreement.propose(loop.step)
        if self.agreement.due(loop.step):
            self.agreement = StepAgreement("save")
            loop.request_checkpoint()

    def on_checkpoint(self, loop: Loop, step: int) -> None:
        self.saved = time.monotonic()
        if loop.trainer.is_process_zero:
            loop.trainer.run_directory.write_status(step=step, checkpoint=step)


# training.time_limit: stop with a checkpoint in time, exit 75; resume gets a fresh limit.


@callbacks.register("time_limit")
class TimeLimit(Callback):
    """Counts from the making of the trainer: data preparation and compilation are included."""

    def on_train_begin(self, loop: Loop) -> None:
        limit = loop.trainer.time_limit
        self.deadline = None if limit is None else loop.trainer.started + limit

    def on_batch_end(self, loop: Loop) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            loop.request_stop(f"training.time_limit={loop.trainer.settings.time_limit} reached")
            self.deadline = None


# Python's cyclic collector stays out of the hot loop.
#
# A full collection over jax's object graph takes tens of milliseconds at moments nobody chose. After the
# first step everything alive is frozen and automatic collection is off; a collection every 5,000 steps bounds
# what piles up.


INTERVAL = 5000


@callbacks.register("garbage_collector")
class GarbageCollector(Callback):
    active = False

    def on_batch_end(self, loop: Loop) -> None:
        if not self.active:
            self.active = True
            gc.collect()
            gc.freeze()
            gc.disable()
        elif loop.step % INTERVAL == 0:
            gc.collect()

    def _restore(self) -> None:
        if self.active:
            gc.enable()
            gc.unfreeze()

    def on_error(self, loop: Loop, error: BaseException) -> None:
        self._restore()

    def on_train_end(self, loop: Loop) -> None:
        self._restore()
