"""A decode step of attention in one kernel: one query a row against its cache, which takes the row's new key and value.

    out = Σ softmax(q·k_s / √H) v_s   over the places s that row b holds, the new one among them

What is read follows the rows' lengths, not the capacity. A row is cut into pieces that run side by side, each with its
own largest score m, Σ e^(s − m) and Σ e^(s − m) v; they are joined afterwards (Dao et al. 2023, flash decoding).
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bessemer.topology.chips import backend

BLOCK = 64
"""Places read at once: 16 KiB of keys in bf16 at head dimension 128."""
PROGRAMS = 1024
"""Pieces that keep an H200 busy: a few for each of its 132 processors."""
WARPS, STAGES = 2, 3
TILE = 16
"""Rows of a matrix unit's product: the queries that share a key-value head, and nothing."""
LOWEST = -1e30  # of no place at all: its weight in the join is 0, and never 0/0


def suits_decode(head_dim: int, group: int) -> bool:
    """Whether a head is a power of two, as the kernel's shapes are, and the queries of a key-value head fit a tile."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0 and group <= TILE


@jax.jit  # traced and lowered once for all layers
def decode_attention(
    q: Array, k: Array, v: Array, keys: Array, values: Array, lengths: Array, added: Array
) -> tuple[Array, Array, Array]:
    """(out (B, N, H), keys, values). q: (B, N, H); k, v: (B, K, H), the new token of the rows whose `added` (B,) is 1;
    keys, values: (B, K, S, H), where the token at position p lies at p mod S; lengths: (B,) tokens so far.

    A row that holds nothing gives zeros.
    """
    batch, heads, head_dim = q.shape
    kv_heads, size = keys.shape[1:3]
    group = heads // kv_heads
    places = _places(batch * kv_heads, size)
    pieces = -(-size // places)
    partial_shape = (batch, kv_heads, pieces, group)

    def at_row(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *block), lambda b, h, p: (b, h, *(0 for _ in block)))

    def at_piece(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *block), lambda b, h, p: (b, h, p, *(0 for _ in block)))

    one = pl.BlockSpec((1,), lambda b, h, p: (b,))
    store = at_row(size, head_dim)
    out, most, total, keys, values = pl.pallas_call(
        partial(_read_piece, group=group, places=places, size=size, scale=head_dim**-0.5),
        grid=(batch, kv_heads, pieces),
        in_specs=[one, one, at_row(group, head_dim), at_row(head_dim), at_row(head_dim), store, store],
        out_specs=[at_piece(group, head_dim), at_piece(group), at_piece(group), store, store],
        out_shape=[
            jax.ShapeDtypeStruct((*partial_shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        input_output_aliases={5: 3, 6: 4},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=backend() != "gpu",
    )(
        lengths.astype(jnp.int32),
        added.astype(jnp.int32),
        q.astype(keys.dtype).reshape(batch, kv_heads, group, head_dim),
        k.astype(keys.dtype),
        v.astype(values.dtype),
        keys,
        values,
    )
    return _join(out, most, total).reshape(batch, heads, head_dim).astype(v.dtype), keys, values


def _places(programs: int, size: int) -> int:
    """Places of a piece: as many as leave the chip busy, in whole blocks."""
    pieces = max(1, PROGRAMS // programs)
    return max(1, -(-size // (pieces * BLOCK))) * BLOCK


def _read_piece(*refs: Any, group: int, places: int, size: int, scale: float) -> None:
    """The new token is read from where it comes from, by the first piece, which also writes it: no piece waits."""
    lengths_ref, added_ref, q_ref, k_ref, v_ref, *_unread, out_ref, most_ref, total_ref, keys_ref, values_ref = refs
    piece = pl.program_id(2)
    length, added = lengths_ref[0], added_ref[0]
    place = length % size
    held = jnp.minimum(length + added, size)
    start = piece * places
    row = jnp.arange(TILE)
    nothing = jnp.zeros((TILE, q_ref.shape[1]), q_ref.dtype)
    q = reduce(lambda tile, g: jnp.where(row[:, None] == g, q_ref[g, :][None, :], tile), range(group), nothing)

    def read(block: Any, state: Any) -> Any:
        at = start + block * BLOCK + jnp.arange(BLOCK)
        there = (at < held) & ((at != place) | (added == 0))
        k, v = (
            plgpu.load(ref.at[pl.ds(start + block * BLOCK, BLOCK), :], mask=there[:, None], other=0.0)
            for ref in (keys_ref, values_ref)
        )
        return _add(state, jnp.where(there[None, :], scale * _product(q, k.T), LOWEST), v)

    mine = (piece == 0) & (added > 0)
    own = scale * jnp.sum(q.astype(jnp.float32) * k_ref[...].astype(jnp.float32)[None, :], axis=1)
    value = jnp.where(mine, v_ref[...].astype(jnp.float32), 0.0)
    state = (
        jnp.where(mine, own, LOWEST),
        jnp.where(mine, jnp.ones_like(own), 0.0),
        jnp.broadcast_to(value[None, :], q.shape),
    )
    blocks = (jnp.clip(held - start, 0, places) + BLOCK - 1) // BLOCK
    most, total, out = jax.lax.fori_loop(0, blocks, read, state)
    for g in range(group):
        out_ref[g, :] = jnp.sum(jnp.where(row[:, None] == g, out, 0.0), axis=0)
        most_ref[g] = jnp.sum(jnp.where(row == g, most, 0.0))
        total_ref[g] = jnp.sum(jnp.where(row == g, total, 0.0))

    @pl.when(mine)
    def _() -> None:
        keys_ref[place, :] = k_ref[...]
        values_ref[place, :] = v_ref[...]


def _add(state: tuple[Array, Array, Array], scores: Array, v: Array) -> tuple[Array, Array, Array]:
    """The state after one more block: what was summed is scaled to the new largest score. scores: (TILE, BLOCK)."""
    most, total, out = state
    higher = jnp.maximum(most, jnp.max(scores, axis=1))
    # a block of nothing in a piece of nothing: e^0 a place, which the join weighs with e^(LOWEST − m) = 0
    weights = jnp.exp(scores - higher[:, None])
    old = jnp.exp(most - higher)
    out = out * old[:, None] + _product(weights.astype(v.dtype), v)
    return higher, total * old + jnp.sum(weights, axis=1), out


def _product(a: Array, b: Array) -> Array:
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=exact, preferred_element_type=jnp.float32)


def _join(out: Array, most: Array, total: Array) -> Array:
    """(B, K, P, G, H), (B, K, P, G) twice → (B, K, G, H)."""
    weights = jnp.exp(most - jnp.max(most, axis=2, keepdims=True))
    total = jnp.sum(weights * total, axis=2)
    out = jnp.sum(weights[..., None] * out, axis=2)
    return out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
