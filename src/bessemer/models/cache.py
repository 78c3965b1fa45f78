"""The KV cache of incremental decoding: keys and values per layer, one length per row.

A layer with window w stores w tokens: the token at position p lies at slot p mod S, S being the window or the capacity.
What a slot holds therefore follows from the row's length alone. A recurrent layer has no slots but a state, which
cannot be taken back to an earlier length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from bessemer.topology.rules import constrain

NONE = -1  # the predecessor of a token that has none


@struct.dataclass
class Cache:
    """Rows advance independently: row b has seen `lengths[b]` tokens.

    Keys and values are head-major, (B, K, S, H), as a step's matmuls read them, so the cache is never transposed.
    """

    keys: tuple[Array, ...]  # per layer (B, K, S, H)
    values: tuple[Array, ...]
    lengths: Array  # (B,) int32
    previous: Array  # (B, D): the last token's embedding, for smear
    last: Array  # (B, 1) int32: the last token, for bigrams, NONE before the first; (B, 0) in a model without them
    empty: bool = struct.field(pytree_node=False, default=False)  # known while tracing: no row holds anything yet
    states: tuple[tuple[Array, ...], ...] = ()  # of recurrent layers, in order; a row's follow from all of its tokens
    spare: int = struct.field(pytree_node=False, default=0)  # slots of a layer beyond its tokens (previous_token.py)

    @property
    def capacity(self) -> int:
        """Tokens that fit a row; the last layer sees all of them."""
        return max(keys.shape[2] for keys in self.keys) - self.spare


def empty_cache(
    windows: Sequence[int | None],
    batch: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    width: int,
    dtype: Any,
    bigrams: bool = False,
    spare: int = 0,
) -> Cache:
    def store(window: int | None) -> Array:
        shape = (batch, kv_heads, (length if window is None else min(window, length)) + spare, head_dim)
        return constrain(jnp.zeros(shape, dtype), "batch", "kv", None, None)

    return Cache(  # a buffer of its own for each layer, so that the cache can be donated
        keys=tuple(store(window) for window in windows),
        values=tuple(store(window) for window in windows),
        lengths=jnp.zeros((batch,), jnp.int32),
        previous=constrain(jnp.zeros((batch, width), dtype), "batch", None),
        last=constrain(jnp.full((batch, int(bigrams)), NONE, jnp.int32), "batch", None),
        empty=True,
        spare=spare,
    )


def held_positions(size: int, lengths: Array) -> Array:
    """Return the position of the token in each of a row's S slots, (B, S); below 0 if empty. lengths: (B,)."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(size)) % size


def write(store: Array, new: Array, lengths: Array, added: Array) -> Array:
    """Append the first `added` (B,) of `new` (B, n, K, H) to rows of `lengths` (B,). store: (B, K, S, H).

    Of more than S tokens the last S stay. Padding is never written: in a full window it would replace a real key.
    """
    size, n = store.shape[2], new.shape[1]
    offset = jnp.arange(n)
    kept = (offset < added[:, None]) & (offset >= added[:, None] - size)
    place = jnp.where(kept, (lengths[:, None] + offset) % size, size + offset)  # beyond the end: dropped

    def row(store: Array, new: Array, place: Array) -> Array:
        return store.at[:, place].set(new.swapaxes(0, 1), mode="drop", unique_indices=True)

    # vmap, not an index of rows: the rows of a mesh stay where they are
    return jax.vmap(row)(store, new.astype(store.dtype), place)


def begin(store: Array, new: Array, lengths: Array, added: Array) -> Array:
    """`write` into an empty store; a plain copy where everything fits (padding is then hidden by the length)."""
    if new.shape[1] > store.shape[2]:
        return write(store, new, lengths, added)
    return store.at[:, :, : new.shape[1]].set(new.swapaxes(1, 2).astype(store.dtype))


def unwrite(store: Array, before: Array, lengths: Array, added: Array, kept: Array, n: int) -> Array:
    """Take back the last `added` - `kept` (B,) tokens that `write` appended to `before`, and return the store.

    They lie in a ring over keys that the row still sees, which come from `before`; n, the most tokens that were
    appended, is at most S.
    """
    size, offset = store.shape[2], jnp.arange(n)
    taken_back = (offset >= kept[:, None]) & (offset < added[:, None])
    place = (lengths[:, None] + offset) % size

    def row(store: Array, before: Array, place: Array, taken_back: Array) -> Array:
        old = before[:, place]
        where = jnp.where(taken_back, place, size + offset)  # beyond the end: dropped
        return store.at[:, where].set(old, mode="drop", unique_indices=True)

    return jax.vmap(row)(store, before, place, taken_back)
