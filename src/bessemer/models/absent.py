"""Kernels that need their chip even to be traced, as shapes alone: for plans made on another machine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@jax.custom_vjp
def absent_flash(q: Array, k: Array, v: Array) -> Array:
    """What a flash attention takes, gives and keeps for its gradient, without its arithmetic. Never run.

    q: (B, T, N, H); k, v: (B, T, K, H) → (B, T, N, H). Kept: q, k, v, the result, one float32 a query and head.
    """
    return _forward(q, k, v)[0]


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    out = q + jnp.sum(v, axis=2, keepdims=True) + jnp.sum(k, axis=2, keepdims=True)
    return out, (q, k, v, out, jnp.sum(out.astype(jnp.float32), axis=-1))


def _backward(kept: Any, g: Array) -> tuple[Array, Array, Array]:
    q, k, v, out, total = kept
    g = (g + out * total[..., None]).astype(q.dtype)
    return g + q, k + jnp.sum(g), v + jnp.sum(g)


absent_flash.defvjp(_forward, _backward)
