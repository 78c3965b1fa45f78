"""Names, globs and directories become a list of files, and files become shards of pieces.

A piece is a part of a file that can be read on its own: a range of bytes of a .jsonl or .txt, a row group of a parquet
file, or a whole compressed file. The shards depend on the files alone, so any number of workers writes the same store.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import lzma
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

from bessemer.config.aliases import on_hub
from bessemer.errors import InputError, nearest
from bessemer.storage import remote
from bessemer.storage.checksums import json_digest
from bessemer.storage.remote import arrow_source, is_remote, open_read

SHARD_BYTES = 8 << 20
TEXT_BYTES = 64 << 10  # a longer .txt is cut at line ends into documents of about this size
RECORDS = (".parquet", ".jsonl", ".ndjson")
"""Files of rows: in a directory that has some, other files (README.md, dataset_info.json) are not data."""


@dataclass(frozen=True)
class File:
    """One source file. `kind` decides how it is read, regardless of its name."""

    path: str
    kind: str
    size: int
    modified: int = 0


@dataclass(frozen=True)
class Piece:
    """What one read covers: bytes [start, stop) of a text file, or row groups [start, stop) of a parquet file."""

    path: str
    kind: str
    start: int
    stop: int
    size: int  # bytes of the file this stands for: for progress, and to fill shards
    text_bytes: int = TEXT_BYTES


@dataclass(frozen=True)
class Files:
    """A source made of files: what a registered dataset may return."""

    files: tuple[File, ...]
    label: str = ""
    left_out: tuple[tuple[str, int], ...] = ()
    """Of directories: why files were not taken, and how many."""

    @property
    def key(self) -> str:
        """Return a hash that changes whenever a file is added, removed, resized or touched."""
        return json_digest([[f.path, f.kind, f.size, f.modified] for f in self.files])


@dataclass(frozen=True)
class Documents:
    """Documents in memory: a sequence (`len` and `[i]`) of texts, {"text": …} or {"input_ids": …}."""

    items: Sequence[Any] = field(repr=False)
    label: str = "python"


@dataclass(frozen=True)
class Stream:
    """Documents that can be read only once, in order. `key` names the content, since it cannot be looked at."""

    items: Iterator[Any] = field(repr=False)
    key: str
    label: str = "an iterable"


Source = Files | Documents | Stream


def find_files(names: str | Path | Iterable[str | Path]) -> Files:
    """Return every file the names stand for: a file, a glob (sorted), or a directory (all files of texts below it,
    sorted), here or in an object store (s3://, gs://)."""
    listed = [names] if isinstance(names, (str, Path)) else list(names)
    if not listed:
        raise InputError("no data files were given: name at least one file, glob or directory.")
    found: dict[str, File] = {}
    left_out: Counter[str] = Counter()
    for name in listed:
        chosen, others = remote_files(str(name)) if is_remote(name) else _local_files(str(name))
        left_out += others
        for file in chosen:
            found.setdefault(file.path if is_remote(name) else str(Path(file.path).resolve()), file)
    return Files(tuple(found.values()), ", ".join(map(str, listed)), tuple(sorted(left_out.items())))


def remote_files(name: str) -> tuple[list[File], Counter[str]]:
    """Return the files of an object store that a name stands for, and what was left out of a directory."""
    entries = remote.find(name)
    if f"{name.rstrip('/')}/store.json" in {entry.name for entry in entries}:
        raise InputError(f"'{name}' is a prepared store, which is mapped into memory: copy it to a local disk first.")
    if not entries:
        raise InputError(f"'{name}': no file is there; check the bucket and the path or pattern.")
    files = [(entry.name, entry.size, entry.modified) for entry in entries]
    if re.search(r"[*?[]", name) or (len(entries) == 1 and entries[0].name == name):
        return [File(path, detect(path), size, modified) for path, size, modified in files], Counter()
    return _of_directory(name, files)


def _local_files(name: str) -> tuple[list[File], Counter[str]]:
    path = Path(name).expanduser()
    if not path.is_dir():
        return [file_of(found) for found in _expand(name)], Counter()
    if (path / "store.json").exists():
        raise InputError(f"'{name}' is a prepared store, not text: use it as training.dataset={name}.")
    found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
    facts = [(str(p.absolute()), p.stat()) for p in found]
    return _of_directory(name, [(full, stat.st_size, stat.st_mtime_ns) for full, stat in facts])


def _of_directory(name: str, files: Sequence[tuple[str, int, int]]) -> tuple[list[File], Counter[str]]:
    """Return what a directory holds of texts: its files of rows (and .txt) where there are some, else all text."""
    rows = any(_is_record(path) for path, _, _ in files)
    found: list[File] = []
    left_out: Counter[str] = Counter()
    first = ""
    for path, size, modified in files:
        if rows and not _is_record(path) and not path.lower().endswith(".txt"):
            left_out["beside files of rows"] += 1
            continue
        try:
            found.append(File(path, detect(path), size, modified))
        except InputError as error:
            first = first or f" The first: {error}"
            left_out["not readable as text"] += 1
    if not found:
        raise InputError(f"directory '{name}' holds no files of text, JSON lines or parquet.{first}")
    return found, left_out


def _is_record(path: str) -> bool:
    name = path.lower()
    packed = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
    return packed.endswith(RECORDS)


def file_of(path: Path, kind: str | None = None) -> File:
    """Return the facts of a local file; `kind` says how it is read where its content must not decide."""
    try:
        facts = path.stat()
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}.") from error
    if not stat.S_ISREG(facts.st_mode):
        raise InputError(f"'{path}' is not a regular file: write its content to one first.")
    # in full, so that a file is the same source, and its store the same, from whatever directory it is named
    full = str(path.absolute())
    return File(full, kind or detect(full), facts.st_size, facts.st_mtime_ns)


def _expand(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.exists():
        return [path]
    if glob.has_magic(name):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise InputError(f"no file matches '{name}': check the pattern and the directory it starts from.")
        return found
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, siblings)
    hint = f" Did you mean '{path.parent / close}'?" if close else ""
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and all(Path(part).expanduser().exists() for part in parts):
        hint = f" For several, write [{','.join(parts)}]."
    elif not close and (hub := on_hub(name)):
        hint = f" A dataset of the Hugging Face hub is named {hub}."
    # an older run, whose configuration has no full path, may be resumed from another directory
    where = "" if path.is_absolute() else f" below {Path.cwd()}"
    raise InputError(f"'{name}' does not exist{where}.{hint}")


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def plan_shards(files: Files, shard_bytes: int = SHARD_BYTES) -> list[list[Piece]]:
    """Cut the files into pieces and gather neighbors into shards of about `shard_bytes`; order is kept."""
    alone = len(files.files) == 1
    shards: list[list[Piece]] = []
    current: list[Piece] = []
    filled = 0
    for file in files.files:
        for piece in _pieces(file, shard_bytes, alone):
            if current and filled + piece.size > shard_bytes:
                shards.append(current)
                current, filled = [], 0
            current.append(piece)
            filled += piece.size
    if current:
        shards.append(current)
    return shards


def _pieces(file: File, shard_bytes: int, alone: bool) -> list[Piece]:
    if file.size == 0:
        return []
    if file.kind == "parquet":
        return _parquet_pieces(file)
    if file.kind == "jsonl":
        cut, step = TEXT_BYTES, shard_bytes
    elif file.kind == "txt":
        cut = text_cut(file.size, alone)
        step = max(1, shard_bytes // cut) * cut  # a multiple, so that shards do not move the cuts
    else:  # compressed: about four times as long inside
        return [Piece(file.path, file.kind, 0, file.size, file.size, text_cut(4 * file.size, alone))]
    starts = range(0, file.size, step)
    ends = [min(s + step, file.size) for s in starts]
    return [Piece(file.path, file.kind, s, e, e - s, cut) for s, e in zip(starts, ends, strict=True)]


def text_cut(size: int, alone: bool) -> int:
    """Bytes of one document of a .txt. A small file that is the only source is cut in about sixteen, at least
    1 KiB each, so that a validation split by document exists."""
    if alone and size < 16 * TEXT_BYTES:
        return max(1024, -(-size // 16))
    return TEXT_BYTES


def _parquet_pieces(file: File) -> list[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(arrow_source(file.path))
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"'{file.path}' is not a readable parquet file ({error}): it may be cut short; copy it again."
        ) from error
    groups = footer.num_row_groups
    share = -(-file.size // max(groups, 1))
    return [Piece(file.path, file.kind, g, g + 1, share) for g in range(groups)]


# The kind of a file, by its first bytes: parquet, JSON lines or plain text, compressed or not. The name decides only
# between JSON lines and text: `.jsonl`, `.ndjson` and `.json` hold rows, a file without an extension what its first
# line looks like, and any other (`.txt`, `.md`, `.py`, …) plain text.


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
            raise _refused(path, f"a {packing} file that cannot be unpacked ({error})", "Copy it again") from error
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
        raise _refused(path, f"not a parquet file{how}, despite its name", "Copy it again")
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
    """Return whether a line is a JSON object; one that is longer than what was read, whether it begins as one."""
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
