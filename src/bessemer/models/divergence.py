"""Two distributions over the vocabulary, compared token by token, a tile of logits at a time.

    p = softmax(policy), q = softmax(reference), both in float32
    kl      = Σ_v p (log p − log q)
    reverse = Σ_v q (log q − log p)

Only one tile of each model's logits exists at once, forward and backward: the backward pass computes it again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.models.axes import constrain
from bessemer.models.cross_entropy import (
    IGNORED,
    LossOptions,
    _join,
    _logits,
    _split,
    _statistics,
    _token_loss,
    choose_chunks,
)


class Projection(NamedTuple):
    """What a model says of every token, just before its logits exist. hidden: (B, T, D), head: (D, V)."""

    hidden: Array
    head: Array | None  # None: `hidden` is the logits already, (B, T, V)
    vocab_size: int
    softcap: float = 0.0
    chunks: int | str = "auto"


class Compared(NamedTuple):
    """Per token, (B, T) float32; all 0 where there is no target. Gradients reach the policy alone."""

    loss: Array
    nll: Array
    reference_loss: Array
    reference_nll: Array
    kl: Array
    reverse: Array


def compare(
    policy: Projection,
    reference: Projection,
    targets: Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Compared:
    """Losses of both models (see cross_entropy) and their divergences at each target. targets: (B, T)."""
    reference = reference._replace(
        hidden=jax.lax.stop_gradient(reference.hidden),
        head=None if reference.head is None else jax.lax.stop_gradient(reference.head),
    )
    columns = policy.hidden.shape[-1] if policy.head is None else policy.head.shape[1]
    count = choose_chunks(policy.chunks, targets.shape[0], targets.shape[1], 2 * columns)
    options = LossOptions(policy.vocab_size, count, policy.softcap, label_smoothing, z_loss)
    tables = [_table(model) for model in (policy, reference)]

    @jax.checkpoint
    def tile(_: None, inputs: tuple[Array, Array, Array]) -> tuple[None, Compared]:
        mine, its, t = inputs
        z, lse = _statistics(options, _logits_of(mine, tables[0]))
        z_ref, lse_ref = _statistics(options, _logits_of(its, tables[1]))
        found = Compared(
            *_token_loss(options, z, lse, jnp.maximum(t, 0)),
            *_token_loss(options, z_ref, lse_ref, jnp.maximum(t, 0)),
            *_divergences(options, z, lse, z_ref, lse_ref),
        )
        return None, Compared(*(jnp.where(t < 0, 0.0, value) for value in found))

    pieces = (
        _split(policy.hidden, count),
        _split(reference.hidden, count),
        _split(targets, count, IGNORED),
    )
    _, compared = jax.lax.scan(tile, None, pieces)
    return Compared(*(_join(value)[:, : targets.shape[1]] for value in compared))


def _table(model: Projection) -> Array | None:
    return None if model.head is None else constrain(model.head.astype(model.hidden.dtype), "embed", "vocab")


def _logits_of(hidden: Array, table: Array | None) -> Array:
    return hidden.astype(jnp.float32) if table is None else _logits(hidden, table)


def _divergences(
    options: LossOptions, z: Array, lse: Array, z_ref: Array, lse_ref: Array
) -> tuple[Array, Array]:
    """(kl, reverse) per token. Columns that only pad the vocabulary are in neither distribution."""
    real = jnp.arange(z.shape[-1]) < options.vocab_size
    logp, logq = z - lse[..., None], z_ref - lse_ref[..., None]
    difference = jnp.where(real, logp - logq, 0.0)
    return jnp.sum(jnp.exp(logp) * difference, axis=-1), -jnp.sum(jnp.exp(logq) * difference, axis=-1)
