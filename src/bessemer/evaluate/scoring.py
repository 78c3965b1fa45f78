"""The likelihood of the end of a text: the forward pass that all likelihood tasks share.

Rows are right-padded to a bucket of lengths (powers of two, at most the model's block) and passes have a fixed number
of rows, so there is one compilation per bucket. The device returns values of single tokens, and the host adds them
exactly, so batching changes a result by rounding at most.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from bessemer import console
from bessemer.errors import InputError
from bessemer.generate import LoadedModel
from bessemer.generate.decoder import bucket
from bessemer.models.protocol import Scoring

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
    cut = [crop(row, loaded.model.block_size) for row in rows]
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


def crop(row: Row, block: int) -> Row:
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
