"""Attention on a mesh: what each device attends with, when heads, batch and above all the sequence are split.

Two ways for a sequence in c equal pieces, both with two rounds of communication a layer and the pieces back at the end:

    heads   all-to-all: each device trades its piece of all heads for the whole sequence of 1/c of them, attends as one
            device would, and trades back. Any kernel, the same work everywhere. Needs c to divide the key-value heads.
    keys    every device keeps its queries and fetches the keys and values that they can see: all of them by an
            all-gather, or with a window those of the neighbours before it. The last device has most to do: the first
            one's keys beyond its own are masked, and nobody ends before the last.

Elsewhere in a layer every position is by itself, and stays on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from bessemer.models.axes import mesh_axes, rule_axes

ABSENT = np.iinfo(np.int32).min  # the segment of a key that does not exist: before the start of the sequence
Kernel = Callable[[Array, Array, Array, Array | None, Array | None], Array]  # of q, k, v, ids of q, ids of k


@dataclass(frozen=True)
class Layout:
    """Mesh axes that split each axis of queries (B, T, N, H); `kv`: those of the key heads; c: pieces of a sequence."""

    batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    pieces: int = 1
    way: str = "none"  # or "heads", "keys"

    def queries(self, length: int) -> int:
        """Queries a kernel sees at once."""
        return length // self.pieces if self.way == "keys" else length

    def describe(self) -> str:
        """What a reader of the start of a run should know; nothing where sequences are whole."""
        if self.way == "none":
            return ""
        how = {"heads": "whole sequences of some heads a device", "keys": "keys and values gathered"}
        return f", sequences in {self.pieces} pieces: {how[self.way]}"


def layout_of(q: tuple[int, ...], k: tuple[int, ...]) -> Layout:
    """How the ambient rules lay out queries and keys of these shapes, (B, T, N, H) and (B, T, K, H)."""
    mesh = jax.sharding.get_abstract_mesh()
    sequence, heads = mesh_axes("sequence", q[1]), mesh_axes("heads", q[2])
    kv = mesh_axes("kv", k[2]) if heads else ()
    pieces = math.prod(mesh.shape[axis] for axis in sequence)
    own = k[2] // math.prod(mesh.shape[axis] for axis in kv)
    if heads and not kv:  # see _own_heads: one key head for each query head
        own = q[2] // math.prod(mesh.shape[axis] for axis in heads)
    way = "none" if pieces == 1 else "heads" if own % pieces == 0 else "keys"
    return Layout(mesh_axes("batch", q[0]), sequence, heads, kv, pieces, way)


def on_devices(
    kernel: Kernel,
    layout: Layout,
    q: Array,
    k: Array,
    v: Array,
    window: int | None,
    segment_ids: Array | None,
    *,
    whole: bool,
) -> Array:
    """`kernel` on every device's share. whole: XLA can divide the kernel by itself where no sequence is split."""
    alone = not (layout.batch or layout.sequence or layout.heads)
    if alone or (whole and layout.way == "none"):
        return kernel(q, k, v, segment_ids, segment_ids)

    def local(q: Array, k: Array, v: Array, ids: Array | None = None) -> Array:
        if layout.heads and not layout.kv:
            k, v = _own_heads(layout, q, k, v)
        if layout.way == "none":
            return kernel(q, k, v, ids, ids)
        attend = _by_heads if layout.way == "heads" else _by_keys
        return attend(kernel, layout, q, k, v, window, ids)

    tokens = rule_axes("batch", q.shape[0]), rule_axes("sequence", q.shape[1])
    queries = PartitionSpec(*tokens, rule_axes("heads", q.shape[2]))
    keys = PartitionSpec(*tokens, rule_axes("kv", k.shape[2]) if layout.kv or not layout.heads else None)
    arrays = (q, k, v) if segment_ids is None else (q, k, v, segment_ids)
    specs = (queries, keys, keys, PartitionSpec(*tokens))[: len(arrays)]
    return jax.shard_map(local, in_specs=specs, out_specs=queries, check_vma=False)(*arrays)


def _own_heads(layout: Layout, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """The key head of each query head here, where the mesh splits the queries' heads and cannot split the keys'."""
    own, total = q.shape[2], q.shape[2] * jax.lax.axis_size(layout.heads)
    first = jax.lax.axis_index(layout.heads) * own
    heads = (first + jnp.arange(own)) // (total // k.shape[2])
    return jnp.take(k, heads, axis=2), jnp.take(v, heads, axis=2)


def _by_heads(
    kernel: Kernel, layout: Layout, q: Array, k: Array, v: Array, window: int | None, ids: Array | None
) -> Array:
    """Pieces of all heads for whole sequences of some; ids travel whole."""
    axes = layout.sequence
    q, k, v = (jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v))
    if ids is not None:
        ids = jax.lax.all_gather(ids, axes, axis=1, tiled=True)
    out = kernel(q, k, v, ids, ids)
    return jax.lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)


def _by_keys(
    kernel: Kernel, layout: Layout, q: Array, k: Array, v: Array, window: int | None, ids: Array | None
) -> Array:
    """Own queries against the keys of this piece and of those before it, as far as the window reaches."""
    axes, pieces, length = layout.sequence, layout.pieces, q.shape[1]
    reach = pieces if window is None else min(pieces, 1 + -(-(window - 1) // length))
    piece = jax.lax.axis_index(axes)

    def seen(x: Array) -> Array:
        """(B, reach·t, …): pieces i−reach+1 … i; before the first piece come others, which are masked."""
        if reach == pieces:
            everything = jax.lax.all_gather(x, axes, axis=1, tiled=True)
            return jnp.roll(everything, -(piece + 1) * length, axis=1)
        back = [[(i, (i + step) % pieces) for i in range(pieces)] for step in range(reach - 1, 0, -1)]
        return jnp.concatenate([*(jax.lax.ppermute(x, axes, pairs) for pairs in back), x], axis=1)

    k, v = jnp.split(seen(jnp.concatenate([k, v], axis=2)), 2, axis=2)  # one collective for both
    place = piece * length + jnp.arange((1 - reach) * length, length)
    own = jnp.zeros(q.shape[:2], jnp.int32) if ids is None else ids
    k_ids = jnp.zeros(k.shape[:2], jnp.int32) if ids is None else seen(ids)
    return kernel(q, k, v, own, jnp.where(place < 0, ABSENT, k_ids))
