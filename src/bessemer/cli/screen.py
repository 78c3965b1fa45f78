"""A run goes on when whoever read its output has gone: the end of a pipe, a terminal that was closed.

What it would have said there is in log.txt; the run directory has everything else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)


def outlive_readers() -> None:
    """From now on stdout and stderr lead nowhere once nobody reads them. One that was closed before, None, stays."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, Lasting(stream))


class Lasting:
    """A text stream whose reader may go."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is in buffers goes there too
            os.close(nowhere)
            if self is not sys.stderr:
                with contextlib.suppress(OSError):
                    print(
                        "note: nobody reads the output any more; the run goes on, its log.txt has every line",
                        file=sys.stderr,
                    )
