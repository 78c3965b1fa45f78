"""A profiler trace of a few steps (callbacks=[profiler]), to open in TensorBoard or Perfetto."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from bessemer.config import field
from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


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
