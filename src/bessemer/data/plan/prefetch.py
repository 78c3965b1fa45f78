"""Prefetch batches in a background thread, and measure how long the loop still waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class Prefetcher:
    """`get(step)` returns `make(step)`; up to `depth` following batches are made while the caller works.

    depth 0 makes each batch when asked. Batches are functions of the step, so asking for another step than the next one
    (after a rollback) just starts over from there. `waited` is the seconds `get` could not return at once.
    """

    def __init__(self, make: Callable[[int], Any], start: int, depth: int) -> None:
        self.make, self.depth = make, depth
        self.waited = 0.0
        self._ready: deque[tuple[int, Any, BaseException | None]] = deque()
        self._next = start  # the step the thread makes next
        self._wanted = start  # the step the caller asks for next
        self._generation = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True) if depth > 0 else None
        if self._thread is not None:
            self._thread.start()

    def get(self, step: int) -> Any:
        """Return the batch of the step; raise the error that making it raised."""
        begun = time.monotonic()
        if self._thread is None:
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            try:
                return self.make(step)
            finally:
                self.waited += time.monotonic() - begun
        with self._changed:
            if step != self._wanted:
                self._ready.clear()
                self._next = step
                self._generation += 1  # what the thread is making now is not wanted any more
                self._changed.notify_all()
            while not self._ready and not self._closed:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            _, batch, error = self._ready.popleft()
            self._wanted = step + 1
            self._changed.notify_all()
            self.waited += time.monotonic() - begun
        if error is not None:
            self._wanted = -1  # the next get, of any step, tries again
            raise error
        return batch

    def close(self) -> None:
        """Stop the thread; safe to call twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (len(self._ready) >= self.depth or self._failed()):
                    self._changed.wait()
                if self._closed:
                    return
                step, generation = self._next, self._generation
            batch, error = None, None
            try:
                batch = self.make(step)
            except BaseException as raised:  # noqa: BLE001 -- handed to the caller, who raises it
                error = raised
            with self._changed:
                if generation == self._generation and not self._closed:
                    self._ready.append((step, batch, error))
                    self._next = step + 1
                    self._changed.notify_all()

    def _failed(self) -> bool:
        """Hold the failure for the caller; no batch is made until it is raised there."""
        return bool(self._ready) and self._ready[-1][2] is not None
