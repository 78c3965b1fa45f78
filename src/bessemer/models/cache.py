"""The key-value cache of incremental decoding: one per-row length, keys and values of each layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from bessemer.models.axes import constrain


@struct.dataclass
class Cache:
    """What decoding must remember. Rows advance independently: `lengths[b]` tokens of row b are held."""

    keys: tuple[Array, ...]  # per layer (B, L, K, H)
    values: tuple[Array, ...]
    lengths: Array  # (B,) int32
    previous: Array  # (B, D): the last token's embedding, for smear

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]


def empty_cache(
    depth: int, batch: int, length: int, kv_heads: int, head_dim: int, width: int, dtype: Any
) -> Cache:
    def store() -> Array:
        return constrain(jnp.zeros((batch, length, kv_heads, head_dim), dtype), "batch", None, "kv", None)

    return Cache(  # a buffer of its own for each layer, so that the cache can be donated
        keys=tuple(store() for _ in range(depth)),
        values=tuple(store() for _ in range(depth)),
        lengths=jnp.zeros((batch,), jnp.int32),
        previous=jnp.zeros((batch, width), dtype),
    )


def write(store: Array, new: Array, positions: Array) -> Array:
    """Put `new` (B, n, K, H) at `positions` (B, n) of each row. Positions beyond the capacity are dropped."""
    rows = jnp.arange(store.shape[0])[:, None]
    return store.at[rows, positions].set(new.astype(store.dtype), mode="drop", unique_indices=True)
