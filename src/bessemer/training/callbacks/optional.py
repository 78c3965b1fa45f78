"""Saves a checkpoint whenever validation improves, besides the regular ones (callbacks=[best_checkpoint])."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.registry import callbacks
from bessemer.training.callbacks.base import Callback
from bessemer.training.loop import Loop

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


@callbacks.register("best_checkpoint")
class BestCheckpoint(Callback):
    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        if row["step"] > 0 and loop.loop_state.best_step == row["step"]:
            loop.request_checkpoint()


# Ends the run when validation has stopped improving (callbacks=[early_stopping]).


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


# Gradient checkpointing by the name it has elsewhere: here the model is compiled with it, by
# architecture.remat.


@callbacks.register("gradient_checkpointing")
class GradientCheckpointing(Callback):
    """Refuses a run that asks for it and has it not; a callback comes too late to change the compiled step."""

    def on_check(self, trainer: BaseTrainer) -> None:
        if trainer.config.get("architecture/remat") in (None, ["none"], "none"):
            raise InputError(
                "callbacks=[gradient_checkpointing]: gradient checkpointing is part of the compiled model here. Set "
                "architecture.remat=block (or a list of tensor names), and leave the callback out."
            )


# Says when clipping, which happens inside the compiled step, is the rule rather than the exception.


OFTEN = 0.9
SETTLED = 200


@callbacks.register("gradient_clipping")
class GradientClipping(Callback):
    """Every row carries grad_norm and clip_share; one line warns when nearly all of many steps were clipped."""

    warned = False

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        if not self.warned and row["step"] >= SETTLED and row["clip_share"] > OFTEN:
            self.warned = True
            limit = loop.trainer.settings.max_grad_norm
            loop.trainer.say(
                f"note: {row['clip_share']:.0%} of the steps so far were clipped at training.max_grad_norm={limit:g}; "
                "the effective rate is lower than optimization.lr says"
            )


# A profiler trace of a few steps (callbacks=[profiler]), to open in TensorBoard or Perfetto.


@callbacks.register("profiler")
@dataclass
class Profiler(Callback):
    """Traces `steps` steps after `start` more have passed, into RUN/profile."""

    start: int = field("logging/profile_start", default=10, minimum=1, help="steps before the trace begins")
    steps: int = field("logging/profile_steps", default=5, minimum=1, help="steps in the trace")

    tracing = False

    def on_train_begin(self, loop: Loop) -> None:
        self.begin = loop.step + self.start

    def on_rollback(self, loop: Loop) -> None:
        self._stop()
        self.begin = -1  # one trace a process

    def on_batch_begin(self, loop: Loop) -> None:
        if loop.step == self.begin and loop.trainer.is_process_zero:
            jax.profiler.start_trace(str(loop.trainer.run_directory.path / "profile"))
            self.tracing = True

    def on_batch_end(self, loop: Loop) -> None:
        if self.tracing and loop.step == self.begin + self.steps:
            jax.block_until_ready(loop.trainer.state.params)
            self._stop()

    def _stop(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False

    def on_train_end(self, loop: Loop) -> None:
        self._stop()

    def on_error(self, loop: Loop, error: BaseException) -> None:
        self._stop()
