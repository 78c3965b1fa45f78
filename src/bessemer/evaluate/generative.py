"""Questions answered in words: the model writes greedily, with the calculator, and its answer is parsed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from bessemer.data import Tokenizer
from bessemer.data.tokenize.chat import can_chat, render, stop_ids
from bessemer.errors import InputError
from bessemer.evaluate import progress
from bessemer.evaluate.scoring import check_batch
from bessemer.generate import Engine, LoadedModel, Request, Sample
from bessemer.generate.calculator import CALLS, call_id, output_ids
from bessemer.generate.decoder import bucket, crop

GENERATIVE = "generative"
ROWS = 16

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

    prompt: Sequence[int]
    written: list[int] = field(default_factory=list)
    calls: int = 0
    done: bool = False

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.written]


def answer_all(
    loaded: LoadedModel, examples: Sequence[Mapping[str, Any]], max_tokens: int, batch_size: int | None
) -> tuple[list[bool], int]:
    """(right or not of each, how many questions were longer than the context)."""
    check_batch(batch_size)
    assert loaded.tokenizer is not None
    if not hasattr(loaded.model, "decode"):
        raise InputError(f"{type(loaded.model).__name__} cannot decode, so it cannot answer in words.")
    prompts = [question_ids(loaded.tokenizer, example["question"]) for example in examples]
    texts = write(loaded, prompts, max_tokens, batch_size)
    right = [is_right(text, example["answer"]) for text, example in zip(texts, examples, strict=True)]
    return right, sum(len(prompt) > loaded.model.block_size for prompt in prompts)


def question_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """As a user's message, or as plain text where the tokenizer knows no conversations."""
    if can_chat(tokenizer):
        return prompt_ids(tokenizer, [{"role": "user", "content": question}])
    return tokenizer.prompt(f"Question: {question}\nAnswer:")


def write(
    loaded: LoadedModel, prompts: Sequence[list[int]], max_tokens: int, batch_size: int | None = None
) -> list[str]:
    """Greedy answers of up to `max_tokens` tokens, the calculator's outputs counted; `batch_size` rows at a time."""
    assert loaded.tokenizer is not None
    block = loaded.model.block_size
    answers = [Answer(prompt) for prompt in crop(prompts, max_tokens, block)[0]]
    capacity = bucket(max(len(answer.prompt) for answer in answers) + max_tokens, block)
    engine = _engine(loaded, batch_size or ROWS, capacity)
    while going := [answer for answer in answers if not answer.done]:
        handles = [engine.submit(_request(answer, loaded.tokenizer, max_tokens)) for answer in going]
        for answer, handle in zip(going, handles, strict=True):
            _take(answer, handle.result().samples[0], loaded.tokenizer, max_tokens, capacity)
            progress.tick(sum(answer.done for answer in answers), len(answers))
    engine.release()
    return [loaded.tokenizer.decode(answer.written) for answer in answers]


def _engine(loaded: LoadedModel, slots: int, capacity: int) -> Engine:
    """The one of this size, with the parameters of now; it keeps none of earlier ones."""
    scope = contextlib.nullcontext if loaded.topology is None else loaded.topology.scope
    options = {"slots": slots, "capacity": capacity, "fetch": loaded.fetch, "scope": scope}
    made = loaded.program(f"engine of {slots} rows of {capacity}", lambda: Engine.of(loaded, **options))
    made.update_params(loaded.params)
    return made


def _request(answer: Answer, tokenizer: Tokenizer, max_tokens: int) -> Request:
    """What is left of an answer, up to its end or the next call of the calculator."""
    call = call_id(tokenizer)
    ends = stop_ids(tokenizer) if can_chat(tokenizer) else ()
    stops = (*ends, *([] if call is None else [call]))
    return Request(answer.ids, max_tokens - len(answer.written), stop_ids=stops)


def _take(answer: Answer, sample: Sample, tokenizer: Tokenizer, max_tokens: int, capacity: int) -> None:
    """Add what was written; after a call the calculator's output too, and then it may go on."""
    called = sample.stop is not None and sample.stop == call_id(tokenizer)
    answer.written += sample.ids[:-1] if sample.finish == "stop" and not called else sample.ids
    answer.calls += called
    if called:
        answer.written += output_ids(tokenizer, answer.written)
    full = len(answer.ids) >= capacity or len(answer.written) >= max_tokens
    answer.done = not called or full or answer.calls >= CALLS


# A conversation as tokens: what the model reads before it answers.


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation up to the answer. What looks like a special token in a message is text."""
    if not can_chat(tokenizer):
        raise InputError(
            f"{tokenizer.origin} has no tokens for the turns of a conversation (<|user_start|> and the like) and no "
            "chat template, which this evaluation needs."
        )
    return render(messages, tokenizer)
