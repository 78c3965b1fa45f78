"""How far a copy of weights is: a bar of bytes on a terminal, an occasional plain line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bessemer.storage.weights import Progress

ShowBytes = Callable[[str, int], contextlib.AbstractContextManager[Progress]]  # label, bytes in all
PLAIN_SECONDS = 10.0


def nothing(label: str, total: int) -> contextlib.AbstractContextManager[Progress]:
    return contextlib.nullcontext(lambda size: None)


@contextlib.contextmanager
def shown(label: str, total: int, stream: Any = None) -> Iterator[Progress]:
    """Drawn on stderr."""
    target = stream or sys.stderr
    if not target.isatty():
        yield _plain(label, total, target)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(file=target), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda size: bars.advance(task, size)


def _plain(label: str, total: int, target: Any) -> Progress:
    last, done = time.monotonic(), 0

    def advance(size: int) -> None:
        nonlocal last, done
        done += size
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            print(f"{label}: {done / 2**30:.2f} of {total / 2**30:.2f} GiB", file=target, flush=True)

    return advance
