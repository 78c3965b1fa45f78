"""What an evaluation asks of each target: how likely it is, and whether greedy decoding would have chosen it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.models.axes import constrain
from bessemer.models.cross_entropy import (
    IGNORED,
    LossOptions,
    _join,
    _logits,
    _pick,
    _split,
    _statistics,
    choose_chunks,
)


def token_scores(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    chunks: int | str = "auto",
) -> tuple[Array, Array]:
    """(log p(target), target is the argmax), (B, T) each, a tile of logits at a time.

    hidden: (B, T, D), head: (D, V), targets: (B, T). Of equally likely tokens the lowest id is the argmax, as in
    greedy decoding. Where the target is below 0: (0, True).
    """
    count = choose_chunks(chunks, targets.shape[0], targets.shape[1], head.shape[1])
    options = LossOptions(vocab_size, count, softcap)
    table = constrain(head.astype(hidden.dtype), "embed", "vocab")

    def tile(_: None, inputs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        h, t = inputs
        return None, scores_of(options, _logits(h, table), t)

    pieces = (_split(hidden, count), _split(targets, count, IGNORED))
    _, (logprobs, greedy) = jax.lax.scan(tile, None, pieces)
    length = targets.shape[1]
    return _join(logprobs)[:, :length], _join(greedy)[:, :length]


def scores_of(options: LossOptions, logits: Array, targets: Array) -> tuple[Array, Array]:
    """The same from logits (B, T, V) that are there already."""
    z, lse = _statistics(options, logits)
    blank = targets < 0
    logprobs = jnp.where(blank, 0.0, _pick(z, jnp.maximum(targets, 0)) - lse)
    return logprobs, blank | (jnp.argmax(z, axis=-1) == targets)
