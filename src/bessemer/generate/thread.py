"""EngineThread: the engine's rounds in the background, for servers and anyone with many threads."""

from __future__ import annotations

import logging
import threading
from typing import Any, Self

from bessemer.generate.engine import Engine

PAUSE = 1.0
"""Seconds an idle thread sleeps at most; a request wakes it."""

log = logging.getLogger(__name__)


class EngineThread:
    """`with EngineThread(engine): …` runs rounds while there is work. On leaving, open requests are cancelled.

    A round that fails gives its error to every open request; the thread goes on with the next ones.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.engine.threaded = True
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is open, and wait for the thread."""
        self._stopping.set()
        self.engine.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self.engine.step():
                    self.engine.wait(PAUSE)
            except Exception:  # the requests have it; a thread that ended would leave the next ones waiting
                log.exception("a round of the engine failed")
        self.engine.cancel_all()
        self.engine.threaded = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
