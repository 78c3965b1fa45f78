"""Grouped matrix products for an NVIDIA Hopper GPU (Pallas, Mosaic): rows sorted by group, groups of whole tiles.

    product:          y[i] = x[i] · W[g(i)]                 x: (N, K), W: (E, K, F) → (N, F)
    weight_gradient:  dW[e] = Σ x[i]ᵀ g[i], i of group e    x: (N, K), g: (N, F)    → (E, K, F), float32

Every group has a multiple of ROWS rows (grouped.Order pads them with zeros), so no tile has rows of two groups and
whole tiles are copied. jax's own `ragged_dot_mgpu` takes any sizes, but computes a tile at every boundary twice (as
many FLOPs as the padding), searches a tile's group in unrolled code, and leaves rows beyond the last group unwritten.

Built like relu2_matmul.py: one warpgroup copies blocks into a ring in shared memory, two take turns to multiply and to
write out, and two multiprocessors share the blocks of the second factor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from bessemer.kernels.relu2_matmul import COPIER, WORKERS, Tiles, _emptied, _pieces, _processors, _shared, runs_on

__all__ = ["ROWS", "TILES", "product", "runs_on", "suits", "weight_gradient"]

TILES = Tiles()
ROWS = TILES.m * TILES.cluster
"""The rows of a group are a multiple of this."""
SLOTS = 2  # pieces of a tile on their way out at a time


def suits(rows: int, width: int, hidden: int, dtype: Any) -> bool:
    """Return whether x: (rows, width), W: (E, width, hidden) and the products of both gradients are whole tiles."""
    return dtype == jnp.bfloat16 and not (rows % ROWS or width % TILES.m or hidden % TILES.m)


@functools.partial(jax.jit, static_argnames="tiles")  # compiled once, however many layers there are
def product(x: Array, w: Array, sizes: Array, tiles: Tiles | None = None) -> Array:
    """Return x W by group; rows beyond the last group are zeros. sizes: (E,), multiples of `m · cluster` of `tiles`."""
    (rows, depth), (groups, _, columns), t = x.shape, w.shape, tiles or TILES
    step = t.m * t.cluster
    if rows % step or depth % t.k or columns % t.n:
        raise ValueError(f"a grouped product of {rows}×{depth}×{columns} does not divide into {t}")
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    group = jnp.sum(jnp.arange(rows // step, dtype=jnp.int32)[:, None] * step >= ends, axis=1, dtype=jnp.int32)
    table = jnp.concatenate([ends[-1:] // step, jnp.minimum(group, groups - 1)])
    work = _Rows(t, depth // t.k, columns // t.n, _members(t, rows // step * (columns // t.n)))
    y = _call(work, x, w, table, jax.ShapeDtypeStruct((rows, columns), x.dtype), "grouped_product")
    return jnp.where(jnp.arange(rows)[:, None] < ends[-1], y, 0)  # joins the next elementwise kernel


@functools.partial(jax.jit, static_argnames="tiles")
def weight_gradient(x: Array, g: Array, sizes: Array, tiles: Tiles | None = None) -> Array:
    """Return Σ xᵀ g over the rows of each group. sizes: (E,), multiples of `k` of `tiles`; an empty group has zeros."""
    (rows, width), hidden, groups, t = x.shape, g.shape[1], sizes.shape[0], tiles or TILES
    if t.cluster > 1 and width % (t.m * t.cluster):
        t = replace(t, cluster=1)
    t = replace(t, piece=t.piece // 2)  # of float32
    if rows % t.k or width % (t.m * t.cluster) or hidden % t.n:
        raise ValueError(f"a grouped gradient of {rows}×{width}×{hidden} does not divide into {t}")
    sizes = sizes.astype(jnp.int32)
    table = jnp.concatenate([jnp.cumsum(sizes) - sizes, sizes // t.k])
    across, down = hidden // t.n, width // t.m // t.cluster
    work = _Weights(t, groups, across, down, _members(t, groups * across * down))
    return _call(work, x, g, table, jax.ShapeDtypeStruct((groups, width, hidden), jnp.float32), "grouped_gradient")


def _members(t: Tiles, tiles: int) -> int:
    """Return the clusters of multiprocessors at work."""
    return min(tiles, max(1, _processors() // t.cluster))


def _top(t: Tiles, row: Any) -> Any:
    """Return the first row of this multiprocessor's tile of the cluster's `row`."""
    member = 0 if t.cluster == 1 else lax.axis_index("cluster")
    return (row * t.cluster + member) * t.m


@dataclass(frozen=True)
class _Rows:
    """The tiles of `product`, along the columns first. Table: rows of tiles in use, then the group of each row."""

    t: Tiles
    blocks: int  # of a tile
    columns: int
    members: int
    transposed = False

    def count(self, table: Any) -> Any:
        return table[0] * self.columns

    def depth(self, table: Any, index: Any) -> Any:
        return jnp.int32(self.blocks)

    def factors(self, table: Any, index: Any, x: Any, w: Any) -> Any:
        row, column = lax.div(index, jnp.int32(self.columns)), lax.rem(index, jnp.int32(self.columns))
        top, left, group = _top(self.t, row), column * self.t.n, table[1 + row]

        def block(step: Any) -> tuple[Any, Any]:
            here = pl.ds(step * self.t.k, self.t.k)
            return x.at[pl.ds(top, self.t.m), here], w.at[group, here, pl.ds(left, self.t.n)]

        return block

    def target(self, index: Any, result: Any, piece: int) -> Any:
        row, column = lax.div(index, jnp.int32(self.columns)), lax.rem(index, jnp.int32(self.columns))
        left = column * self.t.n + piece * self.t.piece
        return result.at[pl.ds(_top(self.t, row), self.t.m), pl.ds(left, self.t.piece)]


@dataclass(frozen=True)
class _Weights:
    """The tiles of `weight_gradient`, group by group. Table: first row of each group, then blocks of each group."""

    t: Tiles
    groups: int
    across: int
    down: int
    members: int
    transposed = True

    def count(self, table: Any) -> Any:
        return jnp.int32(self.groups * self.across * self.down)

    def _group(self, index: Any) -> Any:
        return jnp.minimum(lax.div(index, jnp.int32(self.across * self.down)), self.groups - 1)

    def _corner(self, index: Any) -> tuple[Any, Any]:
        inside = lax.rem(index, jnp.int32(self.across * self.down))
        row, column = lax.div(inside, jnp.int32(self.across)), lax.rem(inside, jnp.int32(self.across))
        return _top(self.t, row), column * self.t.n

    def depth(self, table: Any, index: Any) -> Any:
        return table[self.groups + self._group(index)]

    def factors(self, table: Any, index: Any, x: Any, g: Any) -> Any:
        (top, left), first = self._corner(index), table[self._group(index)]

        def block(step: Any) -> tuple[Any, Any]:
            here = pl.ds(pl.multiple_of(first + step * self.t.k, self.t.k), self.t.k)
            return x.at[here, pl.ds(top, self.t.m)], g.at[here, pl.ds(left, self.t.n)]

        return block

    def target(self, index: Any, result: Any, piece: int) -> Any:
        top, left = self._corner(index)
        return result.at[self._group(index), pl.ds(top, self.t.m), pl.ds(left + piece * self.t.piece, self.t.piece)]


def _call(work: Any, x: Array, w: Array, table: Array, out: Any, name: str) -> Array:
    t = work.t
    scratch = {
        "x_ring": _shared((t.stages, t.k, t.m) if work.transposed else (t.stages, t.m, t.k), x.dtype),
        "w_ring": _shared((t.stages, t.k, t.n), w.dtype),
        "out": _shared((WORKERS, SLOTS, t.m, t.piece), out.dtype),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS * t.stages),
        "emptied": _emptied(t),
    }
    return plgpu.kernel(
        functools.partial(_kernel, work=work),
        out_type=out,
        scratch_types=scratch,
        grid=(work.members,),
        grid_names=("group",),
        cluster=(t.cluster,) if t.cluster > 1 else (),
        cluster_names=("cluster",) if t.cluster > 1 else (),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(table, x, w)


def _kernel(
    table: Any, x: Any, w: Any, result: Any, *, x_ring: Any, w_ring: Any, out: Any, filled: Any, emptied: Any, work: Any
) -> None:
    me = lax.axis_index("warpgroup")
    ring = _Ring(work, table, x_ring, w_ring, filled, emptied)

    @pl.when(me == COPIER)
    def _() -> None:
        plgpu.set_max_registers(work.t.copier_registers, action="decrease")
        ring.fill(x, w)

    @pl.when(me != COPIER)
    def _() -> None:
        t = work.t
        plgpu.set_max_registers(t.worker_registers, action="increase")

        def tile(turn: Any, stage: Any) -> Any:
            number = turn * WORKERS + me
            depth = ring.depth(number)
            made = pl.run_scoped(functools.partial(ring.multiply, me, stage, depth), plgpu.ACC((t.m, t.n), jnp.float32))
            for piece, part in enumerate(_pieces(made, t.n // t.piece)):
                slot = out.at[me, piece % SLOTS]
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                slot[...] = part.astype(slot.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, work.target(ring.index(number), result, piece))
            return lax.rem(stage + depth + ring.depth(number + 1), jnp.int32(t.stages))

        turns = lax.div(ring.own() + (WORKERS - 1) - me, jnp.int32(WORKERS))
        lax.fori_loop(0, turns, tile, lax.rem(me * ring.depth(0), jnp.int32(t.stages)))
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Ring:
    """Blocks of both factors in shared memory. Tiles follow one another in it; each has its own number of blocks."""

    work: Any
    table: Any
    x_ring: Any
    w_ring: Any
    filled: Any
    emptied: Any

    def index(self, number: Any) -> Any:
        """Return which tile our tile `number` is."""
        return lax.axis_index("group") + number * self.work.members

    def own(self) -> Any:
        """Return how many tiles we have."""
        rest = self.work.count(self.table) + (self.work.members - 1) - lax.axis_index("group")
        return lax.div(rest, jnp.int32(self.work.members))

    def depth(self, number: Any) -> Any:
        return self.work.depth(self.table, self.index(number))

    def after(self, stage: Any) -> Any:
        return jnp.where(stage == self.work.t.stages - 1, 0, stage + 1)

    def fill(self, x: Any, w: Any) -> None:
        """Copy the blocks of all our tiles, as fast as they are multiplied."""
        stages = self.work.t.stages
        everyone = None if self.work.t.cluster == 1 else "cluster"

        def tile(number: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            copied, first = carry
            factors = self.work.factors(self.table, self.index(number), x, w)
            reader = lax.rem(number, jnp.int32(WORKERS)) * stages
            depth = self.depth(number)

            def block(step: Any, stage: Any) -> Any:
                there = self.filled.at[reader + stage]
                pl.when(copied + step >= stages)(lambda: plgpu.barrier_wait(self.emptied.at[stage]))
                of_x, of_w = factors(step)
                plgpu.copy_gmem_to_smem(of_x, self.x_ring.at[stage], there)
                plgpu.copy_gmem_to_smem(of_w, self.w_ring.at[stage], there, collective_axes=everyone)
                return self.after(stage)

            return copied + depth, lax.fori_loop(0, depth, block, first)

        copied, _ = lax.fori_loop(0, self.own(), tile, (jnp.int32(0), jnp.int32(0)))
        for stage in range(stages):  # a block is not left while a neighbor may still write into it
            pl.when(copied > stage)(functools.partial(plgpu.barrier_wait, self.emptied.at[stage]))

    def multiply(self, me: Any, first: Any, depth: Any, acc: Any) -> Any:
        """Return the product of a tile's blocks: one is multiplied while the one before it is given back."""
        stages = self.work.t.stages

        def begin(stage: Any) -> None:
            plgpu.barrier_wait(self.filled.at[me * stages + stage])
            x = self.x_ring.at[stage]
            plgpu.wgmma(acc, plgpu.transpose_ref(x, (1, 0)) if self.work.transposed else x, self.w_ring.at[stage])

        def block(_: Any, before: Any) -> Any:
            stage = self.after(before)
            begin(stage)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(self.emptied.at[before])
            return stage

        pl.when(depth > 0)(
            lambda: begin(first)
        )  # an empty group has no blocks, and its gradient is what acc began with
        last = lax.fori_loop(1, depth, block, first)
        plgpu.wgmma_wait(0)
        pl.when(depth > 0)(lambda: plgpu.barrier_arrive(self.emptied.at[last]))
        return acc[...]
