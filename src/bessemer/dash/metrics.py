"""A run's metrics as they grow: each byte of metrics.jsonl is read once, and what was read is kept on disk too.

home/dash/SHA256(path).columns = length of the header (8 bytes), header (JSON), the columns one after the other
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from bessemer.dash.columns import Columns, blocks
from bessemer.dash.files import Folder
from bessemer.dash.growing import Growing
from bessemer.errors import StorageError
from bessemer.job.files import atomic_write

FORMAT = 2
KEEP_FROM = 2000  # rows: fewer are read again faster than found
DISK = 2 << 30  # bytes of cache


def cache_file(cache: Path, path: Path) -> Path:
    """Where the columns of a metrics file are kept."""
    return cache / f"{hashlib.sha256(bytes(path)).hexdigest()}.columns"


def kept_bytes(cached: Path, path: Path) -> int:
    """How many bytes of `path` need not be read again; 0 where nothing is kept."""
    try:
        with open(cached, "rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 1 << 20)))
        return int(header["offset"]) if header["format"] == FORMAT and header["path"] == str(path) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def used_bytes(cache: Path) -> int:
    """Of the whole cache."""
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
        """The columns of all complete rows that are in the file now."""
        with self.lock:
            before = self.signature
            self.look()
            if (
                self.signature != before
                and self.columns.count >= KEEP_FROM
                and self.columns.count > 1.25 * self._kept
            ):
                self._save()
            return self.columns

    def _save(self) -> None:
        """Keep the columns for the next start; a cache that cannot be written is no reason to fail."""
        if self.cache is None or self._skipping:
            return
        columns = self.columns
        names = columns.names
        header = {
            "format": FORMAT,
            "path": str(self.path),
            "offset": self._offset,
            "tail": self._tail.hex(),
            "count": columns.count,
            "bad": columns.bad,
            "extra_names": columns.extra_names,
            "extra_rows": columns.extra_rows,
            "columns": [[name, columns[name].dtype.str] for name in names],
        }
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        parts = [len(head).to_bytes(8, "little"), head]
        for name in names:
            raw = columns[name].tobytes()
            parts += [raw, b"\0" * (-len(raw) % 8)]
        try:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.cache, b"".join(parts))
            self._kept = columns.count
        except (OSError, StorageError):
            self.cache = None

    def _load(self) -> int:
        """Take the columns of an earlier process where they are there and whole; returns their rows."""
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
            os.utime(self.cache)  # the least recently used are the first to be removed
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        self.columns = Columns(
            int(header["count"]),
            int(header["bad"]),
            arrays,
            bool(header["extra_names"]),
            bool(header["extra_rows"]),
        )
        self._offset, self._tail = int(header["offset"]), bytes.fromhex(header["tail"])
        return self.columns.count


class Index:
    """The metrics of the runs looked at lately, in at most `limit` bytes of memory and `disk` bytes of cache."""

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
