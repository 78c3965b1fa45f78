"""What all tasks ask of a model: the likelihood of the end of a text, and greedy answers in words.

For likelihoods, rows are right-padded to a bucket of lengths (powers of two, at most the model's block) and passes have
a fixed number of rows, so there is one compilation per bucket. The device returns values of single tokens, and the host
adds them exactly, so batching changes a result by rounding at most. Questions answered in words are answered greedily,
with the calculator, and the answer is parsed.
"""

from __future__ import annotations

import collections
import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from bessemer import console
from bessemer.data import Tokenizer
from bessemer.data.tokenize.chat import can_chat, render
from bessemer.errors import InputError
from bessemer.generate import Engine, LoadedModel, Request, Sample
from bessemer.generate.calculator import CALLS, call_id, output_ids
from bessemer.generate.decoder import bucket, crop
from bessemer.generate.text import turn_ends
from bessemer.models.protocol import Decoding, Scoring

# --- likelihoods ---


TOKENS_IN_A_PASS, MOST_ROWS = 16_384, 64  # of a forward pass when no batch size is given
IN_FLIGHT = 2


class Row(NamedTuple):
    """Token ids; those from `start` (at least 1) on are scored."""

    ids: Sequence[int]
    start: int


class Score(NamedTuple):
    """`nats` is the summed loss of `tokens` targets; `greedy`: each of them is the most likely token."""

    nats: float
    tokens: int
    greedy: bool
    cropped: int = 0  # tokens cut on the left, because the row exceeded the context
    whole: bool = True  # no scored token was cut

    @property
    def mean(self) -> float:
        return self.nats / self.tokens


def score(loaded: LoadedModel, rows: Sequence[Row], batch_size: int | None = None) -> list[Score]:
    """Return one score per row, in order. Rows longer than block_size + 1 tokens are cut on the left."""
    check_batch(batch_size)
    if not isinstance(loaded.model, Scoring):
        raise InputError(
            f"{type(loaded.model).__name__} has no token_scores(batch), which this evaluation needs: derive "
            "the model from bessemer's LanguageModel."
        )
    cut = [crop_row(row, loaded.model.block_size) for row in rows]
    found: list[Score | None] = [None] * len(rows)
    run = loaded.program("token_scores", lambda: _compiled(loaded))
    waiting: collections.deque[tuple[list[int], Any]] = collections.deque()

    def collect() -> None:
        places, arrays = waiting.popleft()
        for place, values in zip(places, zip(*loaded.fetch(arrays), strict=True), strict=False):
            found[place] = _scored(cut[place], rows[place], *values)
        console.tick(len(rows) - found.count(None), len(rows))

    with loaded.scope():
        for places, batch in _batches(loaded, cut, batch_size):
            waiting.append((places, run(loaded.params, batch)))
            if len(waiting) > IN_FLIGHT:
                collect()
        while waiting:
            collect()
    return [one for one in found if one is not None]


def _scored(row: Row, whole: Row, logprobs: np.ndarray, greedy: np.ndarray) -> Score:
    """Return the score of a row that was cut from `whole`. logprobs, greedy: (T,) of its targets."""
    targets, tokens = slice(row.start - 1, len(row.ids) - 1), len(row.ids) - row.start
    return Score(
        -math.fsum(logprobs[targets].tolist()),
        tokens,
        bool(greedy[targets].all()),
        cropped=len(whole.ids) - len(row.ids),
        whole=tokens == len(whole.ids) - whole.start,
    )


def check_batch(batch_size: int | None) -> None:
    if batch_size is not None and batch_size < 1:
        raise InputError(f"the batch size must be at least 1; got {batch_size}.")


def crop_row(row: Row, block: int) -> Row:
    """Return the last block + 1 tokens: `block` inputs, each with a target. The first token is never a target."""
    over = max(0, len(row.ids) - block - 1)
    return Row(row.ids[over:], max(1, row.start - over))


def _compiled(loaded: LoadedModel) -> Any:
    model = loaded.model

    def token_scores(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return model.apply({"params": params}, batch, method="token_scores")  # (B, T) each

    return jax.jit(token_scores, out_shardings=replicated(loaded))


def _batches(
    loaded: LoadedModel, rows: Sequence[Row], batch_size: int | None
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield (places of the rows, batch), shortest bucket first; the last of a bucket has rows without targets."""
    block = loaded.model.block_size
    buckets: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        buckets.setdefault(bucket(len(row.ids) - 1, block), []).append(place)
    for width, places in sorted(buckets.items()):
        size = rows_in_a_pass(loaded, width, batch_size)
        for first in range(0, len(places), size):
            chosen = places[first : first + size]
            yield chosen, on_mesh(loaded, _batch([rows[place] for place in chosen], size, width))


def replicated(loaded: LoadedModel) -> NamedSharding | None:
    return None if loaded.topology is None else loaded.topology.replicated


def on_mesh(loaded: LoadedModel, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch (B, T) on the devices of the model."""
    return batch if loaded.topology is None else jax.device_put(batch, loaded.topology.batch_sharding())


def rows_in_a_pass(loaded: LoadedModel, width: int, batch_size: int | None) -> int:
    """Return the number of rows of `width` tokens in a pass, a multiple of the devices that share them."""
    size = batch_size or min(MOST_ROWS, max(1, TOKENS_IN_A_PASS // width))
    parallel = 1 if loaded.topology is None else loaded.topology.data_parallel
    return -(-size // parallel) * parallel


def _batch(rows: Sequence[Row], size: int, width: int) -> dict[str, np.ndarray]:
    inputs = np.zeros((size, width), np.int32)
    targets = np.full((size, width), -1, np.int32)
    for place, row in enumerate(rows):
        inputs[place, : len(row.ids) - 1] = row.ids[:-1]
        targets[place, row.start - 1 : len(row.ids) - 1] = row.ids[row.start :]
    return {"input_ids": inputs, "target_ids": targets}


# --- answers in words ---


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
