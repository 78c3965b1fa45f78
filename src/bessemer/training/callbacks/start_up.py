"""The end of start-up: one line that says how long the first step took to come, and why."""

from __future__ import annotations

from typing import Any

import jax

from bessemer.errors import runnable
from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.facts import write_facts
from bessemer.training.loop import Loop


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
