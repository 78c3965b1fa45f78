"""Text for terminals, files and pipes: short numbers, tables that fit, and progress."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from bessemer.errors import printable

NOTHING = "-"


def shown(path: str | Path) -> str:
    """Return a path as the user would type it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


def number(value: Any, digits: int = 4) -> str:
    """1.23456 → 1.2346; what is not a number is a dash."""
    return f"{value:.{digits}f}" if _is_number(value) else NOTHING


def with_error(value: Any, error: Any) -> str:
    """1.3140 ± 0.0051 (standard error); the value alone where its error is not known."""
    known = _is_number(value) and _is_number(error)
    return number(value) + (f" ± {error:.4f}" if known else "")


def figure(value: Any) -> str:
    """33816576 → 33,816,576; 0.7071067811865476 → 0.707107; what is not a number as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def show(value: Any) -> str:
    """Return a value as it can be typed on the command line: none, true and false, lists in brackets."""
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def counted(count: int, word: str) -> str:
    """1 row; 2,048 rows; 2 passes; 2 batches."""
    ending = "" if count == 1 else "es" if word.endswith(("s", "ch")) else "s"
    return f"{count:,} {word}{ending}"


def in_parts(count: int) -> str:
    """For a step of several passes."""
    return "" if count == 1 else f" in {counted(count, 'part')}"


def compact(value: Any) -> str:
    """1234567 → 1.23M."""
    if not _is_number(value):
        return NOTHING
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: Any) -> str:
    """Return the two largest units: 0.4s, 45s, 12m05s, 3h20m, 2d04h."""
    if not _is_number(seconds):
        return NOTHING
    if 0 < seconds < 10:
        return f"{seconds:.2g}s"
    whole = max(0, int(seconds))
    for unit, size, lesser, below in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02d}{lesser}"
    return f"{whole}s"


def wrapped(line: str, width: int) -> list[str]:
    """Return a line broken at words to fit `width`; what follows is indented as the text of the line is.

    A word that is longer stays whole (a path, a URL).
    """
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    indent = len(label[0]) if label is not None and len(label[0]) < width // 2 else 0
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


_LABEL = re.compile(r"\s*\S+ {2,}|\s*")  # "note       " of a line with a label in front, or what it is indented by


def size(count: Any) -> str:
    """Bytes in powers of 1024: 1.5G."""
    if not _is_number(count):
        return NOTHING
    value = float(count)
    for letter in "BKMGT":
        if value < 1024 or letter == "T":
            break
        value /= 1024
    return f"{value:.0f}{letter}" if letter == "B" or value >= 10 else f"{value:.1f}{letter}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns aligned (numbers right), two spaces apart. A `width` cuts the first column to fit."""
    rows = [[printable(word) for word in row] for row in rows]
    cells = [list(head), *rows]
    sizes = [max(len(row[place]) for row in cells) for place in range(len(head))]
    if width is not None:
        over = sum(sizes) + 2 * (len(sizes) - 1) - width
        sizes[0] = max(8, sizes[0] - max(0, over))
    right = [_numeric([row[place] for row in rows]) for place in range(len(head))]
    lines = []
    for row in cells:
        words = [fit(word, size) for word, size in zip(row, sizes, strict=True)]
        aligned = [
            word.rjust(size) if to_right else word.ljust(size)
            for word, size, to_right in zip(words, sizes, right, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def folded_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], bold: Sequence[bool] = ()
) -> str:
    """Return a table whose cells wrap at `widths`, one per column; `bold` says which rows are."""
    lines: list[tuple[str, ...]] = []
    strong = [False]  # the head
    for number, row in enumerate(rows):
        cells = [
            [piece for line in cell.splitlines() for piece in textwrap.wrap(line, width, break_on_hyphens=False)]
            for cell, width in zip(row, widths, strict=True)
        ]
        folded = list(itertools.zip_longest(*cells, fillvalue=""))
        lines += folded
        strong += [bool(bold) and bold[number]] * len(folded)
    text = table(head, lines).splitlines()
    return "\n".join(f"\x1b[1m{line}\x1b[0m" if mark else line for line, mark in zip(text, strong, strict=True))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table in markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows)]


def _escape(cell: Any) -> str:
    return str(cell).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def fit(word: str, size: int) -> str:
    """Cut in the middle: names of runs often differ at their ends, and so do prompts."""
    if len(word) <= size:
        return word
    half = (size - 1) // 2
    return f"{word[: size - 1 - half]}…{word[len(word) - half :]}"


def _numeric(words: Sequence[str]) -> bool:
    return bool(words) and all(word == NOTHING or word[:1].isdigit() for word in words)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Progress: a bar on a terminal, elsewhere a plain line at most every PLAIN_SECONDS.

PLAIN_SECONDS = 10.0


class Display:
    """Shows how far something is. `update` may be called from any thread."""

    def __init__(self, unit: str, target: Any, bars: Any = None) -> None:
        self.unit, self.target, self.bars = unit, target, bars
        self._task = None if bars is None else bars.add_task("loading", total=None)
        self._label, self._done = "", 0
        self._printed = time.monotonic()
        self._lock = threading.Lock()

    def update(self, label: str, done: int, total: int = 0, text: str = "") -> None:
        """`done` of `total` (0: unknown) units of `label` are finished; `text` replaces the label in what is shown."""
        with self._lock:
            if self.bars is not None:
                if label != self._label:
                    self.bars.reset(self._task, total=total or None)
                self.bars.update(self._task, description=text or label, completed=done, total=total or None)
            elif time.monotonic() - self._printed >= PLAIN_SECONDS:
                self._printed = time.monotonic()
                print(text or f"{label}: {self._amount(done, total)}", file=self.target, flush=True)
            self._label = label

    def advance(self, label: str, size: int, total: int = 0) -> None:
        """`size` more units of `label` are finished."""
        with self._lock:
            self._done += size
        self.update(label, self._done, total)

    def _amount(self, done: int, total: int) -> str:
        if self.unit != "bytes":
            return f"{done} of {total}"
        whole = f" of {total / 2**30:.2f}" if total else ""
        return f"{done / 2**30:.2f}{whole} GiB"


@contextmanager
def show_progress(unit: str = "", stream: Any = None) -> Iterator[Display]:
    """Yield a display on stderr that is cleared at the end. unit: "bytes", "items", or none to show the label alone."""
    target = stream or sys.stderr
    if not target.isatty():
        yield Display(unit, target)
        return
    from rich import progress
    from rich.console import Console

    amounts: dict[str, tuple[Any, ...]] = {
        "bytes": (progress.DownloadColumn(), progress.TransferSpeedColumn()),
        "items": (progress.MofNCompleteColumn(), progress.TimeRemainingColumn()),
        "": (progress.TimeRemainingColumn(),),
    }
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), *amounts[unit])
    with progress.Progress(*columns, console=Console(file=target), transient=True) as bars:
        yield Display(unit, target, bars)


Advance = Callable[[int], None]  # takes the bytes that were just read or written
ShowBytes = Callable[[str, int], contextlib.AbstractContextManager[Advance]]  # label, bytes in all


@contextmanager
def byte_progress(label: str, total: int = 0, stream: Any = None) -> Iterator[Advance]:
    """Yield a function that adds bytes to a display of them."""
    with show_progress("bytes", stream) as display:
        yield lambda size: display.advance(label, size, total)


def no_progress(label: str, total: int) -> contextlib.AbstractContextManager[Advance]:
    """Show nothing."""
    return contextlib.nullcontext(lambda size: None)


# Evaluations do not pass a display down to their loops: `tick` finds the one that `showing_ticks` opened.

_display: ContextVar[Display | None] = ContextVar("display", default=None)
_task_name: ContextVar[str] = ContextVar("task name", default="")


def tick(done: int, total: int) -> None:
    """Show that `done` of `total` examples of the current task are finished."""
    display = _display.get()
    if display is not None:
        display.update(_task_name.get(), done, total)


@contextmanager
def task_name(name: str) -> Iterator[None]:
    """Name what the ticks inside are about; the part of a task is shown after its name."""
    outer = _task_name.get()
    token = _task_name.set(outer if outer == name else f"{outer} {name}".strip())
    try:
        yield
    finally:
        _task_name.reset(token)


@contextmanager
def showing_ticks(stream: Any = None) -> Iterator[None]:
    """Show the ticks inside on stderr."""
    with show_progress("items", stream) as display:
        token = _display.set(display)
        try:
            yield
        finally:
            _display.reset(token)
