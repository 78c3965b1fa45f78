"""Documents of a source: texts, token ids, conversations and preference pairs, from any of the forms of a row.

| preference row | answers |
|---|---|
| {"prompt": text or messages, "chosen", "rejected": text or messages} | what follows the prompt |
| {"chosen", "rejected": messages} | whole conversations; the prompt is their common beginning |
| {"prompt", "chosen", "rejected": messages that repeat the prompt} | whole conversations, as without `prompt` |
| {"chosen", "rejected": ids, "chosen_mask", "rejected_mask"} | tokens; the mask is 1 on the answer |

A text prompt is a user's message, a text answer the assistant's. The document of a pair is chosen + rejected, each
whole with its prompt; in its mask bit 0 marks the tokens of the answer and bit 1 the token that the rejected sequence
begins with. A pair is one document, so it is held out, or dropped as a duplicate, as a whole.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bessemer.data.sources.files import Piece
from bessemer.data.sources.readers import LONGEST, TOO_LONG, Bad, Raw, read_rows, read_texts
from bessemer.data.tokenize import chat
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError

CONVERSATIONS = (  # columns that make one
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)
ANSWER, BEGINS = 1, 2  # bits of the mask
PAIRS = "pairs"  # the kind of a store of such documents
TOOLS = "tools"  # the column with descriptions of functions, beside a conversation or a pair
PAIR_COLUMNS = ("prompt", "chosen", "rejected", "chosen_mask", "rejected_mask")

Messages = list[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations that share their first `prompt` messages; or, with `masks`, two lists of ids."""

    chosen: list[Any]
    rejected: list[Any]
    prompt: int = 0
    masks: tuple[list[int], list[int]] | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """One document: text, or ids that are already tokens (with an optional loss mask of the same length).

    A conversation that no tokenizer has written yet is its `messages`; `bytes` is how much text the ids of one hold.
    The document of a preference pair has it in `pair`, and ids once a tokenizer has written it. `tools`: descriptions
    of functions that either may use. `further`: more rows of the same conversation, where a chat template writes
    earlier answers differently once others follow; they are held out, or dropped as duplicates, together with it.
    """

    text: str | None = None
    ids: list[int] | None = None
    mask: list[int] | None = None
    messages: list[chat.Message] | None = None
    bytes: int = 0
    pair: Pair | None = None
    tools: list[dict[str, Any]] = field(default_factory=list, repr=False)  # prepare.source_key reads it itself
    further: tuple[chat.Row, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> list[tuple[list[int], list[int] | None]]:
        """(ids, mask) of its rows, once there are ids."""
        return [(self.ids or [], self.mask), *self.further]


def describe_turn_rows(counts: Mapping[str, int]) -> str:
    """Return the counts of `TurnRows` as a sentence."""
    return (
        f"{counts['conversations']:,} conversations take {counts['rows']:,} rows, as the chat template writes earlier "
        f"turns differently once others follow: {counts['added_tokens']:,} tokens more than their longest rows"
    )


@dataclass
class TurnRows:
    """How many conversations took more than one row, how many rows those are, and the tokens that they have more than
    the longest row of each: what it costs that the template rewrites earlier turns."""

    conversations: int = 0
    rows: int = 0
    added_tokens: int = 0

    def add(self, document: Document) -> None:
        if document.further:
            sizes = [len(ids) for ids, _ in document.rows]
            self.conversations += 1
            self.rows += len(sizes)
            self.added_tokens += sum(sizes) - max(sizes)


Read = Document | Bad
Planned = Read | chat.Unencoded[Read]
MOST_AHEAD = 4 << 20  # characters that wait for a thread or are being encoded: up to 140 bytes of memory for each
MOST_THREADS = 16


def read_piece(
    piece: Piece,
    text_key: str | None = None,
    tokenizer: Tokenizer | None = None,
    most_unpacked: float = math.inf,
    threads: int = 1,
) -> Iterator[Read]:
    """Yield every document of the piece, in order.

    most_unpacked: bytes after which a compressed file is left. threads: how many encode conversations; the documents
    do not depend on it.
    """
    if piece.kind.startswith("txt"):
        texts = read_texts(piece, most_unpacked)
        yield from (read if isinstance(read, Bad) else Document(read) for read in texts)
        return
    rows = read_rows(piece, lambda names: _columns(names, text_key, piece.path), most_unpacked)
    yield from finished((_of_row(row, text_key, tokenizer) for row in rows), threads)


def _of_row(row: Raw | Bad, text_key: str | None, tokenizer: Tokenizer | None) -> Planned:
    if isinstance(row, Bad):
        return row
    where = row.where

    def placed(read: Read) -> Read:
        if isinstance(read, Document) and len(read.text or "") > LONGEST:
            read = Bad("", TOO_LONG)  # in parquet: a longer line of JSON is invalid already
        return Bad(where, read.reason) if isinstance(read, Bad) and not read.place else read

    planned = plan_document(row.value, "", text_key, tokenizer)
    if isinstance(planned, chat.Unencoded):
        finish = planned.finish
        return chat.Unencoded(lambda: placed(finish()), planned.size)
    return placed(planned)


def encoding_threads() -> int:
    """Return the number of threads that encode conversations: one per core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def finished(planned: Iterable[Planned], threads: int) -> Iterator[Read]:
    """Yield the documents in order. Up to `threads` are encoded at a time, while this thread reads the next ones."""
    if threads <= 1:
        yield from (read.finish() if isinstance(read, chat.Unencoded) else read for read in planned)
        return
    with ThreadPoolExecutor(threads, "encode") as pool:
        waiting: deque[tuple[Read | Future[Read], int]] = deque()
        ahead = 0
        for read in planned:
            size = read.size if isinstance(read, chat.Unencoded) else 0
            while waiting and (ahead + size > MOST_AHEAD or len(waiting) >= 16 * threads):
                first, encoded = waiting.popleft()
                yield first.result() if isinstance(first, Future) else first
                ahead -= encoded
            waiting.append((pool.submit(read.finish) if isinstance(read, chat.Unencoded) else read, size))
            ahead += size
        for first, _ in waiting:
            yield first.result() if isinstance(first, Future) else first


def document_of(value: Any, where: str, text_key: str | None = None, tokenizer: Tokenizer | None = None) -> Read:
    """A document from a text or a mapping; the column is `text_key`, else `input_ids`, else `chosen` and `rejected`,
    else `text`, else those of a conversation."""
    planned = plan_document(value, where, text_key, tokenizer)
    return planned.finish() if isinstance(planned, chat.Unencoded) else planned


def plan_document(value: Any, where: str, text_key: str | None = None, tokenizer: Tokenizer | None = None) -> Planned:
    """`document_of` that leaves the encoding of conversations and pairs for later."""
    if isinstance(value, str):
        return _checked(value, where)
    if not isinstance(value, Mapping):
        return Bad(where, f"expected a text or a mapping, not {type(value).__name__}")
    if text_key is None and "input_ids" in value:
        return _tokens(value, where)
    if text_key is None and is_pair(value):
        return _pair(value, where, tokenizer)
    key = text_key or "text"
    named = text_key and chat.is_messages(value.get(key))
    chosen = {"messages": value[key], "tools": value.get("tools")} if named else None
    if chosen or (key not in value and text_key is None):
        return _conversation(chosen or value, where, tokenizer) or Bad(where, _missing(text_key, list(value)))
    if key not in value:
        return Bad(where, _missing(text_key, list(value)))
    if not isinstance(value[key], str):
        return Bad(where, f"'{key}' is {type(value[key]).__name__}, not text")
    return _checked(value[key], where)


def _conversation(row: Mapping[str, Any], where: str, tokenizer: Tokenizer | None) -> Planned | None:
    """Return the ids and mask of a chat row, or its messages without a tokenizer; None for other rows."""
    try:
        messages = chat.conversation_of(row)
        if messages is None:
            return None
        tools = chat.tools_of(row)
        if tokenizer is None:
            return Document(messages=messages, tools=tools)
        unencoded = chat.unencoded_rows(messages, tokenizer, tools)
    except InputError as error:
        return _refused(where, error)

    def finish() -> Read:
        try:
            (ids, mask), *further = unencoded.finish()
        except InputError as error:
            return _refused(where, error)
        return Document(ids=ids, mask=mask, bytes=len(chat.spoken(messages).encode()), further=tuple(further))

    return chat.Unencoded(finish, unencoded.size)


def _pair(row: Mapping[str, Any], where: str, tokenizer: Tokenizer | None) -> Planned:
    """Return the ids and mask of a preference row, or only the pair without a tokenizer."""
    pair = read_pair(row)
    if isinstance(pair, str):
        return Bad(where, pair)
    try:
        tools = chat.tools_of(row)
        if tokenizer is None:
            return Document(pair=pair, tools=tools)
        unencoded = _unencoded_pair(pair, tokenizer, tools)
    except InputError as error:
        return _refused(where, error)

    def finish() -> Read:
        try:
            ids, mask = unencoded.finish()
        except InputError as error:
            return _refused(where, error)
        return Document(ids=ids, mask=mask, bytes=pair_bytes(pair), pair=pair)

    return chat.Unencoded(finish, unencoded.size)


def _refused(where: str, error: InputError) -> Bad:
    return Bad(where, str(error).removesuffix("."))


def _missing(text_key: str | None, columns: list[str]) -> str:
    """Return which columns a row has, and which ones a document, a conversation or a pair needs."""
    there = ", ".join(map(str, columns)) or "nothing"
    name = "name the column with data.text_key (--text-key when preparing)"
    if text_key is not None:
        return f"no '{text_key}' (it has {there}); {name}"
    known = [("chosen", "rejected"), *CONVERSATIONS]
    others = "; ".join(" and ".join(f"'{column}'" for column in group) for group in known)
    return f"no 'text' (it has {there}), nor any of: {others}. Rename the columns, or {name}"


def _checked(text: str, where: str) -> Document | Bad:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return Bad(where, "the text holds half of a surrogate pair, which is not valid Unicode")
    return Document(text)


def _tokens(value: Mapping[str, Any], where: str) -> Document | Bad:
    try:
        ids = [int(i) for i in value["input_ids"]]
        mask = value.get("loss_mask")
        mask = None if mask is None else [int(bool(m)) for m in mask]
    except (TypeError, ValueError):
        return Bad(where, "'input_ids' and 'loss_mask' are lists of integers")
    if ids and not -(2**31) <= min(ids) <= max(ids) < 2**31:
        return Bad(where, f"'input_ids' hold {max(ids, key=abs)}, which is not a token id")
    if mask is None:
        return Document(ids=ids)
    if len(mask) != len(ids):
        return Bad(where, f"{len(ids)} input_ids but {len(mask)} loss_mask values")
    return Document(ids=ids, mask=mask)


def _columns(names: list[str], text_key: str | None, path: str) -> list[str]:
    """Return the columns that make a document. Raise InputError if there are none."""
    found = _document_columns(names, text_key)
    if not found:
        raise InputError(f"{path}: {_missing(text_key or 'text', names)}.")
    return found


def _document_columns(names: list[str], text_key: str | None) -> list[str]:
    if text_key is not None:
        return [text_key, *([TOOLS] if TOOLS in names else [])] if text_key in names else []
    if "input_ids" in names:
        return [n for n in ("input_ids", "loss_mask") if n in names]
    if "chosen" in names and "rejected" in names:
        return [n for n in (*PAIR_COLUMNS, TOOLS) if n in names]
    if "text" in names:
        return ["text"]
    chats = next((columns for columns in CONVERSATIONS if set(columns) <= set(names)), ())
    further = [TOOLS, *(["input"] if "instruction" in chats else [])] if chats else []
    return [*chats, *(n for n in further if n in names)]


def is_pair(row: Mapping[str, Any]) -> bool:
    return row.get("chosen") is not None and row.get("rejected") is not None


def read_pair(row: Mapping[str, Any]) -> Pair | str:
    """Return the pair of a row, or what is wrong with it."""
    if is_ids(row["chosen"]) and is_ids(row["rejected"]):
        return _pair_of_ids(row)
    prompt = row.get("prompt")
    if prompt is None:
        return _conversations(row["chosen"], row["rejected"])
    asked = _messages(prompt, "user")
    answers = [_messages(row[side], "assistant") for side in ("chosen", "rejected")]
    for name, value in zip(("prompt", "chosen", "rejected"), (asked, *answers), strict=True):
        if not value:
            return f"'{name}' is neither a text nor a list of messages"
    if answers[0] == answers[1]:
        return "'chosen' and 'rejected' are the same"
    if all(_asks_itself(asked, answer) for answer in answers):
        if all(_repeats(asked, answer) for answer in answers):
            return _conversations(*answers)
        return (
            "'chosen' and 'rejected' open with a question that is not 'prompt'; leave 'prompt' out if they are whole "
            "conversations"
        )
    if any(_asks_itself(asked, answer) for answer in answers):
        return "only one of 'chosen' and 'rejected' opens with a question"
    return Pair(asked + answers[0], asked + answers[1], len(asked))


def _asks_itself(asked: Messages, answer: Messages) -> bool:
    """Return whether an answer to a user's question opens with a question, where the assistant would speak."""
    return asked[-1].get("role") == "user" and answer[0].get("role") in ("system", "developer", "user")


def _repeats(asked: Messages, conversation: Messages) -> bool:
    """Return whether a conversation holds the question, which may be the first one or a later one."""

    def text(message: Mapping[str, Any]) -> Any:
        content = message.get("content")
        return content.strip() if isinstance(content, str) else content

    asking = [text(message) for message in conversation if message.get("role") == "user"]
    return all(text(message) in asking for message in asked if message.get("role") == "user")


def is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(i, int) for i in value)


def _messages(value: Any, role: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    return list(value) if chat.is_messages(value) else []


def _conversations(chosen: Any, rejected: Any) -> Pair | str:
    """Return a pair of whole conversations, whose prompt is their common beginning."""
    if not (chat.is_messages(chosen) and chat.is_messages(rejected)):
        return "without 'prompt', 'chosen' and 'rejected' must be conversations (lists of messages)"
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == min(len(chosen), len(rejected)):
        return "one of 'chosen' and 'rejected' is the beginning of the other, so there is nothing to compare"
    if shared == 0:
        return "'chosen' and 'rejected' do not begin with a common message, so they answer different prompts"
    return Pair(list(chosen), list(rejected), shared)


def _pair_of_ids(row: Mapping[str, Any]) -> Pair | str:
    sides, masks = [], []
    for name in ("chosen", "rejected"):
        mask = row.get(f"{name}_mask")
        if mask is None:
            return f"'{name}' holds token ids, so '{name}_mask' must say which of them are the answer (1) or prompt (0)"
        if len(mask) != len(row[name]):
            return f"{len(row[name])} ids in '{name}' but {len(mask)} values in '{name}_mask'"
        sides.append(list(row[name]))
        masks.append([int(bool(value)) for value in mask])
    return Pair(sides[0], sides[1], masks=(masks[0], masks[1]))


def encode_pair(pair: Pair, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> chat.Row:
    """(ids, mask) of the document of a pair. Of the prompt's own assistant turns nothing is an answer."""
    return _unencoded_pair(pair, tokenizer, tools).finish()


def _unencoded_pair(pair: Pair, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> chat.Unencoded[chat.Row]:
    masks, both = pair.masks, (pair.chosen, pair.rejected)
    if masks is not None:
        return chat.Unencoded(lambda: _joined((pair.chosen, masks[0]), (pair.rejected, masks[1])), 0)
    sides = [chat.unencoded_row(side, tokenizer, tools, pair.prompt) for side in both]
    return chat.Unencoded(lambda: _joined(*(side.finish() for side in sides)), sum(side.size for side in sides))


def _joined(first: chat.Row, second: chat.Row) -> chat.Row:
    """Return the document of two sequences."""
    (chosen, chosen_mask), (rejected, rejected_mask) = first, second
    if not (chosen and rejected):
        raise InputError("'chosen' or 'rejected' is empty.")
    return [*chosen, *rejected], [*chosen_mask, rejected_mask[0] | BEGINS, *rejected_mask[1:]]


def pair_bytes(pair: Pair) -> int:
    """Return the bytes of the text, with the prompt counted once; 0 for ids."""
    return sum(len(text.encode()) for text in texts_of(pair))


def texts_of(pair: Pair) -> Iterator[str]:
    """Return the texts, with the prompt once, to train a tokenizer on."""
    if pair.masks is None:
        yield chat.spoken(pair.chosen)
        yield chat.spoken(pair.rejected[pair.prompt :])
