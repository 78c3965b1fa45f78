"""Paired heads: two attention heads share their keys and values, over a sequence that interleaves both.

    heads 2p and 2p + 1 at tokens 0, 1, …, T−1:   a_0 b_0 a_1 b_1 … a_{T−1} b_{T−1},    2T queries, keys and values

Attention is causal over these 2T places: a_t sees both heads' keys of all tokens before t and its own of t, and b_t
also b's of t. So each head attends to twice as many keys, half of them made by another matrix; there are no more
parameters, and attention takes twice the FLOPs (modded-nanogpt's paired head attention, which also gives the 2T places
rotary positions of their own; here both heads keep the position of their token). A window of w tokens is one of 2w − 1
places, which lie in the same w tokens. Key-value heads are paired likewise.

The KV cache is unchanged: the slots of both heads are read one after the other, and their places are 2 · position and
2 · position + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array


def interleave(x: Array) -> Array:
    """(B, T, N, H) → (B, 2T, N/2, H): heads 2p and 2p + 1 of token t at places 2t and 2t + 1 of head p."""
    rows, length, heads, size = x.shape
    return x.reshape(rows, length, heads // 2, 2, size).swapaxes(2, 3).reshape(rows, 2 * length, heads // 2, size)


def separate(x: Array) -> Array:
    """The inverse of `interleave`: (B, 2T, N/2, H) → (B, T, N, H)."""
    rows, places, pairs, size = x.shape
    return x.reshape(rows, places // 2, 2, pairs, size).swapaxes(2, 3).reshape(rows, places // 2, 2 * pairs, size)


def paired_window(window: int | None) -> int | None:
    """Places that a query sees in a window of so many tokens."""
    return None if window is None else 2 * window - 1


def paired_places(positions: Array) -> Array:
    """(…, n) → (…, 2n): 2 · position and 2 · position + 1 in turn."""
    return (2 * positions[..., None] + jnp.arange(2)).reshape(*positions.shape[:-1], -1)


def attend_paired(
    attend: Callable[..., Array], window: int | None, documents: Array | None, q: Array, k: Array, v: Array, **more: Any
) -> Array:
    """`attend` over whole rows of paired heads. documents: (B, T), or None if they see each other."""
    both = None if documents is None else jnp.repeat(documents, 2, axis=1)
    q, k, v = (interleave(x) for x in (q, k, v))
    return separate(attend(q, k, v, window=paired_window(window), segment_ids=both, **more))


def attend_paired_cache(
    attend: Callable[..., Array], q: Array, keys: Array, values: Array, q_positions: Array, k_positions: Array
) -> Array:
    """`attend` of new tokens to a cache. q: (B, n, N, H); keys, values: (B, K, S, H); positions: (B, n), (B, S)."""
    rows, heads, size, width = keys.shape
    keys, values = (x.reshape(rows, heads // 2, 2 * size, width) for x in (keys, values))
    places = jnp.concatenate([2 * k_positions, 2 * k_positions + 1], axis=1)  # an empty slot, −1, stays below 0
    out = attend(interleave(q), keys, values, q_positions=paired_places(q_positions), k_positions=places)
    return separate(out)
