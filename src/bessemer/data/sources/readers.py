"""Reading one piece of a source as documents, with the file, line and reason of everything that is wrong."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, BinaryIO, cast

from bessemer.data.rows.preference import COLUMNS, Pair, encode_pair, is_pair, pair_bytes, read_pair
from bessemer.data.sources.files import UNPACKING, File, Files, Piece, open_unpacked, plan_shards
from bessemer.data.sources.parquet_rows import Expands, read_batches
from bessemer.data.tokenize import chat
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.storage.remote import arrow_source, open_read

LONGEST = 16 << 20
"""Bytes of a line or a document of a file: encoding takes up to 140 bytes of memory for each (2.2 GB)."""
DEEPEST = 64  # levels of lists and objects in a row
TOO_LONG = f"longer than {LONGEST >> 20} MiB, the most one document may have: cut it into several"
TOO_DEEP = f"nested deeper than {DEEPEST} levels"
COUNTED = 4 << 30  # bytes of a file whose lines are counted to number one in a message
CUT_SHORT = "the compressed stream is damaged or cut short"
CONVERSATIONS = (("messages",), ("prompt", "completion"), ("instruction", "output"))  # columns that make one


@dataclass(frozen=True, slots=True)
class Document:
    """One document: text, or ids that are already tokens (with an optional loss mask of the same length).

    A conversation that no tokenizer has written yet is its `messages`; `bytes` is how much text the ids of one hold.
    The document of a preference pair has it in `pair`, and ids once a tokenizer has written it.
    """

    text: str | None = None
    ids: list[int] | None = None
    mask: list[int] | None = None
    messages: list[chat.Message] | None = None
    bytes: int = 0
    pair: Pair | None = None


@dataclass(frozen=True, slots=True)
class Bad:
    """Something that is no document: where it is and why.

    `place` may be a function: the number of a line is known only after those before it are counted.
    """

    place: str | Callable[[], str]
    reason: str

    @property
    def where(self) -> str:
        return self.place if isinstance(self.place, str) else self.place()

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def read_piece(
    piece: Piece,
    text_key: str | None = None,
    tokenizer: Tokenizer | None = None,
    most_unpacked: float = math.inf,
) -> Iterator[Document | Bad]:
    """Yield every document of the piece, in order. most_unpacked: bytes after which a compressed file is left."""
    if piece.kind.startswith("txt"):
        yield from _text(piece) if piece.kind == "txt" else _unpacked_text(piece, most_unpacked)
        return
    for row in read_rows(piece, lambda names: _columns(names, text_key, piece.path), most_unpacked):
        read = row if isinstance(row, Bad) else document_of(row.value, "", text_key, tokenizer)
        if (
            isinstance(read, Document) and len(read.text or "") > LONGEST
        ):  # in parquet, where no line is too long
            read = Bad("", TOO_LONG)
        if isinstance(read, Bad) and not read.place:
            read = Bad(cast(Raw, row).where, read.reason)
        yield read


@dataclass(frozen=True, slots=True)
class Raw:
    """A row as it stands in its file; `where` says file and line."""

    value: Any
    where: Callable[[], str]


def read_rows(
    piece: Piece,
    columns: Callable[[list[str]], list[str] | None] = lambda names: None,
    most_unpacked: float = math.inf,
) -> Iterator[Raw | Bad]:
    """Yield every row of a piece of JSON lines or parquet, here or in an object store.

    columns: of the names of a parquet file's columns those that are wanted, None for all.
    """
    if piece.kind == "parquet":
        return _parquet(piece, columns)
    return _lines(piece) if piece.kind == "jsonl" else _unpacked_lines(piece, most_unpacked)


def read_file_rows(file: File) -> Iterator[Raw | Bad]:
    """Yield every row of a file. Raise InputError if it is plain text."""
    if file.kind.startswith("txt"):
        raise InputError(f"{file.path} is plain text: rows are read from JSON lines or parquet files.")
    for pieces in plan_shards(Files((file,))):
        for piece in pieces:
            yield from read_rows(piece)


def document_of(
    value: Any, where: str, text_key: str | None = None, tokenizer: Tokenizer | None = None
) -> Document | Bad:
    """A document from a text or a mapping; the column is `text_key`, else `input_ids`, else `chosen` and `rejected`,
    else `text`, else those of a conversation."""
    if isinstance(value, str):
        return _checked(value, where)
    if not isinstance(value, Mapping):
        return Bad(where, f"expected a text or a mapping, not {type(value).__name__}")
    if text_key is None and "input_ids" in value:
        return _tokens(value, where)
    if text_key is None and is_pair(value):
        return _pair(value, where, tokenizer)
    key = text_key or "text"
    chosen = {"messages": value[key]} if text_key and chat.is_messages(value.get(key)) else None
    if chosen or (key not in value and text_key is None):
        return _conversation(chosen or value, where, tokenizer) or Bad(where, _missing(text_key, list(value)))
    if key not in value:
        return Bad(where, _missing(text_key, list(value)))
    if not isinstance(value[key], str):
        return Bad(where, f"'{key}' is {type(value[key]).__name__}, not text")
    return _checked(value[key], where)


def _conversation(row: Mapping[str, Any], where: str, tokenizer: Tokenizer | None) -> Document | Bad | None:
    """Ids and mask of a chat row, or its messages while there is no tokenizer; None: it is no chat row."""
    try:
        messages = chat.conversation_of(row)
        if messages is None:
            return None
        if tokenizer is None:
            return Document(messages=messages)
        ids, mask = chat.supervised(messages, tokenizer)
    except InputError as error:
        return Bad(where, str(error).removesuffix("."))
    return Document(ids=ids, mask=mask, bytes=len(chat.spoken(messages).encode()))


def _pair(row: Mapping[str, Any], where: str, tokenizer: Tokenizer | None) -> Document | Bad:
    """Ids and mask of a preference row, or the pair alone while there is no tokenizer."""
    pair = read_pair(row)
    if isinstance(pair, str):
        return Bad(where, pair)
    if tokenizer is None:
        return Document(pair=pair)
    try:
        ids, mask = encode_pair(pair, tokenizer)
    except InputError as error:
        return Bad(where, str(error).removesuffix("."))
    return Document(ids=ids, mask=mask, bytes=pair_bytes(pair), pair=pair)


def _missing(text_key: str | None, columns: list[str]) -> str:
    """Which columns a row has, and which would make it a document, a conversation or a pair."""
    there = ", ".join(map(str, columns)) or "nothing"
    name = "name the column with data.text_key (--text-key when preparing)"
    if text_key is not None:
        return f"no '{text_key}' (it has {there}); {name}"
    known = [("chosen", "rejected"), *CONVERSATIONS]
    others = "; ".join(" and ".join(f"'{column}'" for column in group) for group in known)
    if "conversations" in columns:  # as ShareGPT's files have it
        name = "write it as 'messages', each {'role': 'user' or 'assistant', 'content': text}"
    return f"no 'text' (it has {there}), nor {others}; {name}"


def _checked(text: str, where: str) -> Document | Bad:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return Bad(where, "the text holds half of a surrogate pair, which is no valid Unicode")
    return Document(text)


def _tokens(value: Mapping[str, Any], where: str) -> Document | Bad:
    try:
        ids = [int(i) for i in value["input_ids"]]
        mask = value.get("loss_mask")
        mask = None if mask is None else [int(bool(m)) for m in mask]
    except (TypeError, ValueError):
        return Bad(where, "'input_ids' and 'loss_mask' are lists of integers")
    if ids and not -(2**31) <= min(ids) <= max(ids) < 2**31:
        return Bad(where, f"'input_ids' hold {max(ids, key=abs)}, which is no token")
    if mask is None:
        return Document(ids=ids)
    if len(mask) != len(ids):
        return Bad(where, f"{len(ids)} input_ids but {len(mask)} loss_mask values")
    return Document(ids=ids, mask=mask)


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
    return Bad("", TOO_DEEP) if _deeper_than(value, DEEPEST) else value


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested deeper than `limit`; without recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    while level and limit:
        inner = (item for part in level for item in (part.values() if isinstance(part, dict) else part))
        level = [item for item in inner if isinstance(item, (dict, list))]
        limit -= 1
    return bool(level)


def _read_line(file: BinaryIO, most: float = math.inf) -> tuple[bytes | Bad, int]:
    """(the next line, its length in bytes). A longer one than any document is passed over in bounded memory.

    most: bytes after which its end is no longer looked for; nobody asks where such a line ends.
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
    """Lines that begin before byte `start`."""
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


def _unpacked_text(piece: Piece, most: float) -> Iterator[Document | Bad]:
    """Yield documents of about `text_bytes`, each up to a line end."""
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


def _text(piece: Piece) -> Iterator[Document | Bad]:
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


def _decoded(block: bytes, path: str, begin: int) -> Document | Bad:
    try:
        return Document(block.decode("utf-8-sig" if begin == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return Bad(
            f"{path} byte {begin + error.start}", f"not UTF-8 ({error.reason}); convert the file to UTF-8"
        )


def _boundary(file: BinaryIO, mark: int, window: int, size: int) -> int:
    """Where the document that holds byte `mark` of a long text begins: after the first line end at or past
    the mark.

    Without a line end in the next `window` bytes it is the next character. Only bytes near the mark decide,
    so a text of any length is cut in bounded memory and by any number of workers alike.
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


def _columns(names: list[str], text_key: str | None, path: str) -> list[str]:
    """Return the columns that make a document. Raise InputError if there are none."""
    found = _document_columns(names, text_key)
    if not found:
        raise InputError(f"{path}: {_missing(text_key or 'text', names)}.")
    return found


def _document_columns(names: list[str], text_key: str | None) -> list[str]:
    if text_key is not None:
        return [text_key] if text_key in names else []
    if "input_ids" in names:
        return [n for n in ("input_ids", "loss_mask") if n in names]
    if "chosen" in names and "rejected" in names:
        return [n for n in COLUMNS if n in names]
    if "text" in names:
        return ["text"]
    chats = next((columns for columns in CONVERSATIONS if set(columns) <= set(names)), ())
    return [*chats, *(["input"] if "instruction" in chats and "input" in names else [])]
