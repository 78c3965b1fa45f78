"""Bigram embeddings: x_t += B[hash(id_{t−1}, id_t)] after the smear, B a table of token pairs that starts at 0.

Pairs with one hash share a row. A token without a predecessor, at the start of a row or (with a document mask) of a
document, gets nothing. The table is in the x0 that layers mix in.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.kernels import ops
from bessemer.models.cache import NONE

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
