"""Plain text for terminals, files and pipes: numbers short enough to compare, and tables that fit."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from bessemer.errors import printable

NOTHING = "-"


def number(value: Any, digits: int = 4) -> str:
    """1.23456 → 1.2346; what is not a number is a dash."""
    return f"{value:.{digits}f}" if _is_number(value) else NOTHING


def with_error(value: Any, error: Any, digits: int = 4) -> str:
    """1.3140 ± 0.0051 (standard error); the value alone where its error is not known."""
    known = _is_number(value) and _is_number(error)
    return number(value, digits) + (f" ± {error:.{digits}f}" if known else "")


def figure(value: Any) -> str:
    """33816576 → 33,816,576; 0.7071067811865476 → 0.707107; what is not a number as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def counted(count: int, word: str) -> str:
    """1 row; 2,048 rows; 2 passes."""
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
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
    """The two largest units: 0.4s, 45s, 12m05s, 3h20m, 2d04h."""
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
    """A line broken at words to fit `width`; what follows is indented as the text of the line is.

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


_LABEL = re.compile(
    r"\s*\S+ {2,}|\s*"
)  # "note       " of a line with a label in front, or what it is indented by


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
