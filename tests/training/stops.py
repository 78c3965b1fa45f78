"""A run that is stopped at a step, as SIGTERM stops one."""

from __future__ import annotations

from typing import Any

from bessemer.training.callbacks.base import Callback


class StopAt(Callback):
    """Asks for a stop after `step` steps."""

    def __init__(self, step: int):
        self.step = step

    def on_batch_end(self, loop: Any) -> None:
        if loop.step == self.step:
            loop.request_stop("test")
