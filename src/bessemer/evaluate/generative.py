"""Questions answered in words: the model writes greedily, with the calculator, and its answer is parsed.

A model that knows the calculator writes <|python_start|> expression <|python_end|>; the value is put after it,
between <|output_start|> and <|output_end|>, and the model writes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from bessemer.data import Tokenizer
from bessemer.data.chat import can_chat, stop_ids
from bessemer.errors import InputError
from bessemer.evaluate import progress
from bessemer.evaluate.conversation import prompt_ids
from bessemer.evaluate.scoring import check_batch
from bessemer.generate import LoadedModel
from bessemer.generate.calculator import NotArithmetic, calculate

GENERATIVE = "generative"
ROWS = 16
CALLS = 16
"""Calculations in one answer; whoever wants more has lost the thread."""

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARK = "####"


def parse_answer(text: str) -> Fraction | None:
    """The number after the last ####, or else the last number there is."""
    marked = text.rpartition(MARK)[2] if MARK in text else None
    found = NUMBER.search(marked) if marked is not None else None
    if marked is None:
        found = next(iter(reversed(list(NUMBER.finditer(text)))), None)
    return Fraction(re.sub("[$,]", "", found.group())) if found else None


def is_right(text: str, answer: str) -> bool:
    """Equal as numbers (1,000 is 1000.0); an answer that is no number is compared as text."""
    wanted = parse_answer(answer)
    if wanted is None:
        return text.strip().casefold() == answer.strip().casefold()
    return parse_answer(text) == wanted


@dataclass
class Answer:
    """One answer as it grows. `written` are the ids after the prompt, calculator outputs included."""

    prompt: list[int]
    written: list[int] = field(default_factory=list)
    calls: int = 0
    done: bool = False


def answer_all(
    loaded: LoadedModel, examples: Sequence[Mapping[str, Any]], max_tokens: int, batch_size: int | None
) -> tuple[list[bool], int]:
    """(right or not of each, how many questions were longer than the context)."""
    check_batch(batch_size)
    assert loaded.tokenizer is not None
    if not hasattr(loaded.model, "decode"):
        raise InputError(f"{type(loaded.model).__name__} cannot decode, so it cannot answer in words.")
    right: list[bool] = []
    cropped, size = 0, batch_size or ROWS
    for first in range(0, len(examples), size):
        group = examples[first : first + size]
        prompts = [question_ids(loaded.tokenizer, example["question"]) for example in group]
        cropped += sum(len(prompt) > loaded.model.block_size for prompt in prompts)
        texts = write(loaded, prompts, max_tokens)
        right += [is_right(text, example["answer"]) for text, example in zip(texts, group, strict=True)]
        progress.tick(len(right), len(examples))
    return right, cropped


def question_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """As a user's message, or as plain text where the tokenizer knows no conversations."""
    if can_chat(tokenizer):
        return prompt_ids(tokenizer, [{"role": "user", "content": question}])
    return [tokenizer.bos_id, *tokenizer.encode(f"Question: {question}\nAnswer:")]


def write(loaded: LoadedModel, prompts: Sequence[list[int]], max_tokens: int) -> list[str]:
    """Greedy answers of up to `max_tokens` tokens, the calculator's outputs counted."""
    assert loaded.tokenizer is not None
    answers = [Answer(list(prompt)) for prompt in prompts]
    with loaded.scope():
        while going := [answer for answer in answers if not answer.done]:
            _write_on(loaded, loaded.tokenizer, going, max_tokens)
    return [loaded.tokenizer.decode(answer.written) for answer in answers]


def _write_on(loaded: LoadedModel, tokenizer: Tokenizer, going: list[Answer], max_tokens: int) -> None:
    """Decode until every row stops; rows that stopped for the calculator get its output and go on."""
    specials = tokenizer.specials
    call = specials.get("<|python_end|>")
    ends = stop_ids(tokenizer) if can_chat(tokenizer) else ()
    stops = [*ends, *([] if call is None else [call])]
    left = max(max_tokens - len(answer.written) for answer in going)
    ids = [[*answer.prompt, *answer.written] for answer in going]
    result = loaded.decoder(loaded.params, ids, max_tokens=left, stop_ids=stops)
    for number, answer in enumerate(going):
        room = max_tokens - len(answer.written)
        made = [int(token) for token in result.ids[number, : result.lengths[number]]][:room]
        called = result.reasons[number] == "stop" and bool(made) and made[-1] == call
        answer.written += made if called else result.row(number)[:room]
        answer.calls += called
        if called:
            answer.written += output_ids(tokenizer, answer.written)
        full = len(answer.prompt) + len(answer.written) >= loaded.model.block_size
        answer.done = not called or full or answer.calls >= CALLS or len(answer.written) >= max_tokens


def output_ids(tokenizer: Tokenizer, written: Sequence[int]) -> list[int]:
    """What the calculator says to the expression just closed; nothing where it is no arithmetic."""
    specials, before = tokenizer.specials, list(written[:-1])
    names = ("<|python_start|>", "<|output_start|>", "<|output_end|>")
    if not all(name in specials for name in names) or specials[names[0]] not in before:
        return []
    start, opened, closed = (specials[name] for name in names)
    begin = len(before) - before[::-1].index(start)  # just after the last opening
    try:
        value = calculate(tokenizer.decode(before[begin:]))
    except NotArithmetic:
        return []
    return [opened, *tokenizer.encode(value), closed]
