"""Gradient checkpointing by the name it has elsewhere: here the model is compiled with it, by architecture.remat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bessemer.errors import InputError
from bessemer.registry import callbacks
from bessemer.training.callback import Callback

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


@callbacks.register("gradient_checkpointing")
class GradientCheckpointing(Callback):
    """Refuses a run that asks for it and has it not; a callback comes too late to change the compiled step."""

    def on_check(self, trainer: BaseTrainer) -> None:
        if trainer.config.get("architecture/remat") in (None, ["none"], "none"):
            raise InputError(
                "callbacks=[gradient_checkpointing]: gradient checkpointing is part of the compiled model here. Set "
                "architecture.remat=block (or a list of tensor names), and leave the callback out."
            )
