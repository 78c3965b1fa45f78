"""How the losses cut their rows into tiles, so that only one tile of logits is held."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.models.axes import shards
from bessemer.topology.backend import backend

# Logits held at once. On accelerators 128 MiB in float32. On a CPU a tile that stays in its cache is faster (148 ms
# against 236 ms for 4,096 tokens × 4,096), as long as it has rows enough to pay for adding up dW once a tile.
TILE = 2**25
# One kernel makes the gradient in place of bf16 logits: a tile of 512 MiB, and matmuls 15% faster than at 2**25.
KERNEL_TILE = 2**28
CPU_TILE, CPU_ROWS = 2**20, 256


def choose_chunks(chunks: int | str, batch: int, length: int, vocab: int, tile: int | None = None) -> int:
    """How many pieces to cut the sequence into: an explicit number, or tiles of about `tile` (TILE) logits a device.

    A number that divides a device's piece of the sequence is preferred to a slightly smaller one that needs padding.
    """
    if chunks != "auto":
        return max(1, min(int(chunks), length))
    share = shards("batch") * shards("sequence") * shards("vocab")
    if tile is None:
        tile = max(CPU_TILE, CPU_ROWS * vocab) if backend() == "cpu" else TILE
    needed = max(1, min(-(-batch * length * vocab // (share * tile)), length))
    pieces = shards("sequence")
    return next((c for c in range(needed, min(2 * needed, length) + 1) if length % (c * pieces) == 0), needed)


def row_groups(batch: int, length: int) -> tuple[int, int]:
    """Into how many parts devices split the rows and the positions of a chunk; 1 where they do not divide."""
    counts = (shards("batch"), shards("sequence"))
    rows, positions = (n if size % n == 0 else 1 for size, n in zip((batch, length), counts, strict=True))
    return rows, positions


def split(x: Array, chunks: int, fill: float = 0) -> Array:
    """(B, T, …) → (chunks, B, T/chunks, …), padded with `fill`.

    A chunk takes every chunks-th position: a sequence axis split over devices stays split within each chunk. One
    row alone (see cross_entropy) is cut into consecutive pieces.
    """
    length = -(-x.shape[1] // chunks) * chunks
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    if x.shape[0] == 1 and shards("sequence") == 1:
        return x.reshape(chunks, 1, length // chunks, *x.shape[2:])
    return jnp.moveaxis(x.reshape(x.shape[0], length // chunks, chunks, *x.shape[2:]), 2, 0)


def join(x: Array) -> Array:
    """The inverse of `split`, padding kept: (chunks, B, t, …) → (B, t·chunks, …)."""
    if x.shape[1] == 1 and shards("sequence") == 1:
        return x.reshape(1, -1, *x.shape[3:])
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def scan_tiles(tile: Any, start: Any, pieces: tuple[Array, ...], chunks: int) -> tuple[Any, Any]:
    """lax.scan, without the loop when there is one chunk."""
    if chunks > 1:
        return jax.lax.scan(tile, start, pieces)
    carry, out = tile(start, tuple(x[0] for x in pieces))
    return carry, None if out is None else out[None]
