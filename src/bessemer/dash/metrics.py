"""A run's metrics as they grow: each byte of metrics.jsonl is read once, and the columns are cached on disk.

    home/dash/SHA256(path).columns = length of the header (8 bytes), header (JSON), the columns one after the other

Rows become columns of numbers, NaN where a row has no such number. Files may be damaged or hostile: lines that are not
JSON objects are counted and skipped, as are names beyond `MOST_NAMES`, rows beyond `MOST_CELLS` and lines beyond
`LONGEST`. Without limits a few megabytes can describe a table of many gigabytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bessemer.dash.files import Folder, Signature
from bessemer.errors import StorageError
from bessemer.report.metrics import MOST_BYTES
from bessemer.storage.files import atomic_write

# --- rows as columns ---


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


# --- files and their cache ---


CHUNK = 8 << 20
TAIL = 64  # bytes before the place where reading ended; if they changed, the file was rewritten and is read again
FORMAT = 2
KEEP_FROM = 2000  # rows: reading fewer is faster than using the cache
DISK = 2 << 30  # bytes of cache


class Growing(ABC):
    """A file of lines that grows, or is rewritten by a resume. New complete lines go to `use`; `forget` drops them all.

    `most` is how many bytes one `look` may read (None: all); the next ones read what is `left`.
    """

    most: int | None = None

    def __init__(self, folder: Folder, path: Path):
        self.folder, self.path = folder, path
        self.lock = threading.Lock()
        self.signature: Signature | None = None
        self._reset()

    @abstractmethod
    def use(self, lines: bytes) -> None: ...

    @abstractmethod
    def too_long(self) -> None:
        """Count a line longer than a chunk, which was skipped."""

    @abstractmethod
    def forget(self) -> None: ...

    def _reset(self) -> None:
        self._offset = self.left = 0
        self._tail = b""
        self._skipping = False  # inside a line longer than a chunk
        self.forget()

    def look(self) -> None:
        """Use the new complete lines. The caller holds the lock."""
        signature = self.folder.signature(self.path)
        if signature == self.signature and not self.left:
            return
        if signature is None:
            self._reset()
        elif signature[1] > MOST_BYTES:  # a sparse file can claim any length
            self._reset()
            self.too_long()
        else:
            self._read(signature[1])
        self.signature = signature

    def _read(self, size: int) -> None:
        try:
            with open(self.path, "rb") as file:
                if size < self._offset or not self._continues(file):
                    self._reset()
                end = size if self.most is None else min(size, self._offset + self.most)
                file.seek(self._offset)
                while self._offset < end and self._take(file.read(min(CHUNK, size - self._offset))):
                    file.seek(self._offset)
                self.left = size - self._offset if self._offset >= end else 0
        except OSError:
            self._reset()

    def _continues(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _take(self, data: bytes) -> bool:
        """Use the complete lines of a chunk; return False if there are none."""
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < CHUNK:
            return False  # an incomplete row
        used = data[:end] if end else data
        self._offset += len(used)
        self._tail = (self._tail + used[-TAIL:])[-TAIL:]
        if self._skipping:
            _, _, used = used.partition(b"\n")
        if not end:
            if not self._skipping:
                self.too_long()
            self._skipping = True
            return True
        self._skipping = False
        self.use(used)
        return True


def cache_file(cache: Path, path: Path) -> Path:
    """Return the cache file of a metrics file."""
    return cache / f"{hashlib.sha256(bytes(path)).hexdigest()}.columns"


def kept_bytes(cached: Path, path: Path) -> int:
    """Return how many bytes of `path` are cached."""
    try:
        with open(cached, "rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 1 << 20)))
        return int(header["offset"]) if header["format"] == FORMAT and header["path"] == str(path) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def used_bytes(cache: Path) -> int:
    """Return the size of the whole cache."""
    return sum(stat.st_size for stat, _ in _cached(cache))


class RunMetrics(Growing):
    """The columns of one metrics.jsonl; `refresh` reads what is new."""

    def __init__(self, folder: Folder, path: Path, cache: Path | None):
        self.cache = None if cache is None else cache_file(cache, path)
        super().__init__(folder, path)
        self._kept = self._load()

    def forget(self) -> None:
        self.columns, self._kept = Columns(), 0

    def use(self, lines: bytes) -> None:
        for block in blocks(lines):
            self.columns.add(block)

    def too_long(self) -> None:
        self.columns.bad += 1

    def refresh(self) -> Columns:
        """Return the columns of all complete rows in the file."""
        with self.lock:
            before = self.signature
            self.look()
            if self.signature != before and self.columns.count >= KEEP_FROM and self.columns.count > 1.25 * self._kept:
                self._save()
            return self.columns

    def _save(self) -> None:
        """Cache the columns for the next start, if the cache can be written."""
        if self.cache is None or self._skipping:
            return
        columns = self.columns
        header = {
            "format": FORMAT,
            "path": str(self.path),
            "offset": self._offset,
            "tail": self._tail.hex(),
            "count": columns.count,
            "bad": columns.bad,
            "extra_names": columns.extra_names,
            "extra_rows": columns.extra_rows,
            "columns": [[name, columns[name].dtype.str] for name in columns.names],
        }
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        parts = [len(head).to_bytes(8, "little"), head]
        for name in columns.names:
            raw = columns[name].tobytes()
            parts += [raw, b"\0" * (-len(raw) % 8)]
        try:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.cache, b"".join(parts))
            self._kept = columns.count
        except (OSError, StorageError):
            self.cache = None

    def _load(self) -> int:
        """Load cached columns if they are there and complete; return their number of rows."""
        if self.cache is None:
            return 0
        try:
            with open(self.cache, "rb") as file:
                raw = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(bytes(raw[8 : 8 + length]))
            if header["format"] != FORMAT or header["path"] != str(self.path):
                return 0
            arrays, place = {}, 8 + length
            for name, kind in header["columns"]:
                arrays[name] = np.frombuffer(raw, np.dtype(kind), header["count"], place)
                place += arrays[name].nbytes + -arrays[name].nbytes % 8
            os.utime(self.cache)  # the least recently used are removed first
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        self.columns = Columns(
            int(header["count"]), int(header["bad"]), arrays, bool(header["extra_names"]), bool(header["extra_rows"])
        )
        self._offset, self._tail = int(header["offset"]), bytes.fromhex(header["tail"])
        return self.columns.count


class Index:
    """The metrics of recently used runs, in at most `limit` bytes of memory and `disk` bytes of cache."""

    def __init__(self, folder: Folder, cache: Path | None, limit: int = 256 << 20, disk: int = DISK):
        self.folder, self.cache, self.limit = folder, cache, limit
        self._known: OrderedDict[Path, RunMetrics] = OrderedDict()
        self._lock = threading.Lock()
        if cache is not None:
            _prune(cache, disk)

    def columns(self, path: Path) -> Columns:
        return self.get(path).refresh()

    def get(self, path: Path) -> RunMetrics:
        with self._lock:
            found = self._known.get(path)
            if found is None:
                found = self._known[path] = RunMetrics(self.folder, path, self.cache)
            self._known.move_to_end(path)
            while len(self._known) > 1 and self.nbytes > self.limit:
                self._known.popitem(last=False)
            return found

    @property
    def nbytes(self) -> int:
        return sum(metrics.columns.nbytes for metrics in self._known.values())


def _prune(cache: Path, limit: int) -> None:
    """Remove the oldest files beyond `limit` bytes."""
    total = 0
    for stat, path in sorted(_cached(cache), key=lambda pair: -pair[0].st_mtime):
        total += stat.st_size
        if total > limit:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _cached(cache: Path) -> list[tuple[os.stat_result, str]]:
    try:
        return [(entry.stat(), entry.path) for entry in os.scandir(cache) if entry.name.endswith(".columns")]
    except OSError:
        return []
