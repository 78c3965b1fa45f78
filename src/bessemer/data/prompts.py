"""Prompts for reinforcement: rows of a dataset with all their columns, and the tokens a completion is to follow.

A row's prompt is its `prompt` (text or messages), its `messages` up to the last assistant's turn (whose text becomes
the column `answer` where there is none), or its `question`. Rows are held in memory: they are short, and rewards want
every column.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.data.catalog import find_source
from bessemer.data.chat import can_chat, is_messages, render, stop_ids
from bessemer.data.mixture import Sampling
from bessemer.data.readers import Raw, read_file_rows
from bessemer.data.rows import Batch, Fields
from bessemer.data.sources import Files
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.registry import datasets

Row = dict[str, Any]
TAKEN = ("prompts", "completions", "completion_tokens")
"""Arguments of every reward: no column may have these names."""


def read_split(sampling: Sampling, val_fraction: float) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows). A registered dataset may have a held-out part of its own; otherwise rows whose
    content hash falls below `val_fraction` are held out, whatever their order."""
    rows = list(read_rows(sampling.name))
    registered = sampling.name in datasets
    held_out = datasets.entry(sampling.name).traits.get("held_out") if registered else None
    if held_out is not None:
        return rows, [checked_row(row, f"{sampling.name} (held out)") for row in held_out()]
    train: list[Row] = []
    held: list[Row] = []
    for row in rows:
        (held if _draw(row) < val_fraction else train).append(row)
    return train, held


def _draw(row: Row) -> float:
    text = json.dumps(row, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def read_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a registered dataset, or of files of JSON lines or parquet, here or in an object store."""
    source = find_source(name)
    if isinstance(source, Files):
        for row in (row for file in source.files for row in read_file_rows(file)):
            if not isinstance(row, Raw):
                raise InputError(f"{row}.")
            yield checked_row(row.value, row.where())
        return
    for number, item in enumerate(source.items):
        yield checked_row(item, f"{name} row {number + 1}")


def checked_row(item: Any, where: str) -> Row:
    if not isinstance(item, Mapping):
        raise InputError(f"{where}: expected a row with columns, not {type(item).__name__}.")
    return {str(column): value for column, value in item.items()}


def prompt_of(row: Row, where: str) -> tuple[Any, Row]:
    """(the prompt: a text or messages, the row with what follows from it)."""
    if "prompt" in row:
        return _checked_prompt(row["prompt"], where), row
    if "messages" in row:
        messages = row["messages"]
        if not is_messages(messages):
            raise InputError(f"{where}: 'messages' is not a list of messages.")
        if messages[-1].get("role") == "assistant":
            row = {"answer": messages[-1].get("content"), **row}
            messages = messages[:-1]
        return _checked_prompt(messages, where), row
    if "question" in row:
        return _checked_prompt(row["question"], where), row
    raise InputError(
        f"{where}: a row needs a prompt under 'prompt', 'messages' or 'question'; it has {', '.join(row) or 'nothing'}."
    )


def _checked_prompt(prompt: Any, where: str) -> Any:
    if (isinstance(prompt, str) and prompt.strip()) or is_messages(prompt):
        return prompt
    raise InputError(
        f"{where}: a prompt is a text or a list of messages, and not empty; got {prompt!r:.100}."
    )


def prompt_ids(prompt: Any, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """The tokens before the completion. A text is a user's message, or with `chat` off (or a tokenizer without the
    tokens of a conversation) plain text."""
    if not isinstance(prompt, str):
        return render(prompt, tokenizer)
    if chat and can_chat(tokenizer):
        return render([{"role": "user", "content": prompt}], tokenizer)
    return tokenizer.prompt(prompt)


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends a completion: the document token, and the end of the assistant's turn, first where there is one."""
    turns = stop_ids(tokenizer) if can_chat(tokenizer) else ()
    return tuple(dict.fromkeys((*turns, tokenizer.bos_id)))


class PromptRows:
    """Prompts of one source by number, as rows of a DataPlan: a "batch" holds where in `sources` each prompt is.

    Prompts longer than `longest` tokens are left out and counted.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        name: str,
        tokenizer: Tokenizer,
        block_size: int,
        *,
        longest: int,
        chat: bool = True,
        number: int = 0,
    ):
        self.block_size, self.number, self.name = block_size, number, name
        self.fields: Fields = {"source": ((), np.dtype(np.int64)), "prompt": ((), np.dtype(np.int64))}
        self.places: list[int] = []  # the row of each prompt in its source, from 1
        self.prompts: list[Any] = []
        self.ids: list[list[int]] = []
        self.columns: list[Row] = []
        too_long = 0
        for place, row in enumerate(rows):
            where = f"{name} row {place + 1}"
            if taken := [column for column in TAKEN if column in row]:
                raise InputError(
                    f"{where}: the column '{taken[0]}' is an argument of every reward; rename it."
                )
            prompt, row = prompt_of(row, where)
            ids = prompt_ids(prompt, tokenizer, chat)
            if len(ids) > longest:
                too_long += 1
                continue
            self.prompts.append(prompt)
            self.ids.append(ids)
            self.columns.append(row)
            self.places.append(place + 1)
        if rows and not self.ids:
            raise InputError(
                f"every one of the {len(rows)} prompts of {name} is longer than {longest} tokens: raise "
                "grpo.max_prompt_length (and architecture.block_size)."
            )
        self.stats: dict[str, Any] = {"prompts": len(self.ids), "too_long": too_long}
        facts = json.dumps([self.ids, self.columns], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.ids)

    def get(self, indices: np.ndarray) -> Batch:
        """(n,) each: which source, and which of its prompts."""
        numbers = np.asarray(indices, np.int64)
        return {"source": np.full_like(numbers, self.number), "prompt": numbers}

    def column_names(self) -> set[str]:
        """Columns that every row has."""
        names = [set(row) for row in self.columns]
        return set.intersection(*names) if names else set()
