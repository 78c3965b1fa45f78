"""training.time_limit: stop with a checkpoint in time, exit 75; resume gets a fresh limit."""

from __future__ import annotations

import time

from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


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
