"""Checkpoints by the clock (logging.checkpoint_minutes), and the newest one in the status file."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bessemer.config import field
from bessemer.registry import callbacks
from bessemer.topology import StepAgreement
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


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
