"""How far an evaluation is: a bar on a terminal, an occasional plain line elsewhere, nothing unless asked for.

Tasks do not carry it about: whoever starts an evaluation says `with shown():`, and `tick` finds it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

Show = Callable[[str, int, int], None]  # what, done, of how many
PLAIN_SECONDS = 10.0
_show: ContextVar[Show | None] = ContextVar("evaluation progress", default=None)
_label: ContextVar[str] = ContextVar("evaluation label", default="")


def tick(done: int, total: int) -> None:
    """So many examples of the current label are done."""
    show = _show.get()
    if show is not None:
        show(_label.get(), done, total)


@contextlib.contextmanager
def label(name: str) -> Iterator[None]:
    """What the ticks inside are about; a part of a task is shown after its name."""
    outer = _label.get()
    token = _label.set(outer if outer == name else f"{outer} {name}".strip())
    try:
        yield
    finally:
        _label.reset(token)


@contextlib.contextmanager
def shown(stream: Any = None) -> Iterator[None]:
    """Draw on stderr what happens inside."""
    target = stream or sys.stderr
    with _bar(target) if target.isatty() else contextlib.nullcontext(_plain(target)) as show:
        token = _show.set(show)
        try:
            yield
        finally:
            _show.reset(token)


@contextlib.contextmanager
def _bar(target: Any) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=target), transient=True) as bars:
        task, current = bars.add_task("loading", total=None), ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal current
            if what != current:
                current = what
                bars.reset(task, total=total, description=what)
            bars.update(task, completed=done)

        yield show


def _plain(target: Any) -> Show:
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=target, flush=True)

    return show
