"""All access to the files of a directory of runs: nothing outside it is opened, nothing too large is read.

Runs come from anywhere, so a name, a link or a file may be hostile. A path is used only if it lies below DIR with all
links followed; only regular files are read (a pipe would block forever), up to a limit.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.job.directory import check_run_name

PHASES = "phases"
MOST_BYTES = 4 << 20
_ID = re.compile(r"[^/]{1,80}(/phases/[^/]{1,80})?")
T = TypeVar("T")

Signature = tuple[int, int, int]
"""(inode, size, time of the last change): equal while a file is unchanged."""


class Gone(InputError):
    """There is no such run, or its files must not be shown."""


@dataclass(frozen=True)
class Folder:
    """A directory of runs. A run's id is its name, or NAME/phases/PHASE."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).resolve())

    def ids(self) -> tuple[list[str], int]:
        """Return runs and their phases, sorted, and how many entries were skipped because they lead outside."""
        found, outside = [], 0
        for name in _entries(self.root):
            try:
                run = self.run(name)
            except Gone:
                outside += (self.root / name).is_symlink()
                continue
            found.append(name)
            for phase in _entries(run.path / PHASES):
                try:
                    found.append(f"{name}/{PHASES}/{self.run(f'{name}/{PHASES}/{phase}').name}")
                except Gone:
                    continue
        return found, outside

    def run(self, name: str) -> RunDirectory:
        """Return the run of an id. Raise Gone if there is none, or if a link leads out of DIR."""
        if not _ID.fullmatch(name):
            raise Gone(f"there is no run '{name[:100]}'.")
        try:
            for part in name.split("/"):
                check_run_name(part)
        except InputError as error:
            raise Gone(f"there is no run '{name[:100]}'.") from error
        run = RunDirectory(self.root / name)
        if not self.holds(run.path) or not run.path.is_dir() or not run.exists():
            raise Gone(f"there is no run '{name[:100]}' in {self.root}.")
        return run

    def holds(self, path: Path) -> bool:
        """Return whether a path, all links followed, lies in DIR."""
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError):
            return False
        return real == str(self.root) or real.startswith(os.path.join(self.root, ""))

    def signature(self, path: Path) -> Signature | None:
        """Return the signature of a regular file in DIR; None for anything else."""
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(found.st_mode) or not self.holds(path):
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def read(self, path: Path, limit: int = MOST_BYTES, tail: bool = False) -> bytes | None:
        """Return a file's bytes, or its last `limit` with `tail`; None if it is missing, too long, or not in DIR."""
        found = self.signature(path)
        if found is None or (found[1] > limit and not tail):
            return None
        try:
            with open(path, "rb") as file:
                if tail and found[1] > limit:
                    file.seek(found[1] - limit)
                return file.read(limit)
        except OSError:
            return None

    def json(self, path: Path, limit: int = MOST_BYTES) -> Any:
        """Return a JSON file, or None if it is missing or damaged."""
        return parsed(self.read(path, limit))


def parsed(data: bytes | None) -> Any:
    """Return parsed JSON; None if it is not JSON or too deeply nested."""
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


class Remembered:
    """A cache of results by file signature, for at most `most` files and `limit` bytes."""

    def __init__(self, most: int = 4000, limit: int = 32 << 20):
        self.most, self.limit = most, limit
        self._known: dict[Any, tuple[Signature | None, int, Any]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Any, signature: Signature | None, make: Callable[[], T], size: int = 0) -> T:
        """Return the result of `make`, cached while the signature is the same; `size` is its bytes."""
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0] == signature:
                return known[2]
        made = make()
        with self._lock:
            self._drop(key)
            while self._known and (len(self._known) >= self.most or self._bytes + size > self.limit):
                self._drop(next(iter(self._known)))
            self._known[key] = (signature, size, made)
            self._bytes += size
        return made

    def _drop(self, key: Any) -> None:
        if key in self._known:
            self._bytes -= self._known.pop(key)[1]


def _entries(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if not entry.name.startswith("."))
    except OSError:
        return []
