"""A run's metrics as they grow: each byte of metrics.jsonl is read once, and the columns are cached on disk.

home/dash/SHA256(path).columns = length of the header (8 bytes), header (JSON), the columns one after the other
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bessemer.dash.columns import Columns, blocks
from bessemer.dash.files import Folder, Signature
from bessemer.errors import StorageError
from bessemer.report.metrics import MOST_BYTES
from bessemer.storage.files import atomic_write

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
