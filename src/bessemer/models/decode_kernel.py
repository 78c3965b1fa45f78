"""One query a row against its cache, in one pass over the keys and values that are there.

    out = Σ softmax(q·k_s / √H) v_s   over the places s < held[b] of row b

What is read follows the rows' lengths, not the capacity. A row is cut into pieces that run side by side, each with its
own largest score m, Σ e^(s − m) and Σ e^(s − m) v; they are joined afterwards (Dao et al. 2023, flash decoding).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

BLOCK = 64
"""Places read at once: 16 KiB of keys in bf16 at head dimension 128."""
PROGRAMS = 1024
"""Pieces that keep an H200 busy: a few for each of its 132 processors."""
LOWEST = -1e30  # of no place at all: its weight in the join is 0, and never 0/0


def suits_decode(size: int, head_dim: int) -> bool:
    """Whether places can be read in whole blocks, and a head is a power of two."""
    return size % BLOCK == 0 and head_dim >= 16 and head_dim & (head_dim - 1) == 0


def decode_attention(q: Array, k: Array, v: Array, held: Array) -> Array:
    """q: (B, N, H); k, v: (B, K, S, H); held: (B,), at most S → (B, N, H). A row that holds nothing gives zeros."""
    batch, heads, head_dim = q.shape
    kv_heads, size = k.shape[1:3]
    group = heads // kv_heads
    pieces = _pieces(batch * kv_heads, size)
    places = size // pieces
    partial_shape = (batch, kv_heads, pieces, group)

    def at_row(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *block), lambda b, h, p: (b, h, *(0 for _ in block)))

    def at_piece(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *block), lambda b, h, p: (b, h, p, *(0 for _ in block)))

    out, most, total = pl.pallas_call(
        partial(_read_piece, group=group, places=places, scale=head_dim**-0.5),
        grid=(batch, kv_heads, pieces),
        in_specs=[
            pl.BlockSpec((1,), lambda b, h, p: (b,)),
            at_row(group, head_dim),
            at_row(size, head_dim),
            at_row(size, head_dim),
        ],
        out_specs=[at_piece(group, head_dim), at_piece(group), at_piece(group)],
        out_shape=[
            jax.ShapeDtypeStruct((*partial_shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=jax.default_backend() != "gpu",
    )(held.astype(jnp.int32), q.reshape(batch, kv_heads, group, head_dim), k, v)
    return _join(out, most, total).reshape(batch, heads, head_dim).astype(v.dtype)


def _pieces(programs: int, size: int) -> int:
    """As few pieces of a row as keep the chip busy, each of at least two blocks."""
    pieces = 1
    while programs * pieces < PROGRAMS and size % (pieces * 4 * BLOCK) == 0:
        pieces *= 2
    return pieces


def _read_piece(
    held_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    most_ref: Any,
    total_ref: Any,
    *,
    group: int,
    places: int,
    scale: float,
) -> None:
    start = pl.program_id(2) * places
    held = held_ref[0]
    blocks = (jnp.clip(held - start, 0, places) + BLOCK - 1) // BLOCK

    def read(block: Any, carry: Any) -> Any:
        first = start + block * BLOCK
        k = k_ref[pl.ds(first, BLOCK), :].astype(jnp.float32)
        v = v_ref[pl.ds(first, BLOCK), :].astype(jnp.float32)
        there = first + jnp.arange(BLOCK) < held
        return tuple(_add(*state, query, k, v, there) for state, query in zip(carry, queries, strict=True))

    queries = [q_ref[g, :].astype(jnp.float32) * scale for g in range(group)]
    none = (jnp.float32(LOWEST), jnp.float32(0.0), jnp.zeros_like(queries[0]))
    for g, (most, total, out) in enumerate(jax.lax.fori_loop(0, blocks, read, (none,) * group)):
        out_ref[g, :] = out
        most_ref[g] = most
        total_ref[g] = total


def _add(
    most: Array, total: Array, out: Array, query: Array, k: Array, v: Array, there: Array
) -> tuple[Array, ...]:
    """The state of one query after one more block: what was summed is scaled to the new largest score."""
    scores = jnp.where(there, jnp.sum(k * query[None, :], axis=1), LOWEST)
    higher = jnp.maximum(most, jnp.max(scores))
    weights = jnp.where(there, jnp.exp(scores - higher), 0.0)
    old = jnp.exp(most - higher)
    return higher, total * old + jnp.sum(weights), out * old + jnp.sum(weights[:, None] * v, axis=0)


def _join(out: Array, most: Array, total: Array) -> Array:
    """(B, K, P, G, H), (B, K, P, G) twice → (B, K, G, H)."""
    weights = jnp.exp(most - jnp.max(most, axis=2, keepdims=True))
    total = jnp.sum(weights * total, axis=2)
    out = jnp.sum(weights[..., None] * out, axis=2)
    return out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
