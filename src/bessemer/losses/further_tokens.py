"""Targets further ahead than the next token: the auxiliary loss of multi-token prediction.

    loss = Σ_t w_t · nll(h_t, token t + 1)  +  Σ_n λ_n(step) Σ_t w_t,n · nll(h_t, token t + 1 + n),    over Σ_t w_t

The same hidden state and the same head predict all of them (Gloeckle et al. 2024, arXiv 2404.19737, without heads of
their own), so a model has no more parameters than without it, and one tile of logits serves all targets. The one
denominator stays that of the next token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import Array

from bessemer.losses.cross_entropy import IGNORED, Further, target_weights

PROGRESS = "progress"
"""Field of a training batch, (): the share of the run's steps that are made, where the objective follows it."""


def weights_at(weights: Sequence[float], decay: float, progress: Array | float) -> Array:
    """λ_n = weights_n · max(0, 1 − progress / decay): linear to 0 after the share `decay` of the run. (n,) float32."""
    return jnp.asarray(weights, jnp.float32) * jnp.maximum(0.0, 1.0 - progress / decay)


def further_targets(batch: Mapping[str, Array], ahead: int) -> tuple[Array, Array]:
    """Return (targets, w) of the tokens `ahead` positions beyond the next one, (B, T) each.

    w is that of the position whose next token it is, and 0 beyond the row, behind a position without a target, and
    where that position belongs to another document (`segment_ids`).
    """
    targets, weights = batch["target_ids"], target_weights(batch)
    length = targets.shape[1]

    def moved(x: Array, by: int, fill: int) -> Array:
        return jnp.pad(x[:, by:], ((0, 0), (0, min(by, length))), constant_values=fill)

    weights = moved(weights, ahead, 0)
    for between in range(ahead):
        weights = jnp.where(moved(targets, between, IGNORED) < 0, 0.0, weights)
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        weights = jnp.where(moved(segments, ahead, 0) == segments, weights, 0.0)
    return moved(targets, ahead, IGNORED), weights


def join_further(batch: Mapping[str, Array], shares: Array) -> Further:
    """Return the targets of n further tokens, which share the logits of the next one. shares: λ, (n,)."""
    found = [further_targets(batch, 1 + index) for index in range(len(shares))]
    targets, weights = (jnp.stack(part, axis=-1) for part in zip(*found, strict=True))
    return Further(targets, weights, shares)
