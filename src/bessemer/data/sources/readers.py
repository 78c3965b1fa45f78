"""Reading pieces of files as rows or blocks of text, with the file, the line and the reason of everything invalid.

Rows of parquet files are read in bounded memory, whatever a small file expands to. A parquet file may be hundreds of
bytes long and hold hundreds of gigabytes: 20,000 rows that all point to one text of 8 MiB in a dictionary, a page of
one letter that zstd packs 10,000-fold, a list of a billion equal numbers. So texts are read as indices into their
dictionary, rows become Python objects only in slices whose size is known beforehand, and the footer is checked before
any of it is unpacked.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from bessemer.data.sources.files import UNPACKING, File, Files, Piece, open_unpacked, plan_shards
from bessemer.errors import InputError
from bessemer.storage.remote import arrow_source, open_read

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


LONGEST = 16 << 20
"""Largest line or document in bytes: encoding takes up to 140 bytes of memory per byte (2.2 GB)."""
DEEPEST = 64  # levels of lists and objects in a row
TOO_LONG = f"longer than {LONGEST >> 20} MiB, the most one document may have: cut it into several"
TOO_DEEP = f"nested deeper than {DEEPEST} levels"
COUNTED = 4 << 30  # bytes of a file whose lines are counted to number one in a message
CUT_SHORT = "the compressed stream is damaged or cut short"


@dataclass(frozen=True, slots=True)
class Bad:
    """Something that is not a document: where it is and why.

    `place` may be a function: the number of a line is known only after those before it are counted.
    """

    place: str | Callable[[], str]
    reason: str

    @property
    def where(self) -> str:
        return self.place if isinstance(self.place, str) else self.place()

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Raw:
    """A row as it stands in its file; `where` says file and line."""

    value: Any
    where: Callable[[], str]


def read_rows(
    piece: Piece, columns: Callable[[list[str]], list[str] | None] = lambda names: None, most_unpacked: float = math.inf
) -> Iterator[Raw | Bad]:
    """Yield every row of a piece of JSON lines or parquet, here or in an object store.

    columns: of the names of a parquet file's columns those that are wanted, None for all; most_unpacked: bytes after
    which a compressed file is left.
    """
    if piece.kind == "parquet":
        return _parquet(piece, columns)
    return _lines(piece) if piece.kind == "jsonl" else _unpacked_lines(piece, most_unpacked)


def read_texts(piece: Piece, most_unpacked: float = math.inf) -> Iterator[str | Bad]:
    """Yield the documents of a piece of plain text. most_unpacked: see read_rows."""
    return _text(piece) if piece.kind == "txt" else _unpacked_text(piece, most_unpacked)


def read_file_rows(file: File) -> Iterator[Raw | Bad]:
    """Yield every row of a file. Raise InputError if it is plain text."""
    if file.kind.startswith("txt"):
        raise InputError(f"{file.path} is plain text: rows are read from JSON lines or parquet files.")
    for pieces in plan_shards(Files((file,))):
        for piece in pieces:
            yield from read_rows(piece)


def parse_line(line: bytes) -> Any | Bad:
    """Return the value of a line of JSON, or what is wrong with it, without its place."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return Bad("", f"not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return Bad("", f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})")
    except RecursionError:
        return Bad("", TOO_DEEP)
    except ValueError as error:  # an integer of thousands of digits
        return Bad("", f"not valid JSON ({error})")
    if isinstance(value, str):
        return Bad("", "expected a JSON object, not a string")
    return Bad("", TOO_DEEP) if deeper_than(value, DEEPEST) else value


def deeper_than(value: Any, limit: int) -> bool:
    """Return whether lists and objects are nested deeper than `limit`; without recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    while level and limit:
        inner = (item for part in level for item in (part.values() if isinstance(part, dict) else part))
        level = [item for item in inner if isinstance(item, (dict, list))]
        limit -= 1
    return bool(level)


def _read_line(file: BinaryIO, most: float = math.inf) -> tuple[bytes | Bad, int]:
    """Return (the next line, its length in bytes). A line longer than any document is skipped in bounded memory.

    most: bytes after which the end of the line is not searched for.
    """
    line = file.readline(LONGEST + 1)
    if len(line) <= LONGEST:
        return line, len(line)
    length, last = len(line), line
    while length < most and not last.endswith(b"\n") and (last := file.readline(1 << 20)):
        length += len(last)
    return Bad("", TOO_LONG), length


def _skip_line(file: BinaryIO, most: int) -> int:
    """Read to the end of the line, or of `most` bytes; return how many were read."""
    length = 0
    while length < most and (part := file.readline(min(1 << 20, most - length))):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def _row(line: bytes | Bad, where: Callable[[], str]) -> Raw | Bad | None:
    """Return the row of a line, or what is wrong with it; None for an empty one."""
    if isinstance(line, bytes) and not line.strip():
        return None
    value = line if isinstance(line, Bad) else parse_line(line)
    return Bad(where, value.reason) if isinstance(value, Bad) else Raw(value, where)


def _lines(piece: Piece) -> Iterator[Raw | Bad]:
    """Lines that begin inside [start, stop). The line before `start` belongs to the piece before.

    Nothing is read past `stop` and the end of a line of LONGEST, so that all pieces of a file of one line together read
    it once.
    """
    before = cache(partial(_count_lines, piece.path, piece.start))  # every row may ask for its number
    with open_read(piece.path) as file:
        if piece.start:
            file.seek(piece.start - 1)
            position = piece.start - 1 + _skip_line(file, piece.stop - piece.start + 1)
        else:
            position = 0
        number = 0
        while position < piece.stop:
            line, length = _read_line(file, piece.stop - position)
            number += 1
            position += length
            row = _row(line, partial(_line_of, piece, number, before))
            if row is not None:
                yield row


def _line_of(piece: Piece, number: int, before: Callable[[], int] = lambda: 0) -> str:
    """Name the line; those before the piece are counted only for a message, and not in a file of many gigabytes."""
    if piece.start > COUNTED:
        return f"{piece.path} line {number} after byte {piece.start}"
    return f"{piece.path} line {before() + number}"


def _count_lines(path: str, start: int) -> int:
    """Return the number of lines that begin before byte `start`."""
    count, left = min(1, start), start - 1
    with open_read(path) as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _unpacked_lines(piece: Piece, most: float) -> Iterator[Raw | Bad]:
    number, read = 0, 0
    try:
        with open_unpacked(piece.path, piece.kind.partition("+")[2]) as stream:
            while read < most:
                line, length = _read_line(stream, most - read)
                if not length:
                    return
                number, read = number + 1, read + length
                row = _row(line, partial(_line_of, piece, number))
                if row is not None:
                    yield row
    except UNPACKING as error:
        yield Bad(f"{piece.path} after line {number}", f"{CUT_SHORT} ({error})")


def _unpacked_text(piece: Piece, most: float) -> Iterator[str | Bad]:
    """Yield texts of about `text_bytes`, each up to a line end."""
    begin, rest = 0, b""
    try:
        with open_unpacked(piece.path, piece.kind.partition("+")[2]) as stream:
            while block := rest + stream.read(piece.text_bytes - len(rest)):
                block += stream.readline(piece.text_bytes) if len(block) == piece.text_bytes else b""
                rest = b"" if block.endswith(b"\n") else _unfinished(block)
                whole = block[: len(block) - len(rest)]
                yield _decoded(whole, piece.path, begin)
                begin += len(whole)
                if len(block) < piece.text_bytes or begin >= most:
                    return
    except UNPACKING as error:
        yield Bad(f"{piece.path} after byte {begin}", f"{CUT_SHORT} ({error})")


def _unfinished(block: bytes) -> bytes:
    """Return the bytes at the end that begin a character whose others are still to come."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte & 0xC0 != 0x80:  # not a continuation: ASCII, or the first of 2 to 4
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return block[-back:] if back < length and len(block) > back else b""
    return b""


def _text(piece: Piece) -> Iterator[str | Bad]:
    with open_read(piece.path) as file:
        size = file.seek(0, io.SEEK_END)
        begin = _boundary(file, piece.start, piece.text_bytes, size)
        for mark in range(piece.start, piece.stop, piece.text_bytes):
            end = _boundary(file, mark + piece.text_bytes, piece.text_bytes, size)
            file.seek(begin)
            block = file.read(end - begin)
            if block:
                yield _decoded(block, piece.path, begin)
            begin = end


def _decoded(block: bytes, path: str, begin: int) -> str | Bad:
    try:
        return block.decode("utf-8-sig" if begin == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return Bad(f"{path} byte {begin + error.start}", f"not UTF-8 ({error.reason}); convert the file to UTF-8")


def _boundary(file: BinaryIO, mark: int, window: int, size: int) -> int:
    """Where the document that holds byte `mark` of a long text begins: after the first line end at or past the mark.

    Without a line end in the next `window` bytes it is the next character. Only bytes near the mark decide, so a text
    of any length is cut in bounded memory and by any number of workers alike.
    """
    if mark == 0 or mark >= size:
        return min(mark, size)
    file.seek(mark)
    ahead = file.read(window)
    line_end = ahead.find(b"\n")
    if line_end >= 0:
        return mark + line_end + 1
    skip = 0
    while skip < min(3, len(ahead)) and ahead[skip] & 0xC0 == 0x80:
        skip += 1
    return mark + skip if mark + window < size else size


def _parquet(
    piece: Piece, columns: Callable[[list[str]], list[str] | None] = lambda names: None
) -> Iterator[Raw | Bad]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(arrow_source(piece.path)) as file:
            wanted = columns(file.schema_arrow.names)
            row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
        for values in read_batches(piece.path, range(piece.start, piece.stop), wanted):
            if isinstance(values, int):
                row += values
                yield Bad(f"{piece.path} row {row}", TOO_LONG)
                continue
            for value in values:
                row += 1
                yield Raw(value, partial("{} row {}".format, piece.path, row))
    except Expands as error:
        yield Bad(f"{piece.path} row group {piece.start}", str(error))
    except (pa.ArrowException, OSError) as error:
        yield Bad(f"{piece.path} row group {piece.start}", f"damaged parquet ({error}); copy the file again")


# --- rows of parquet files ---


ROWS_AT_ONCE = 1024
SLICE_BYTES = 64 << 20
"""Decoded bytes of the rows that become Python objects at once, and the most of a single row."""
PAGE_BYTES = 256 << 20
PAGE_RATIO = 200
"""A column of a row group with more bytes that packs better than this is refused: English text packs about 3-fold."""
MOST_VALUES = 1 << 28
VALUES_PER_BYTE = 64
"""A column of a row group with more values, and more of them per encoded byte, is refused: a list without an end."""
DECODED_BYTES = 1 << 30
DECODED_RATIO = 1000
"""A row group whose rows decode to more than this, and to this many times its encoded size, repeats a few texts."""
PREFIXES = "DELTA_BYTE_ARRAY"
"""Texts as what they share with the one before: each of them may be as long as the whole column chunk."""


class Expands(Exception):
    """A row group that expands to far more than the file holds; the message says what does."""


def read_batches(path: str, groups: range, columns: Sequence[str] | None) -> Iterator[list[Any] | int]:
    """Yield the rows of some row groups in order, in lists; an int is that many rows too large to be decoded.

    columns: names of top-level columns, None for all. Raise Expands if a row group declares an expansion that no text
    has, before it is unpacked, or once its rows have shown it.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(arrow_source(path)) as footer:
        metadata = footer.metadata
    leaves = [
        index
        for index in range(metadata.num_columns)
        if columns is None or metadata.schema.column(index).path.split(".")[0] in columns
    ]
    texts = [
        metadata.schema.column(index).path
        for index in leaves
        if metadata.schema.column(index).physical_type == "BYTE_ARRAY"
    ]
    with pq.ParquetFile(arrow_source(path), read_dictionary=texts) as file:
        for group in groups:
            chunks = [metadata.row_group(group).column(index) for index in leaves]
            _check(chunks)
            encoded, decoded = sum(chunk.total_uncompressed_size for chunk in chunks), 0
            for batch in file.iter_batches(_rows_at_once(chunks), row_groups=[group], columns=columns):
                sizes = sum((_sizes(column) for column in batch.columns), np.zeros(len(batch), np.int64))
                decoded += int(sizes.sum())
                if decoded > max(DECODED_BYTES, DECODED_RATIO * encoded):
                    raise Expands(
                        f"{encoded:,} bytes decode to more than {decoded:,}, over {DECODED_RATIO:,} times as many"
                    )
                yield from _slices(batch, sizes)


def _check(chunks: Sequence[pq.ColumnChunkMetaData]) -> None:
    for chunk in chunks:
        size, packed, values = chunk.total_uncompressed_size, chunk.total_compressed_size, chunk.num_values
        if size > PAGE_BYTES and size > PAGE_RATIO * packed:
            raise Expands(
                f"column '{chunk.path_in_schema}' expands from {packed:,} to {size:,} bytes, more than "
                f"{PAGE_RATIO}-fold"
            )
        if values > MOST_VALUES and values > VALUES_PER_BYTE * size:
            raise Expands(
                f"column '{chunk.path_in_schema}' holds {values:,} values in {size:,} bytes; write smaller row groups"
            )


def _rows_at_once(chunks: Sequence[pq.ColumnChunkMetaData]) -> int:
    longest = max((c.total_uncompressed_size for c in chunks if PREFIXES in c.encodings), default=1)
    return max(1, min(ROWS_AT_ONCE, SLICE_BYTES // max(1, longest)))


def _slices(batch: pa.RecordBatch, sizes: np.ndarray) -> Iterator[list[Any] | int]:
    """Yield the rows of a batch in lists of at most SLICE_BYTES decoded; a row that alone has more is not decoded."""
    if int(sizes.sum()) <= SLICE_BYTES:
        yield batch.to_pylist()
        return
    first, filled = 0, 0
    for row, size in enumerate(sizes.tolist()):
        if filled + size > SLICE_BYTES:
            if first < row:
                yield batch.slice(first, row - first).to_pylist()
            first, filled = row, 0
        if size > SLICE_BYTES:
            yield 1
            first = row + 1
        else:
            filled += size
    if first < len(batch):
        yield batch.slice(first).to_pylist()


def _sizes(array: Any) -> np.ndarray:
    """(n,) bytes of each element once it is decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = array.type
    if types.is_dictionary(kind):
        lengths = np.append(_sizes(array.dictionary), 0)  # the last is for nulls
        return lengths[pc.fill_null(array.indices, len(lengths) - 1).to_numpy(zero_copy_only=False)]
    if types.is_struct(kind):
        return sum((_sizes(part) for part in array.flatten()), np.zeros(len(array), np.int64))
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        parts = [array.keys, array.items] if types.is_map(kind) else [array.values]
        inner = sum((_sizes(part) for part in parts), np.zeros(len(parts[0]), np.int64))
        before = np.concatenate([[0], np.cumsum(inner)])
        return np.diff(before[array.offsets.to_numpy(zero_copy_only=False)])
    if types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind):
        return pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    width = kind.bit_width // 8 if isinstance(kind, pa.DataType) and _has_width(kind) else 8
    return np.full(len(array), max(1, width), np.int64)


def _has_width(kind: Any) -> bool:
    try:
        return bool(kind.bit_width)
    except ValueError:  # a type of variable width
        return False
