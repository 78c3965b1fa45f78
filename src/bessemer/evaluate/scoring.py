"""How likely a model finds the end of a text: the one forward pass that every likelihood task shares.

Rows are padded on the right to a bucket of lengths (powers of two, at most the model's block), a fixed number of
rows a pass, so there is one compilation a bucket. Attention is causal, so padding changes nothing. The device
gives values of single tokens, which are added exactly on the host: batching changes a result by rounding at most.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bessemer.errors import InputError
from bessemer.evaluate import progress
from bessemer.generate import LoadedModel
from bessemer.generate.decoder import bucket

TOKENS_IN_A_PASS, MOST_ROWS = 16_384, 64
"""One forward pass when no batch size is given: about so many tokens, in at most so many rows."""

IN_FLIGHT = 2


class Row(NamedTuple):
    """Token ids, of which those from `start` (at least 1) on are to be scored."""

    ids: Sequence[int]
    start: int


class Score(NamedTuple):
    """`nats` are the summed loss of `tokens` targets; `greedy`: each of them is the likeliest token."""

    nats: float
    tokens: int
    greedy: bool
    cropped: int = 0  # tokens cut from the left, because the row was longer than the context
    whole: bool = True  # none of them was one to be scored

    @property
    def mean(self) -> float:
        return self.nats / self.tokens


def score(loaded: LoadedModel, rows: Sequence[Row], batch_size: int | None = None) -> list[Score]:
    """One score a row, in order. A row has at most block_size + 1 tokens; what exceeds that is cut on the left."""
    check_batch(batch_size)
    if not hasattr(loaded.model, "token_scores"):
        raise InputError(
            f"{type(loaded.model).__name__} has no token_scores(batch), which this evaluation needs: derive "
            "the model from bessemer's LanguageModel."
        )
    cut = [crop(row, loaded.model.block_size) for row in rows]
    found: list[Score | None] = [None] * len(rows)
    run = loaded.program("token_scores", lambda: _compiled(loaded))
    waiting: collections.deque[tuple[list[int], Any]] = collections.deque()
    done = 0
    with loaded.scope():
        for places, batch in _batches(loaded, cut, batch_size):
            waiting.append((places, run(loaded.params, batch)))
            if len(waiting) > IN_FLIGHT:
                done += _collect(loaded, waiting.popleft(), cut, rows, found)
                progress.tick(done, len(rows))
        while waiting:
            done += _collect(loaded, waiting.popleft(), cut, rows, found)
            progress.tick(done, len(rows))
    return [one for one in found if one is not None]


def check_batch(batch_size: int | None) -> None:
    if batch_size is not None and batch_size < 1:
        raise InputError(f"the batch size is {batch_size}; give at least 1.")


def crop(row: Row, block: int) -> Row:
    """The last block + 1 tokens: `block` inputs, each with a target. The first token is never a target."""
    over = max(0, len(row.ids) - block - 1)
    return Row(row.ids[over:], max(1, row.start - over))


def _compiled(loaded: LoadedModel) -> Any:
    model, everywhere = loaded.model, None if loaded.topology is None else loaded.topology.replicated

    def token_scores(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return model.apply({"params": params}, batch, method="token_scores")  # (B, T) each

    return jax.jit(token_scores, out_shardings=everywhere)


def _batches(
    loaded: LoadedModel, rows: Sequence[Row], batch_size: int | None
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """(which rows, the batch), shortest bucket first; the last of a bucket is filled with rows without targets."""
    block = loaded.model.block_size
    buckets: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        buckets.setdefault(bucket(len(row.ids) - 1, block), []).append(place)
    for width, places in sorted(buckets.items()):
        size = rows_in_a_pass(loaded, width, batch_size)
        for first in range(0, len(places), size):
            chosen = places[first : first + size]
            batch = _batch([rows[place] for place in chosen], size, width)
            topology = loaded.topology
            yield chosen, batch if topology is None else jax.device_put(batch, topology.batch_sharding())


def rows_in_a_pass(loaded: LoadedModel, width: int, batch_size: int | None) -> int:
    """Of `width` tokens each; a multiple of the devices that share them."""
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


def _collect(
    loaded: LoadedModel,
    passed: tuple[list[int], Any],
    cut: Sequence[Row],
    rows: Sequence[Row],
    found: list[Score | None],
) -> int:
    places, arrays = passed
    logprobs, greedy = loaded.fetch(arrays)
    for number, place in enumerate(places):
        row = cut[place]
        targets = slice(row.start - 1, len(row.ids) - 1)
        found[place] = Score(
            -math.fsum(logprobs[number, targets].tolist()),
            len(row.ids) - row.start,
            bool(greedy[number, targets].all()),
            len(rows[place].ids) - len(row.ids),
            len(row.ids) - row.start == len(rows[place].ids) - rows[place].start,
        )
    return len(places)
