"""Rows of metrics.jsonl as columns of numbers, NaN where a row has no such number.

Files may be damaged or hostile: lines that are not JSON objects are counted and skipped, as are names beyond
`MOST_NAMES`, rows beyond `MOST_CELLS` and lines beyond `LONGEST`. Without limits a few megabytes can describe a table
of many gigabytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

EXACT = frozenset({"step", "tokens", "target_tokens", "time/total", "time/all_steps", "total_training_flops"})
"""Axes, in float64: 7 digits do not tell two steps of a long run apart. Everything else is in float32."""

MOST_NAMES = 512
MOST_CELLS = 100_000_000  # a million rows of a hundred metrics
LONGEST = 1 << 20
FAST = 1 << 16  # bytes from which the columnar parser pays off
PIECE = 1 << 18  # bytes per block of the line parser
_NAME = re.compile(rb'"([^"]*)"\s*:')


class Block(NamedTuple):
    """Consecutive rows as columns, with the number of lines that were not rows."""

    columns: dict[str, np.ndarray]
    rows: int
    bad: int = 0
    extra_names: bool = False  # names beyond MOST_NAMES were dropped


@dataclass
class Columns:
    """`count` rows; arrays are longer, so that rows can be added without copying."""

    count: int = 0
    bad: int = 0  # lines that were not rows
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    extra_names: bool = False  # there are names beyond MOST_NAMES
    extra_rows: bool = False  # there are rows beyond MOST_CELLS

    @property
    def notes(self) -> list[str]:
        """What of the file is not shown."""
        found = []
        if self.bad:
            found.append(f"metrics.jsonl: {self.bad:,} invalid lines were skipped.")
        if self.extra_names:
            found.append(f"metrics.jsonl has more than {MOST_NAMES} metrics: only the first {MOST_NAMES} are shown.")
        if self.extra_rows:
            found.append(
                f"metrics.jsonl holds more than {MOST_CELLS:,} values: only its first {self.count:,} rows are shown."
            )
        return found

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name][: self.count]

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    @property
    def names(self) -> list[str]:
        return sorted(self.arrays)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def add(self, block: Block) -> None:
        """Append the rows of a block; a new column is NaN before them."""
        self.bad += block.bad
        self.extra_names |= block.extra_names
        for name in block.columns:
            if name not in self.arrays:
                if len(self.arrays) >= MOST_NAMES:
                    self.extra_names = True
                    continue
                self.arrays[name] = np.empty(0, _kind(name))
        end = self.count + block.rows
        if self.extra_rows or end * len(self.arrays) > MOST_CELLS:
            self.extra_rows = True
            return
        for name, array in self.arrays.items():
            if len(array) < end or not array.flags.writeable:
                longer = np.full(end + end // 4 + 256, math.nan, array.dtype)
                longer[: min(self.count, len(array))] = array[: self.count]
                array = self.arrays[name] = longer
            array[self.count : end] = block.columns.get(name, math.nan)
        self.count = end


def blocks(data: bytes) -> Iterator[Block]:
    """Yield the rows of `data`, which holds whole lines."""
    fast = _parse_columns(data) if len(data) >= FAST and _regular(data) else None
    if fast is not None:
        yield fast
        return
    place = 0
    while place < len(data):
        end = data.find(b"\n", min(place + PIECE, len(data) - 1)) + 1 or len(data)
        yield _parse_lines(data[place:end])
        place = end


def _regular(data: bytes) -> bool:
    """Return whether the columnar parser can take these rows: nothing nested (it recurses), no line much longer than
    the others, and few names (it allocates every name for every row: 100,000 names in 1.6 MB took 3.2 GB)."""
    count = data.count(b"\n")
    if b"[" in data or b"NaN" in data or b"\\" in data or data.count(b"{") != count:
        return False
    if max(map(len, data.split(b"\n"))) > 8 * len(data) // count + 256:
        return False
    return len(set(_NAME.findall(data))) <= MOST_NAMES


def _parse_columns(data: bytes) -> Block | None:
    """Parse with pyarrow, about eight times faster; return None if its types are too strict for these rows."""
    import pyarrow as pa
    from pyarrow import json as arrow

    options = arrow.ReadOptions(use_threads=True, block_size=4 * LONGEST)
    try:
        table = arrow.read_json(pa.BufferReader(data), read_options=options)
    except (pa.ArrowException, OverflowError):
        return None
    if len(set(table.column_names)) != len(table.column_names):
        return None
    columns: dict[str, np.ndarray] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if len(name) <= 100 and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            with np.errstate(over="ignore"):
                columns[name] = column.cast(pa.float64(), safe=False).to_numpy().astype(_kind(name))
    return Block(columns, table.num_rows)


def _parse_lines(data: bytes) -> Block:
    """Parse line by line; memory grows with the values, not with rows times names."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    rows = bad = 0
    extra_names = False
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        row = _numbers(line)
        if row is None:
            bad += 1
            continue
        for name, value in row.items():
            if name in found or len(found) < MOST_NAMES:
                places, values = found.setdefault(name, ([], []))
                places.append(rows)
                values.append(value)
            else:
                extra_names = True
        rows += 1
    columns = {name: _column(name, rows, *cells) for name, cells in found.items()}
    return Block(columns, rows, bad, extra_names)


def _column(name: str, rows: int, places: list[int], values: list[float]) -> np.ndarray:
    column = np.full(rows, math.nan, _kind(name))
    with np.errstate(over="ignore"):
        column[places] = values
    return column


def _numbers(line: bytes) -> dict[str, float] | None:
    """Return the numbers of a row by name; None if the line is not a row."""
    if len(line) > LONGEST:
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return {name: number for name, value in row.items() if (number := _number(name, value)) is not None}


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or len(name) > 100:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _kind(name: str) -> Any:
    return np.float64 if name in EXACT else np.float32
