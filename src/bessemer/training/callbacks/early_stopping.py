"""Ends the run when validation has stopped improving (callbacks=[early_stopping])."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bessemer.config import field
from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


@callbacks.register("early_stopping")
@dataclass
class EarlyStopping(Callback):
    """`patience` validations in a row without a new best end the run as done. The count survives a restart."""

    patience: int = field(
        "training/patience", default=5, minimum=1, help="validations without a new best that end the run"
    )

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        stale = loop.loop_state.stale_validations
        if stale >= self.patience and row["step"] < loop.steps:
            loop.request_finish(f"no better validation loss in {stale} validations")
