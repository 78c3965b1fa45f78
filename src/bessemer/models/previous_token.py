"""What a family may take from the token before: bigram embeddings, and token-shifted keys.

Bigram embeddings: x_t += B[hash(id_{t−1}, id_t)] after the smear, B a table of token pairs that starts at 0. Pairs with
one hash share a row. A token without a predecessor, at the start of a row or (with a document mask) of a document, gets
nothing. The table is in the x0 that layers mix in.

Token-shifted keys: in half of its channels, the key of a token is that of the token before it.

    k'_t = [k_t in the faster half of the rotary pairs, k_{t−1} in the slower half]

k is the key with its position and norm, so the shifted channels keep the angle of the place they come from. A query can
match what stood one place before a token and read that token's value in a single layer: an induction head in one layer
instead of two ("partial key offset", modded-nanogpt). Without a predecessor the channels are 0.

In the KV cache a slot holds k'. The channels that the next token will take from the last one wait in the next slot, so
rows are cut and taken back by their length alone; a layer has one slot more for them (`Cache.spare`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.kernels import ops
from bessemer.models.cache import NONE, unwrite

# --- bigram embeddings ---


ROWS_MULTIPLE = 64  # rows of the table divide over tensor-parallel devices


class BigramSettings(nn.Module):
    """The setting of the bigram table, for a model family to inherit."""

    bigram_rows: int = field(
        "architecture/bigram_rows",
        default=0,
        minimum=0,
        help="rows of a table of hashed token pairs that is added to the embedding, a multiple of 64; 0 = off",
    )


def hash_pairs(previous: Array, ids: Array, rows: int) -> Array:
    """Return the table row of each pair, int32 in [0, rows). Integer arithmetic mod 2³²: the same on every platform.

    Odd multipliers keep pairs apart, xor with shifted bits (as in the finalizers of MurmurHash3) spreads neighbors.
    """
    mixed = previous.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + ids.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0xC2B2AE3D)
    mixed = mixed ^ (mixed >> 13)
    return (mixed % jnp.uint32(rows)).astype(jnp.int32)


def add_bigrams(x: Array, table: Array, previous: Array, ids: Array) -> Array:
    """x + B[hash(previous, ids)]; nothing where `previous` is NONE. x: (B, T, D); previous, ids: (B, T)."""
    found = ops.lookup(table, hash_pairs(previous, ids, table.shape[0]), ("vocab", None), x.dtype)
    return x + jnp.where((previous == NONE)[..., None], jnp.zeros((), x.dtype), found)


# --- token-shifted keys ---


def shifted_channels(head_dim: int) -> Array:
    """Which channels of a head are the previous token's, (H,) bool: rotary pairs (i, i + H/2) from i = H/4 on."""
    return jnp.arange(head_dim) % (head_dim // 2) >= head_dim // 4


def offset_keys(keys: Array, previous: Array) -> Array:
    """Return the keys k' from k and that of the token before, (B, T, K, H) each."""
    return jnp.where(shifted_channels(keys.shape[-1]), previous.astype(keys.dtype), keys)


def attend_with_offset(
    attend: Callable[..., Array], documents: Array | None, q: Array, k: Array, v: Array, **more: Any
) -> Array:
    """Attention to k' in place of k over whole rows. documents: (B, T), or None if they see each other."""
    previous = ops.shift(k, jnp.zeros_like(k[:, :1]), "kv")
    if documents is not None:
        same = documents == ops.shift(documents, documents[:, :1])
        previous = jnp.where(same[..., None, None], previous, jnp.zeros((), k.dtype))
    return attend(q, offset_keys(k, previous), v, **more)


def waiting_key(store: Array, lengths: Array) -> Array:
    """Return what the next token of each row takes from the last one, (B, 1, K, H); 0 in an empty row.

    store: (B, K, S, H); lengths: (B,). Only the shifted channels mean anything.
    """
    place = (lengths % store.shape[2])[:, None, None, None]
    found = jnp.take_along_axis(store, place, axis=2).swapaxes(1, 2)
    return jnp.where((lengths > 0)[:, None, None, None], found, jnp.zeros((), store.dtype))


def leave_waiting(store: Array, keys: Array, lengths: Array, added: Array) -> Array:
    """Put the shifted channels of each row's last token in the slot of the next one, and return the store.

    keys: k of the new tokens, (B, n, K, H), of which the first `added` (B,) are real.
    """
    size, moved = store.shape[2], shifted_channels(store.shape[3])
    last = jnp.maximum(added - 1, 0)[:, None, None, None]
    newest = jnp.take_along_axis(keys, last, axis=1)[:, 0].astype(store.dtype)  # (B, K, H)
    place = jnp.where(added > 0, (lengths + added) % size, size)  # beyond the end: dropped

    def row(store: Array, newest: Array, place: Array) -> Array:
        held = jnp.where(moved, newest, store[:, jnp.minimum(place, size - 1)])
        return store.at[:, place].set(held, mode="drop")

    return jax.vmap(row)(store, newest, place)


def unwrite_offset(store: Array, before: Array, lengths: Array, added: Array, kept: Array, n: int) -> Array:
    """`cache.unwrite` of keys k': shifted channels lie one slot further than the tokens they come from."""
    own = unwrite(store, before, lengths, added, kept, n)
    shifted = unwrite(store, before, lengths, added + 1, kept + 1, n + 1)
    return jnp.where(shifted_channels(store.shape[3]), shifted, own)
