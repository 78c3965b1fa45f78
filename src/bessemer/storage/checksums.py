"""Checksums of large files, one per chunk, so that every chunk is verified before its first use.

    FOLDER/sums.bin    uint64 per chunk of 8 KiB, file after file: the first eight bytes of the chunk's SHA-256

A chunk is a few rows long, so verifying it reads little more than the row that needs it. The JSON file that commits the
folder holds the sizes and the SHA-256 of sums.bin itself. Files are in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.errors import StorageError

CHUNK = 1 << 13
FILE = "sums.bin"
SAMPLE = 64  # chunks of a file that are read when it is opened: 512 KiB


def json_digest(facts: Any) -> str:
    """Return the SHA-256 of what JSON can say, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ChunkSums:
    """The checksums of bytes that arrive in blocks of any length."""

    def __init__(self) -> None:
        self._sums: list[bytes] = []
        self._rest = b""

    def update(self, block: bytes | memoryview) -> None:
        data = memoryview(self._rest + bytes(block) if self._rest else block).cast("B")
        whole = len(data) - len(data) % CHUNK
        self._sums += [_sum(data[at : at + CHUNK]) for at in range(0, whole, CHUNK)]
        self._rest = bytes(data[whole:])

    def finish(self) -> np.ndarray:
        """Return the checksums, (chunks,) uint64."""
        last = [_sum(memoryview(self._rest))] if self._rest else []
        return np.frombuffer(b"".join(self._sums + last), "<u8")


def _sum(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()[:8]


def save_sums(folder: Path, sums: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write `folder`/sums.bin and return the facts about it, for the JSON file that commits the folder."""
    data = b"".join(sums[name].astype("<u8").tobytes() for name in sorted(sums))
    (folder / FILE).write_bytes(data)
    counts = {name: len(values) for name, values in sums.items()}
    return {"chunk": CHUNK, "files": counts, "sha256": hashlib.sha256(data).hexdigest()}


def load_sums(folder: Path, facts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return file name → checksums. Raise StorageError if sums.bin is not what was written."""
    path = folder / FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read '{path}' ({error.strerror}): {REMEDY}") from error
    if hashlib.sha256(data).hexdigest() != facts.get("sha256") or facts.get("chunk") != CHUNK:
        raise StorageError(f"'{path}' is damaged: its own checksum does not match. {REMEDY.capitalize()}")
    values = np.frombuffer(data, "<u8")
    counts = {name: int(facts["files"][name]) for name in sorted(facts["files"])}
    parts = np.split(values, np.cumsum(list(counts.values()))[:-1])
    return dict(zip(counts, parts, strict=True))


REMEDY = "copy it again from its source, or delete the folder and prepare the data again."


class VerifiedFile:
    """A mapped file whose chunks are compared with their checksums before they are used."""

    def __init__(self, path: Path, data: np.ndarray, sums: np.ndarray) -> None:
        """`data`: the bytes of the whole file, (n,) uint8."""
        if len(sums) != -(-len(data) // CHUNK):
            raise StorageError(f"'{path}' has {len(data)} bytes and its checksums are of another length: {REMEDY}")
        self.path, self._data, self._sums = path, data, sums.astype("<u8").view("S8")
        self._verified = np.zeros(len(sums), bool)

    def require(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Verify the chunks of the bytes [begins[i], ends[i]) that have not been. Raise StorageError if one differs."""
        first, last = begins // CHUNK, (np.maximum(ends, begins + 1) - 1) // CHUNK
        longest = int((last - first).max(initial=0))
        chunks = np.minimum(first[:, None] + np.arange(longest + 1), last[:, None])
        self._verify(np.unique(chunks[~self._verified[chunks]]))

    def sample(self, count: int = SAMPLE) -> None:
        """Verify `count` chunks spread over the whole file, the first and the last among them."""
        if len(self._verified):
            self._verify(np.unique(np.linspace(0, len(self._verified) - 1, count).astype(np.int64)))

    def verify(self) -> None:
        """Verify every chunk."""
        self._verify(np.arange(len(self._verified)))

    def _verify(self, chunks: np.ndarray) -> None:
        for chunk in chunks.tolist():
            begin = chunk * CHUNK
            if _sum(self._data[begin : begin + CHUNK].data) != self._sums[chunk : chunk + 1].tobytes():
                raise StorageError(
                    f"'{self.path}' is damaged: bytes {begin} to {min(begin + CHUNK, len(self._data))} are not what "
                    f"was written (SHA-256 differs). {REMEDY.capitalize()}"
                )
        self._verified[chunks] = True
