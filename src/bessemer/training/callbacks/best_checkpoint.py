"""Saves a checkpoint whenever validation improves, besides the regular ones (callbacks=[best_checkpoint])."""

from __future__ import annotations

from typing import Any

from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


@callbacks.register("best_checkpoint")
class BestCheckpoint(Callback):
    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        if row["step"] > 0 and loop.loop_state.best_step == row["step"]:
            loop.request_checkpoint()
