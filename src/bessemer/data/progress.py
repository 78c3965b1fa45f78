"""Showing how a preparation goes: a bar on a terminal, an occasional plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

PLAIN_SECONDS = 10.0


@dataclass(frozen=True)
class Progress:
    """Where a preparation stands. Counts are of this process; shards found finished are only in `done`."""

    label: str
    documents: int = 0
    tokens: int = 0
    done: int = 0  # source bytes finished
    total: int = 0
    seconds: float = 0.0

    @property
    def line(self) -> str:
        span = max(self.seconds, 1e-9)
        share = (
            f"{100 * self.done / max(self.total, 1):.0f}%, " if self.done else ""
        )  # counted by whole shards
        return (
            f"{self.label}: {share}{self.documents:,} documents ({self.documents / span:,.0f}/s), "
            f"{self.tokens:,} tokens ({self.tokens / span:,.0f}/s)"
        )


Callback = Callable[[Progress], None]


class Tally:
    """Adds up the workers' reports and hands the sum to the callback."""

    def __init__(self, label: str, total: int, callback: Callback | None) -> None:
        self.begun = time.monotonic()
        self.state = Progress(label, total=total)
        self.callback = callback

    def add(self, documents: int = 0, tokens: int = 0, done: int = 0) -> None:
        self.state = replace(
            self.state,
            documents=self.state.documents + documents,
            tokens=self.state.tokens + tokens,
            done=self.state.done + done,
            seconds=time.monotonic() - self.begun,
        )
        if self.callback is not None:
            self.callback(self.state)


@contextmanager
def show_progress(stream: Any = None) -> Iterator[Callback]:
    """A callback that draws on stderr."""
    target = stream or sys.stderr
    if not target.isatty():
        yield _plain(target)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(file=target), transient=True) as bars:
        task = bars.add_task("preparing", total=1)
        yield lambda state: bars.update(
            task, description=state.line, completed=state.done, total=state.total or 1
        )


def _plain(target: Any) -> Callback:
    last = time.monotonic()

    def show(state: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            print(state.line, file=target, flush=True)

    return show
