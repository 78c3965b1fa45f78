"""A file of lines that a run appends to, or writes anew when it is resumed: each of its bytes is read once.

A file that was written anew is noticed by the bytes before the place where reading ended: when they are not the same,
everything is read again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

from bessemer.dash.files import Folder, Signature
from bessemer.report.metrics import MOST_BYTES

CHUNK = 8 << 20
TAIL = 64


class Growing(ABC):
    """Gives complete lines, as they come, to `use`; `forget` when they were of a file that is no more. `most`: bytes
    that one look may read (None: all of them); what is `left` is read by the next looks."""

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
        """A line longer than a chunk was left out."""

    @abstractmethod
    def forget(self) -> None: ...

    def _reset(self) -> None:
        self._offset = self.left = 0
        self._tail = b""
        self._skipping = False  # inside a line longer than a chunk
        self.forget()

    def look(self) -> None:
        """Use the complete lines that are new; the lock is held by the caller."""
        signature = self.folder.signature(self.path)
        if signature == self.signature and not self.left:
            return
        if signature is None:
            self._reset()
        elif signature[1] > MOST_BYTES:  # a sparse file claims any length, and reading it takes as long
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
        """Use the complete lines of a chunk; False when there are none."""
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < CHUNK:
            return False  # a row that is being written
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
