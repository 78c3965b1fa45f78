"""Products of the feed-forward with relu² done on the way out, for an NVIDIA Hopper GPU (Pallas, Mosaic).

    up:    y = relu(x W)²                  x: (M, K), W: (K, N)
    back:  d = (g V) · 2√y                 g: (M, K), V: (K, N), y: (M, N); the gradient of the line above at x W,
                                           where V is the transpose of the matrix that y is multiplied with next

As kernels of their own relu² and its gradient move five tensors of tokens × 4 widths, of which four stay on the chip
here.

A multiprocessor runs three warpgroups. One copies blocks of both factors into a ring in shared memory; the other two
take turns: while one multiplies, the other writes out. Two multiprocessors share the blocks of W. How the sizes were
chosen is in benchmarks/LOG.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from bessemer.topology.chips import traced_device

HOPPER = "9.0"
TINY = 1e-30
WORKERS = 2
COPIER = WORKERS  # its index among the warpgroups


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: a tile is m × n, a block in the ring k deep."""

    m: int = 128
    n: int = 128
    k: int = 64
    stages: int = 5  # blocks in the ring
    piece: int = 64  # columns written out at a time; all of a tile have their place, which its y has before
    cluster: int = 2  # multiprocessors that share the blocks of W
    worker_registers: int = 232
    copier_registers: int = 40


TILES = Tiles()


def runs_on(device: Any) -> bool:
    return getattr(device, "compute_capability", None) == HOPPER


def suits(rows: int, width: int, hidden: int) -> bool:
    """Return whether the products of `rows` × width × hidden can be cut into whole tiles."""
    return _divides(TILES, rows, width, hidden)


@functools.partial(jax.jit, static_argnames="tiles")  # compiled once, however many layers there are
def up(x: Array, w: Array, tiles: Tiles | None = None) -> Array:
    """relu(x W)²."""
    return _product(x, w, None, tiles)


@functools.partial(jax.jit, static_argnames="tiles")
def back(g: Array, v: Array, y: Array, tiles: Tiles | None = None) -> Array:
    """(g V) · 2√y."""
    return _product(g, v, y, tiles)


def _divides(t: Tiles, m: int, k: int, n: int) -> bool:
    return not (m % (t.m * t.cluster) or k % t.k or n % t.n)


def _product(x: Array, w: Array, y: Array | None, tiles: Tiles | None) -> Array:
    (m, k), n, t = x.shape, w.shape[1], tiles or TILES
    if not _divides(t, m, k, n):
        raise ValueError(f"a product of {m}×{k}×{n} does not divide into {t}")
    rows, columns = m // t.m // t.cluster, n // t.n
    groups = min(rows * columns, max(1, _processors() // t.cluster))
    deal = _Deal(t, k // t.k, groups, rows * columns, columns)
    scratch = {
        "x_ring": _shared((t.stages, t.m, t.k), x.dtype),
        "w_ring": _shared((t.stages, t.k, t.n), w.dtype),
        "out": _shared((WORKERS, t.n // t.piece, t.m, t.piece), x.dtype),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS * t.stages),
        "emptied": _emptied(t),
        "y_there": plgpu.Barrier(num_arrivals=t.n // t.piece, num_barriers=WORKERS),
    }
    return plgpu.kernel(
        functools.partial(_kernel if y is not None else _kernel_without_y, deal=deal),
        out_type=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_types=scratch,
        grid=(groups,),
        grid_names=("group",),
        cluster=(t.cluster,) if t.cluster > 1 else (),
        cluster_names=("cluster",) if t.cluster > 1 else (),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        kernel_name="relu_squared_product" if y is None else "relu_squared_gradient",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*((x, w) if y is None else (x, w, y)))


def _emptied(t: Tiles) -> Any:
    """Return one barrier per block of the ring; neighbors that share blocks of W wait for each other."""
    if t.cluster == 1:
        return plgpu.Barrier(num_barriers=t.stages)
    return plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=t.stages)


def _processors() -> int:
    return getattr(traced_device(), "core_count", None) or 1


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that the matrix units read and the copy engine writes."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclass(frozen=True)
class _Deal:
    """Which tiles a multiprocessor has. They go round `groups`, whose members have them one below the other."""

    t: Tiles
    depth: int  # blocks of a tile
    groups: int
    tiles: int  # of one member each
    columns: int

    def own(self) -> Any:
        """Return how many tiles we have."""
        return lax.div(self.tiles - 1 - lax.axis_index("group"), jnp.int32(self.groups)) + 1

    def corner(self, number: Any) -> tuple[Any, Any]:
        """First row and column of our tile `number`; along the columns first: x is then read once."""
        member = 0 if self.t.cluster == 1 else lax.axis_index("cluster")
        index = lax.axis_index("group") + number * self.groups
        row = lax.div(index, jnp.int32(self.columns)) * self.t.cluster + member
        return row * self.t.m, lax.rem(index, jnp.int32(self.columns)) * self.t.n

    def start(self, number: Any) -> Any:
        """Return where in the ring the first block of a tile lies."""
        return lax.rem(number * self.depth, jnp.int32(self.t.stages))

    def after(self, stage: Any) -> Any:
        return jnp.where(stage == self.t.stages - 1, 0, stage + 1)


def _kernel_without_y(x: Any, w: Any, result: Any, **given: Any) -> None:
    _kernel(x, w, None, result, **given)


def _kernel(
    x: Any,
    w: Any,
    y: Any,
    result: Any,
    *,
    x_ring: Any,
    w_ring: Any,
    out: Any,
    filled: Any,
    emptied: Any,
    y_there: Any,
    deal: _Deal,
) -> None:
    me = lax.axis_index("warpgroup")

    @pl.when(me == COPIER)
    def _() -> None:
        _copy(deal, (x, w), (x_ring, w_ring), filled, emptied)

    @pl.when(me != COPIER)
    def _() -> None:
        t = deal.t
        plgpu.set_max_registers(t.worker_registers, action="increase")

        def tile(turn: Any, _: None) -> None:
            number = turn * WORKERS + me
            top, left = deal.corner(number)
            places = [(pl.ds(top, t.m), pl.ds(left + i * t.piece, t.piece)) for i in range(t.n // t.piece)]
            if y is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was written out last
                for i, place in enumerate(places):
                    plgpu.copy_gmem_to_smem(y.at[place], out.at[me, i], y_there.at[me])
            multiply = functools.partial(_multiply, deal, number, me, (x_ring, w_ring), filled, emptied)
            product = pl.run_scoped(multiply, plgpu.ACC((t.m, t.n), jnp.float32))
            if y is None:
                _write_squares(product, out.at[me], result, places)
            else:
                plgpu.barrier_wait(y_there.at[me])
                _write_gradient(product, out.at[me], result, places)

        lax.fori_loop(0, lax.div(deal.own() + (WORKERS - 1) - me, jnp.int32(WORKERS)), tile, None)
        plgpu.wait_smem_to_gmem(0)


def _copy(deal: _Deal, factors: tuple[Any, Any], rings: tuple[Any, Any], filled: Any, emptied: Any) -> None:
    """Blocks of both factors into the ring, as fast as they are multiplied."""
    t, (x, w), (x_ring, w_ring) = deal.t, factors, rings
    plgpu.set_max_registers(t.copier_registers, action="decrease")
    own = deal.own()

    def tile(number: Any, _: None) -> None:
        top, left = deal.corner(number)
        reader = lax.rem(number, jnp.int32(WORKERS)) * t.stages

        def block(step: Any, stage: Any) -> Any:
            here, there = pl.ds(step * t.k, t.k), filled.at[reader + stage]
            pl.when(number * deal.depth + step >= t.stages)(lambda: plgpu.barrier_wait(emptied.at[stage]))
            plgpu.copy_gmem_to_smem(x.at[pl.ds(top, t.m), here], x_ring.at[stage], there)
            everyone = None if t.cluster == 1 else "cluster"
            plgpu.copy_gmem_to_smem(w.at[here, pl.ds(left, t.n)], w_ring.at[stage], there, collective_axes=everyone)
            return deal.after(stage)

        lax.fori_loop(0, deal.depth, block, deal.start(number))

    lax.fori_loop(0, own, tile, None)
    for stage in range(t.stages):  # a block is not left while a neighbor may still write into it
        pl.when(own * deal.depth > stage)(functools.partial(plgpu.barrier_wait, emptied.at[stage]))


def _multiply(deal: _Deal, number: Any, me: Any, rings: tuple[Any, Any], filled: Any, emptied: Any, acc: Any) -> Any:
    """Return the product of tile `number`: a block is multiplied while the one before it is given back."""
    x_ring, w_ring = rings

    def begin(stage: Any) -> None:
        plgpu.barrier_wait(filled.at[me * deal.t.stages + stage])
        plgpu.wgmma(acc, x_ring.at[stage], w_ring.at[stage])

    def block(_: Any, before: Any) -> Any:
        stage = deal.after(before)
        begin(stage)
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(emptied.at[before])
        return stage

    stage = deal.start(number)
    begin(stage)
    stage = lax.fori_loop(1, deal.depth, block, stage)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(emptied.at[stage])
    return acc[...]


def _write_squares(product: Any, slots: Any, result: Any, places: list[Any]) -> None:
    """relu(product)², a piece on its way while the next is made."""
    for i, (place, part) in enumerate(zip(places, _pieces(product, len(places)), strict=True)):
        part = jnp.maximum(part, 0)
        plgpu.wait_smem_to_gmem(len(places) - 1, wait_read_only=True)
        _send(part * part, slots.at[i], result.at[place])


def _write_gradient(product: Any, slots: Any, result: Any, places: list[Any]) -> None:
    """product · 2√y, where y lies in the slots."""
    for i, (place, part) in enumerate(zip(places, _pieces(product, len(places)), strict=True)):
        y = slots.at[i][...].astype(jnp.float32)
        _send(part * (2 * y * lax.rsqrt(jnp.maximum(y, TINY))), slots.at[i], result.at[place])  # 0 stays 0


def _pieces(product: Any, count: int) -> list[Any]:
    size = product.shape[1] // count
    return [product[:, i * size : (i + 1) * size] for i in range(count)]


def _send(part: Any, slot: Any, target: Any) -> None:
    slot[...] = part.astype(slot.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slot, target)
