"""What a file of texts is, by its first bytes: parquet, JSON lines or plain text, compressed or not.

The name decides only between JSON lines and text, which look alike: `.jsonl`, `.ndjson` and `.json` hold rows, a file
without an extension what its first line looks like, and any other (`.txt`, `.md`, `.py`, …) plain text.
"""

from __future__ import annotations

import codecs
import io
import json
import lzma
from pathlib import PurePath
from typing import Any, BinaryIO, cast

from bessemer.errors import InputError
from bessemer.job.remote import arrow_source, open_read

PROBE = 1 << 14  # bytes that are looked at
ROWS = (".jsonl", ".ndjson")
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
SUFFIXES = (".gz", ".zst", ".zstd", ".bz2", ".xz")
PARQUET = b"PAR1"
UNPACKING = (OSError, EOFError, lzma.LZMAError)
"""What a damaged compressed file raises."""
MEMORY = 256 << 20
"""Bytes that unpacking xz may take; its header asks for what it wants."""

BINARY: tuple[tuple[int, bytes, str], ...] = (
    (0, b"%PDF", "a PDF document"),
    (0, b"PK\x03\x04", "a ZIP archive (or an Office document)"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (257, b"ustar", "a tar archive"),
    (0, b"7z\xbc\xaf", "a 7z archive"),
    (0, b"\x7fELF", "a program"),
    (0, b"ARROW1", "an Arrow file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"SQLite format 3", "an SQLite database"),
    (0, b"\x89HDF", "an HDF5 file"),
    (0, b"\xff\xfe", "text in UTF-16"),
    (0, b"\xfe\xff", "text in UTF-16"),
)
REMEDIES = {
    "text in UTF-16": "Convert it to UTF-8",
    "a tar archive": "Unpack it",
    "a ZIP archive (or an Office document)": "Unpack it, or save it as plain text",
}


def detect(path: str) -> str:
    """Return how a file is read: "parquet", "jsonl" or "txt", the last two also as "jsonl+gzip" and the like. Raise
    InputError that names what was found if it holds no text."""
    try:
        with open_read(path) as file:
            head = file.read(PROBE)
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror or error}.") from error
    if head.startswith(PARQUET):
        return "parquet"
    packing = next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None)
    name = PurePath(path).name.lower()
    name = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
    if packing is None:
        return _kind(head, path, name)
    try:
        with open_unpacked(path, packing, PROBE) as stream:
            head = stream.read(PROBE)
    except UNPACKING as error:
        if not name.endswith((*ROWS, ".txt")):
            raise _refused(
                path, f"a {packing} file that cannot be unpacked ({error})", "Copy it again"
            ) from error
        head = b""  # the reader says how far it came
    return f"{_kind(head, path, name, f' compressed with {packing}')}+{packing}"


def open_unpacked(path: str, packing: str, buffer: int = 1 << 20) -> BinaryIO:
    """Return the bytes inside a compressed file, to be read in order; nothing is unpacked ahead of the reader."""
    import pyarrow as pa

    if packing == "xz":
        return cast(BinaryIO, io.BufferedReader(_Xz(open_read(path)), buffer))
    stream = pa.input_stream(arrow_source(path), compression=packing)
    return cast(BinaryIO, io.BufferedReader(stream, buffer))


def _kind(head: bytes, path: str, name: str, how: str = "") -> str:
    suffix = PurePath(name).suffix
    for offset, magic, words in BINARY:
        if head[offset:].startswith(magic):
            raise _refused(path, words + how, REMEDIES.get(words, "Name text, JSON lines or parquet"))
    if suffix == ".parquet":
        raise _refused(path, f"not a parquet file{how}, for all its name", "Copy it again")
    if suffix in (".csv", ".tsv"):
        raise _refused(path, f"a table ({suffix}){how}", "Write it as .jsonl, one JSON object per line")
    # Of those named as text the reader says which byte is wrong, and may skip and count it.
    named = suffix in (*ROWS, ".txt")
    problem = None if named else _not_text(head, len(head) < PROBE)
    if problem is not None:
        raise _refused(path, f"not text in UTF-8{how} ({problem})", "Convert it to UTF-8 if it is text")
    if suffix in ROWS:
        return "jsonl"
    if suffix not in ("", ".json"):
        return "txt"
    text = head.lstrip()
    first = text.partition(b"\n")[0]
    if _is_row(first, whole=len(first) < len(text) or len(head) < PROBE):
        return "jsonl"
    if suffix == ".json":
        found = "a JSON list" if first.startswith(b"[") else "JSON over several lines"
        raise _refused(path, found + how, "Write it as .jsonl, one JSON object per line")
    return "txt"


def _refused(path: str, found: str, remedy: str) -> InputError:
    return InputError(f"'{path}' is {found}, which cannot be read as documents. {remedy}.")


def _not_text(head: bytes, complete: bool) -> str | None:
    if (place := head.find(b"\0")) >= 0:
        return f"a zero byte at {place}"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, complete)
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return None


def _is_row(line: bytes, whole: bool) -> bool:
    """Whether a line is a JSON object; one that is longer than what was read, whether it begins as one."""
    if not line.startswith(b"{"):
        return False
    if not whole:
        return line[1:].lstrip().startswith(b'"')
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class _Xz(io.RawIOBase):
    """An xz file unpacked in bounded memory; several streams after each other are one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest = file, b""
        self._unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._unpacker.eof:
                self._rest = (self._unpacker.unused_data or self._file.read(1 << 16)).lstrip(b"\0")
                if not self._rest:
                    return 0
                self._unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
            elif self._unpacker.needs_input and not self._rest:
                self._rest = self._file.read(1 << 16)
                if not self._rest:
                    raise EOFError("the file ends inside its last stream")
            data, self._rest = self._unpacker.decompress(self._rest, len(buffer)), b""
            if data:
                buffer[: len(data)] = data
                return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
