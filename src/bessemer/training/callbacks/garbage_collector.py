"""Python's cyclic collector stays out of the hot loop.

A full collection over jax's object graph takes tens of milliseconds at moments nobody chose. After the first step
everything alive is frozen and automatic collection is off; a collection every 5,000 steps bounds what piles up.
"""

from __future__ import annotations

import gc

from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop

INTERVAL = 5000


@callbacks.register("garbage_collector")
class GarbageCollector(Callback):
    active = False

    def on_batch_end(self, loop: Loop) -> None:
        if not self.active:
            self.active = True
            gc.collect()
            gc.freeze()
            gc.disable()
        elif loop.step % INTERVAL == 0:
            gc.collect()

    def _restore(self) -> None:
        if self.active:
            gc.enable()
            gc.unfreeze()

    def on_error(self, loop: Loop, error: BaseException) -> None:
        self._restore()

    def on_train_end(self, loop: Loop) -> None:
        self._restore()
