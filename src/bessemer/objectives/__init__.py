"""Objectives, one file each: pure functions (apply, params, batch, key, settings) → (Σ loss, Σ weight, metric sums).

`apply(params, *args, method=…, rngs=…)` is the model. Without a key (evaluation) there is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jax import Array

from bessemer.models.protocol import Batch as Batch

Apply = Callable[..., Any]
Sums = tuple[Array, Array, dict[str, Array]]


@runtime_checkable
class FollowsProgress(Protocol):
    """Settings of an objective that reads the share of the steps made so far: field PROGRESS of a training batch."""

    follows_progress: bool


def run_model(apply: Apply, params: Any, batch: Batch, key: Array | None, method: str) -> Any:
    """Return the result of the model's `method`, with dropout where there is a key."""
    return apply(params, batch, key is None, method=method, rngs=None if key is None else {"dropout": key})
