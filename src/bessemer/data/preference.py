"""Preference rows: two answers to one prompt, read in any of their forms and written as one document of a store.

| row | answers |
|---|---|
| {"prompt": text or messages, "chosen", "rejected": text or messages} | what follows the prompt |
| {"chosen", "rejected": messages} | whole conversations; the prompt is what both begin with |
| {"chosen", "rejected": ids, "chosen_mask", "rejected_mask"} | tokens; the mask is 1 on the answer |

A text prompt is a user's message, a text answer the assistant's. The document of a pair is chosen + rejected, each
whole with its prompt; in its mask bit 0 marks the tokens of the answer and bit 1 the token that the rejected sequence
begins with. One document a pair: so a pair is held out, or dropped as a duplicate, as one thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.data.chat import is_messages, spoken, supervised
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError

ANSWER, BEGINS = 1, 2  # bits of the mask
KIND = "pairs"  # of a store of such documents
COLUMNS = ("prompt", "chosen", "rejected", "chosen_mask", "rejected_mask")

Messages = list[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations that share their first `prompt` messages; or, with `masks`, two lists of ids."""

    chosen: list[Any]
    rejected: list[Any]
    prompt: int = 0
    masks: tuple[list[int], list[int]] | None = None


def is_pair(row: Mapping[str, Any]) -> bool:
    return row.get("chosen") is not None and row.get("rejected") is not None


def read_pair(row: Mapping[str, Any]) -> Pair | str:
    """The pair of a row, or what is wrong with it."""
    if is_ids(row["chosen"]) and is_ids(row["rejected"]):
        return _tokens(row)
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
    return Pair(asked + answers[0], asked + answers[1], len(asked))


def is_ids(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(i, int) for i in value)
    )


def _messages(value: Any, role: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    return list(value) if is_messages(value) else []


def _conversations(chosen: Any, rejected: Any) -> Pair | str:
    """Whole conversations: the prompt is their common beginning."""
    if not (is_messages(chosen) and is_messages(rejected)):
        return "without 'prompt', 'chosen' and 'rejected' must be conversations (lists of messages)"
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == min(len(chosen), len(rejected)):
        return "one of 'chosen' and 'rejected' is the beginning of the other, so there is nothing to compare"
    if shared == 0:
        return "'chosen' and 'rejected' do not begin with a common message, so they answer different prompts"
    return Pair(list(chosen), list(rejected), shared)


def _tokens(row: Mapping[str, Any]) -> Pair | str:
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


def encode_pair(pair: Pair, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(ids, mask) of the document of a pair. Of the prompt's own assistant turns nothing is an answer."""
    if pair.masks is not None:
        sides = [(pair.chosen, pair.masks[0]), (pair.rejected, pair.masks[1])]
    else:
        sides = [_answer(messages, pair.prompt, tokenizer) for messages in (pair.chosen, pair.rejected)]
    (chosen, chosen_mask), (rejected, rejected_mask) = sides
    if not (chosen and rejected):
        raise InputError("'chosen' or 'rejected' is empty.")
    return [*chosen, *rejected], [*chosen_mask, rejected_mask[0] | BEGINS, *rejected_mask[1:]]


def _answer(messages: Messages, prompt: int, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    ids, mask = supervised(messages, tokenizer)
    if any(message.get("role") == "assistant" for message in messages[:prompt]):
        before = len(supervised(messages[:prompt], tokenizer)[0])
        mask = [0] * before + list(mask[before:])
    return list(ids), list(mask)


def pair_bytes(pair: Pair) -> int:
    """Bytes of its text, the prompt once; 0 for ids."""
    return sum(len(text.encode()) for text in texts_of(pair))


def texts_of(pair: Pair) -> Iterator[str]:
    """Its texts, prompt once; for training a tokenizer."""
    if pair.masks is None:
        yield spoken(pair.chosen)
        yield spoken(pair.rejected[pair.prompt :])
