"""Exact match: greedy answers to the held-out prompts of a dataset (`exact:NAME`), compared character by character.

Nothing is parsed: an answer that continues after the right one is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bessemer import console
from bessemer.data.tokenize.chat import conversation_of
from bessemer.errors import InputError
from bessemer.evaluate.scoring import check_batch, engine_for
from bessemer.evaluate.tasks import is_task_file, read_rows
from bessemer.generate import LoadedModel, Request
from bessemer.generate.text import prompt_ids, turn_ends
from bessemer.models.protocol import Decoding
from bessemer.registry import datasets, evaluations

ROWS = 64
SHOWN = 5


@evaluations.register("exact", by_source=True)
def exact(
    loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None, source: str | None = None
) -> dict[str, Any]:
    """Return the share of the first `limit` held-out rows that are answered exactly, with a few samples."""
    check_batch(batch_size)
    if source is None:
        raise InputError("exact needs a dataset: write exact:toy-reverse, or exact:FILE.jsonl.")
    if loaded.tokenizer is None or not isinstance(loaded.model, Decoding):
        raise InputError("this model cannot answer: it has no tokenizer, or no way to decode.")
    if limit is not None and limit < 1:
        raise InputError(f"the limit must be at least 1 example; got {limit}.")
    rows = held_out_rows(source)[:limit]
    asked = [question(row, f"{source} row {number + 1}") for number, row in enumerate(rows)]
    written = answers(loaded, asked, batch_size or ROWS)
    tried = [
        {"prompt": shown(prompt), "answer": answer, "written": text}
        for text, (prompt, answer) in zip(written, asked, strict=True)
    ]
    wrong = [one for one in tried if one["written"] != one["answer"]]
    right = len(tried) - len(wrong)
    return {
        "metric": "exact match",
        "value": right / len(tried),
        "right": right,
        "examples": len(tried),
        "samples": tried[:SHOWN],
        "wrong": wrong[:SHOWN],
    }


def held_out_rows(source: str) -> list[Mapping[str, Any]]:
    """Return the held-out part of a registered dataset (all of it, if it has none), or the rows of a file."""
    if source in datasets:
        entry = datasets.entry(source)
        rows = list(entry.traits.get("held_out", entry.value)())
    elif is_task_file(source):
        rows = list(read_rows(source))
    else:
        raise InputError(f"exact:{source}: neither a .jsonl file nor one of {', '.join(datasets.names())}.")
    if not rows:
        raise InputError(f"exact:{source} holds no rows.")
    return rows


def question(row: Any, where: str) -> tuple[Any, str]:
    """Return (prompt: a text or messages, the right answer) of a row."""
    row = row if isinstance(row, Mapping) else {}
    # a question stays a text, which a tokenizer without chat tokens can encode too
    messages = conversation_of({name: value for name, value in row.items() if name != "question"})
    prompt: Any = row.get("prompt", row.get("question"))
    answer = row.get("answer")
    if messages and messages[-1].get("role") == "assistant":
        prompt, answer = messages[:-1], messages[-1].get("content") if answer is None else answer
    if not prompt or not isinstance(answer, str):
        raise InputError(
            f"exact: {where} has no prompt with an answer: it needs 'messages' that end with the assistant's, or "
            "'prompt' and 'answer'."
        )
    return prompt, answer


def answers(loaded: LoadedModel, asked: list[tuple[Any, str]], slots: int) -> list[str]:
    """Return the greedy answers. Each has room for twice the right one, which other tokens may spell too."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    ends, texts = turn_ends(tokenizer), []
    requests = [
        Request(prompt_ids(prompt, tokenizer), max_tokens=2 * len(tokenizer.encode(answer)) + 4, stop_ids=ends)
        for prompt, answer in asked
    ]
    with engine_for(loaded, slots) as engine:
        for handle in [engine.submit(request) for request in requests]:
            texts.append(handle.result().samples[0].text)
            console.tick(len(texts), len(requests))
    return texts


def shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
