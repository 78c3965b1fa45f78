"""Keeps Orbax's and TensorStore's voices down while they work for us, and only then."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _AbandonedTasks(logging.Filter):
    """Drops asyncio's traceback of each of a failed save's many tasks. It comes when one is collected, often only
    at the end of the process, so this filter stays once it is set."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not text.startswith(("Task exception was never", "Future exception was never")):
            return True
        if (
            record.exc_info and record.exc_info[1] is not None
        ):  # whose it is shows in the text or in the frames
            text += "".join(traceback.format_exception(record.exc_info[1]))
        return not any(name in text for name in ("orbax", "OCDBT", "zarr"))


class _Silence:
    """Counts the saves and restores in progress: the first lowers the voices, the last restores them.

    Orbax logs each failure with full tracebacks through absl, and TensorStore's threads, finding the event
    loop of a failed save closed, print a traceback per array through the unraisable hook. The failure itself
    reaches us once, as an exception, so only those echoes are dropped; anything else passes on.
    """

    _ECHOES = ("Event loop is closed", "cannot schedule new futures after shutdown")

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._tasks = _AbandonedTasks()
        self._users = 0

    def enter(self) -> None:
        with self._guard:
            self._users += 1
            if self._users > 1:
                return
            logging.getLogger("asyncio").addFilter(self._tasks)
            logger = logging.getLogger("absl")
            self._level, self._hook = logger.level, sys.unraisablehook
            logger.setLevel(logging.CRITICAL + 1)
            sys.unraisablehook = self._on_error

    def leave(self) -> None:
        with self._guard:
            self._users -= 1
            if self._users == 0:
                logging.getLogger("absl").setLevel(self._level)
                sys.unraisablehook = self._hook

    def _on_error(self, args: Any) -> None:
        error = args.exc_value
        if not (isinstance(error, RuntimeError) and str(error).startswith(self._ECHOES)):
            self._hook(args)


SILENCE = _Silence()


@contextmanager
def quiet() -> Iterator[None]:
    SILENCE.enter()
    try:
        yield
    finally:
        SILENCE.leave()
