"""Exact match: the greedy answer to each held-out prompt of a dataset, character for character. `exact:NAME` names it.

Nothing is forgiven and nothing is parsed: an answer that goes on after the right one is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bessemer.data.tokenize.chat import can_chat, conversation_of, render, stop_ids
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.evaluate import progress
from bessemer.evaluate.bundle import is_task_file, read_rows
from bessemer.evaluate.scoring import check_batch
from bessemer.generate import Engine, LoadedModel, Request
from bessemer.registry import datasets, evaluations

ROWS = 64
SHOWN = 5


@evaluations.register("exact", by_source=True)
def exact(
    loaded: LoadedModel,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """Share of the first `limit` held-out rows whose answer is written exactly; a few of both kinds are kept."""
    check_batch(batch_size)
    if source is None:
        raise InputError("exact needs a dataset: write exact:toy-reverse, or exact:FILE.jsonl.")
    if loaded.tokenizer is None or not hasattr(loaded.model, "decode"):
        raise InputError("this model cannot answer: it has no tokenizer, or no way to decode.")
    if limit is not None and limit < 1:
        raise InputError(f"the limit is {limit} examples; give at least 1.")
    rows = held_out_rows(source)[:limit]
    asked = [question(row, f"{source} row {number + 1}") for number, row in enumerate(rows)]
    written = answers(loaded, asked, batch_size or ROWS)
    right = [text == answer for text, (_, answer) in zip(written, asked, strict=True)]
    tried = [
        {"prompt": shown(prompt), "answer": answer, "written": text}
        for text, (prompt, answer) in zip(written, asked, strict=True)
    ]
    wrong = [one for one, good in zip(tried, right, strict=True) if not good]
    return {
        "metric": "exact match",
        "value": sum(right) / len(right),
        "right": sum(right),
        "examples": len(right),
        "samples": tried[:SHOWN],
        "wrong": wrong[:SHOWN],
    }


def held_out_rows(source: str) -> list[Mapping[str, Any]]:
    """The held-out part of a registered dataset (all of it, if it has none of its own), or a file of rows."""
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
    """(what is asked: a text or messages, the right answer) of a row."""
    row = row if isinstance(row, Mapping) else {}
    messages = conversation_of(row)
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
    """Greedy texts through an engine that is kept from one evaluation to the next."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    engine = loaded.program(f"engine of {slots}", lambda: Engine.of(loaded, slots=slots, fetch=loaded.fetch))
    engine.update_params(loaded.params)
    try:
        handles = [engine.submit(request(prompt, answer, tokenizer)) for prompt, answer in asked]
        texts = []
        for handle in handles:
            texts.append(handle.result().samples[0].text)
            progress.tick(len(texts), len(handles))
        return texts
    finally:
        engine.update_params(None)  # the next training step frees them


def request(prompt: Any, answer: str, tokenizer: Tokenizer) -> Request:
    """Room for the answer twice over, in case other tokens than the tokenizer's spell it."""
    room = 2 * len(tokenizer.encode(answer)) + 4
    if isinstance(prompt, str) and not can_chat(tokenizer):
        return Request(tokenizer.prompt(prompt), max_tokens=room)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Request(render(messages, tokenizer), max_tokens=room, stop_ids=stop_ids(tokenizer))


def shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
