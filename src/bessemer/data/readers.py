"""Reading one piece of a source as documents, with the file, line and reason of everything that is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from bessemer.data import chat
from bessemer.data.preference import COLUMNS, Pair, encode_pair, is_pair, pair_bytes, read_pair
from bessemer.data.sources import Piece
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.job.remote import arrow_source, open_read

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
    """Something that is no document: where it is and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Reading:
    """How rows become documents: the column with the text, and what writes conversations (None: left as messages)."""

    text_key: str | None = None
    tokenizer: Tokenizer | None = None


def read_piece(
    piece: Piece, text_key: str | None = None, tokenizer: Tokenizer | None = None
) -> Iterator[Document | Bad]:
    """Every document of the piece, in order."""
    reading = Reading(text_key, tokenizer)
    if piece.kind == "parquet":
        return _parquet(piece, reading)
    if piece.kind == "txt":
        return _text(piece)
    if piece.kind == "jsonl":
        return _lines(piece, reading)
    return _compressed(piece, reading)


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
    ids = [int(i) for i in value["input_ids"]]
    mask = value.get("loss_mask")
    if mask is None:
        return Document(ids=ids)
    mask = [int(bool(m)) for m in mask]
    if len(mask) != len(ids):
        return Bad(where, f"{len(ids)} input_ids but {len(mask)} loss_mask values")
    return Document(ids=ids, mask=mask)


def _line(line: bytes, where: str, reading: Reading) -> Document | Bad | None:
    if not line.strip():
        return None
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return Bad(where, f"not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return Bad(where, f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})")
    if isinstance(value, str):
        return Bad(where, "expected a JSON object, not a string")
    return document_of(value, where, reading.text_key, reading.tokenizer)


def _lines(piece: Piece, reading: Reading) -> Iterator[Document | Bad]:
    """Lines that begin inside [start, stop). The line before `start` belongs to the piece before."""
    with open_read(piece.path) as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()
        position, number = file.tell(), 0
        base: int | None = 0 if piece.start == 0 else None
        while position < piece.stop:
            line = file.readline()
            number += 1
            read = _line(line, "", reading)
            if isinstance(read, Bad):
                if base is None:  # counting the lines before this piece is only worth it for a message
                    base = _count_lines(piece.path, piece.start)
                read = Bad(f"{piece.path} line {base + number}", read.reason)
            position += len(line)
            if read is not None:
                yield read


def _count_lines(path: str, start: int) -> int:
    """Lines that begin before byte `start`."""
    count, left = 1, start - 1
    with open_read(path) as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _compressed(piece: Piece, reading: Reading) -> Iterator[Document | Bad]:
    import pyarrow as pa

    number = 0
    try:
        with pa.input_stream(arrow_source(piece.path), compression=piece.kind.partition("+")[2]) as stream:
            for line in io.BufferedReader(stream, 1 << 20):
                number += 1
                read = _line(line, f"{piece.path} line {number}", reading)
                if read is not None:
                    yield read
    except (OSError, pa.ArrowException) as error:
        yield Bad(
            f"{piece.path} after line {number}", f"the compressed stream is damaged or cut short ({error})"
        )


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


def _parquet(piece: Piece, reading: Reading) -> Iterator[Document | Bad]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(arrow_source(piece.path)) as file:
            names = file.schema_arrow.names
            columns = _columns(names, reading.text_key)
            if not columns:
                raise InputError(f"{piece.path}: {_missing(reading.text_key or 'text', names)}.")
            row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
            for batch in file.iter_batches(1024, row_groups=range(piece.start, piece.stop), columns=columns):
                for value in batch.to_pylist():
                    row += 1
                    yield document_of(value, f"{piece.path} row {row}", reading.text_key, reading.tokenizer)
    except (pa.ArrowException, OSError) as error:
        yield Bad(f"{piece.path} row group {piece.start}", f"damaged parquet ({error}); copy the file again")


def _columns(names: list[str], text_key: str | None) -> list[str]:
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
