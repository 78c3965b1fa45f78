"""The progress bar of a run: loss, tokens per second, MFU, memory and the time left."""

from __future__ import annotations

from typing import Any

from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop
from bessemer.training.progress import ShowsActivity


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
