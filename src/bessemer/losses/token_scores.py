"""What is asked of each target: how likely it is, whether greedy decoding would have chosen it, and (reinforcement)
how undecided the policy was.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.losses.cross_entropy import (
    IGNORED,
    LossOptions,
    _logits,
    _pick,
    _statistics,
    choose_chunks,
    join,
    split,
)
from bessemer.topology.rules import constrain


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

    pieces = (split(hidden, count), split(targets, count, IGNORED))
    _, (logprobs, greedy) = jax.lax.scan(tile, None, pieces)
    length = targets.shape[1]
    return join(logprobs)[:, :length], join(greedy)[:, :length]


def scores_of(options: LossOptions, logits: Array, targets: Array) -> tuple[Array, Array]:
    """The same from logits (B, T, V) that are there already."""
    z, lse = _statistics(options, logits)
    blank = targets < 0
    logprobs = jnp.where(blank, 0.0, _pick(z, jnp.maximum(targets, 0)) - lse)
    return logprobs, blank | (jnp.argmax(z, axis=-1) == targets)


def policy_scores(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    softcap: float = 0.0,
    chunks: int | str = "auto",
) -> tuple[Array, Array]:
    """(log π(target), entropy of π), (B, T) each, of the policy π = softmax(z / temperature) one samples from.

    hidden: (B, T, D), head: (D, V), targets: (B, T). Differentiable in the first, a tile of logits at a time, which the
    backward pass makes again. Where the target is below 0: (0, 0).
    """
    count = choose_chunks(chunks, targets.shape[0], targets.shape[1], head.shape[1])
    options = LossOptions(vocab_size, count, softcap)
    table = constrain(head.astype(hidden.dtype), "embed", "vocab")

    @jax.checkpoint
    def tile(_: None, inputs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        h, t = inputs
        return None, policy_scores_of(options, _logits(h, table), t, temperature)

    pieces = (split(hidden, count), split(targets, count, IGNORED))
    _, (logprobs, entropy) = jax.lax.scan(tile, None, pieces)
    length = targets.shape[1]
    return join(logprobs)[:, :length], join(entropy)[:, :length]


def policy_scores_of(
    options: LossOptions, logits: Array, targets: Array, temperature: float
) -> tuple[Array, Array]:
    """The same from logits (B, T, V) that are there already."""
    z, lse = _statistics(options, logits)
    if temperature != 1:
        z = z / temperature
        lse = jax.nn.logsumexp(z, axis=-1)
    blank = targets < 0
    logprobs = jnp.where(blank, 0.0, _pick(z, jnp.maximum(targets, 0)) - lse)
    fixed = jax.lax.stop_gradient(z - lse[..., None])
    entropy = -jnp.sum(jnp.where(jnp.isfinite(fixed), jnp.exp(fixed) * fixed, 0.0), axis=-1)
    return logprobs, jnp.where(blank, 0.0, entropy)
