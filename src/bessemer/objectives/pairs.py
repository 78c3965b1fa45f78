"""What objectives over CONTRASTIVE rows share: sums by response, by segment (data/rows/preference.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from bessemer.errors import InputError
from bessemer.losses.cross_entropy import target_weights

Batch = Mapping[str, Array]


def real_pairs(batch: Batch) -> Array:
    """(B, P) float32: 1 where the row has a pair."""
    if "pair_ids" not in batch:
        raise InputError(
            "this objective compares answers, so its rows must hold pairs: give preference data in the style "
            "CONTRASTIVE, as in training.dataset=pairs.jsonl:CONTRASTIVE."
        )
    return (batch["pair_ids"] >= 0).astype(jnp.float32)


def by_response(batch: Batch, values: Array) -> Array:
    """Σ of values (B, T) over each response: (B, P, 2), chosen and rejected. Plain sums, so that they are repeatable
    on every device, which scattered additions are not."""
    rows, pairs = batch["pair_ids"].shape
    segments = jnp.arange(1, 2 * pairs + 1, dtype=jnp.int32)
    mine = batch["segment_ids"][:, :, None] == segments  # (B, T, 2P)
    return jnp.where(mine, values[:, :, None], 0.0).sum(axis=1).reshape(rows, pairs, 2)


def answer_tokens(batch: Batch) -> Array:
    """Tokens of each answer, (B, P, 2)."""
    return by_response(batch, target_weights(batch))


def answer_logps(apply: Callable[..., Any], params: Any, batch: Batch, key: Array | None = None) -> Array:
    """log p(answer | prompt) = Σ log p(token) over the tokens of each answer, (B, P, 2) in float32."""
    rngs = None if key is None else {"dropout": key}
    logps = apply(params, batch, key is None, method="token_logprobs", rngs=rngs)
    return by_response(batch, logps.astype(jnp.float32) * target_weights(batch))
