"""Questions answered in words: the model answers greedily, with the calculator, and its answer is parsed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from bessemer import console
from bessemer.data import Tokenizer
from bessemer.data.tokenize.chat import can_chat, render
from bessemer.errors import InputError
from bessemer.evaluate.scoring import check_batch
from bessemer.generate import Engine, LoadedModel, Request, Sample
from bessemer.generate.calculator import CALLS, call_id, output_ids
from bessemer.generate.decoder import bucket, crop
from bessemer.generate.text import turn_ends
from bessemer.models.protocol import Decoding

GENERATIVE = "generative"
ROWS = 16

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARK = "####"


def parse_answer(text: str) -> Fraction | None:
    """Return the number after the last ####; without a mark, the last number."""
    numbers = NUMBER.findall(text.rpartition(MARK)[2])
    if not numbers:
        return None
    return Fraction(re.sub("[$,]", "", numbers[0] if MARK in text else numbers[-1]))


def is_right(text: str, answer: str) -> bool:
    """Return whether the two are equal as numbers (1,000 is 1000.0), or as text if the answer is not a number."""
    wanted = parse_answer(answer)
    if wanted is None:
        return text.strip().casefold() == answer.strip().casefold()
    return parse_answer(text) == wanted


@dataclass
class Answer:
    """One answer, still generating. `written`: the ids after the prompt, with calculator outputs."""

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
    """Return whether each answer is right, and how many questions were longer than the context."""
    check_batch(batch_size)
    assert loaded.tokenizer is not None
    if not isinstance(loaded.model, Decoding):
        raise InputError(f"{type(loaded.model).__name__} cannot decode, so it cannot answer in words.")
    prompts = [question_ids(loaded.tokenizer, example["question"]) for example in examples]
    texts = write(loaded, prompts, max_tokens, batch_size)
    right = [is_right(text, example["answer"]) for text, example in zip(texts, examples, strict=True)]
    return right, sum(len(prompt) > loaded.model.block_size for prompt in prompts)


def question_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """Return a question as a user's message, or as plain text if the tokenizer has no tokens for conversations."""
    if can_chat(tokenizer):
        return prompt_ids(tokenizer, [{"role": "user", "content": question}])
    return tokenizer.prompt(f"Question: {question}\nAnswer:")


def write(
    loaded: LoadedModel, prompts: Sequence[list[int]], max_tokens: int, batch_size: int | None = None
) -> list[str]:
    """Return greedy answers of up to `max_tokens` tokens, calculator outputs included; `batch_size` rows at a time."""
    assert loaded.tokenizer is not None
    block = loaded.model.block_size
    answers = [Answer(prompt) for prompt in crop(prompts, max_tokens, block)[0]]
    capacity = bucket(max(len(answer.prompt) for answer in answers) + max_tokens, block)
    with engine_for(loaded, batch_size or ROWS, capacity) as engine:
        while going := [answer for answer in answers if not answer.done]:
            handles = [engine.submit(_request(answer, loaded.tokenizer, max_tokens)) for answer in going]
            for answer, handle in zip(going, handles, strict=True):
                _take(answer, handle.result().samples[0], loaded.tokenizer, max_tokens, capacity)
                console.tick(sum(answer.done for answer in answers), len(answers))
    return [loaded.tokenizer.decode(answer.written) for answer in answers]


@contextlib.contextmanager
def engine_for(loaded: LoadedModel, slots: int, capacity: int | None = None) -> Iterator[Engine]:
    """Yield the engine of this size, compiled once per model, with the current parameters; then free its memory."""
    # not loaded.scope: the engine outlives `loaded`, whose parameters it would hold
    scope = contextlib.nullcontext if loaded.topology is None else loaded.topology.scope
    options = {"slots": slots, "capacity": capacity, "fetch": loaded.fetch, "scope": scope}
    engine: Engine = loaded.program(f"engine of {slots} rows of {capacity}", lambda: Engine.of(loaded, **options))
    engine.update_params(loaded.params)
    try:
        yield engine
    finally:
        engine.release()
        engine.update_params(None)  # the next training step frees them


def _request(answer: Answer, tokenizer: Tokenizer, max_tokens: int) -> Request:
    """Return the request for the rest of an answer, up to its end or the next call of the calculator."""
    call = call_id(tokenizer)
    stops = (*turn_ends(tokenizer), *([] if call is None else [call]))
    return Request(answer.ids, max_tokens - len(answer.written), stop_ids=stops)


def _take(answer: Answer, sample: Sample, tokenizer: Tokenizer, max_tokens: int, capacity: int) -> None:
    """Add a sample to its answer, and after a call the calculator's output; it then continues."""
    called = sample.stop is not None and sample.stop == call_id(tokenizer)
    answer.written += sample.ids[:-1] if sample.finish == "stop" and not called else sample.ids
    answer.calls += called
    if called:
        answer.written += output_ids(tokenizer, answer.written)
    full = len(answer.ids) >= capacity or len(answer.written) >= max_tokens
    answer.done = not called or full or answer.calls >= CALLS


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the tokens of a conversation up to the answer. Special tokens in a message are read as text."""
    if not can_chat(tokenizer):
        raise InputError(
            f"{tokenizer.origin} has no tokens for the turns of a conversation (<|user_start|> and the like) and no "
            "chat template, which this evaluation needs."
        )
    return render(messages, tokenizer)
