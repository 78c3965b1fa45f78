"""Follows checkpoints: the status file knows the newest one."""

from __future__ import annotations

from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


@callbacks.register("checkpoint")
class Checkpoint(Callback):
    """The loop saves after metrics, validation and previews; this tells the world outside."""

    def on_checkpoint(self, loop: Loop, step: int) -> None:
        if loop.trainer.is_process_zero:
            loop.trainer.run_directory.write_status(step=step, checkpoint=step)
