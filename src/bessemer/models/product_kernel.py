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
    """Whether the products of `rows` × width × hidden can be cut into whole tiles."""
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
    kernel = functools.partial(
        _kernel, t=t, depth=k // t.k, groups=groups, tiles=rows * columns, columns=columns
    )
    scratch = {
        "x_ring": _shared((t.stages, t.m, t.k), x.dtype),
        "w_ring": _shared((t.stages, t.k, t.n), w.dtype),
        "out": _shared((WORKERS, t.n // t.piece, t.m, t.piece), x.dtype),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS * t.stages),
        "emptied": _emptied(t),
        "y_there": plgpu.Barrier(num_arrivals=t.n // t.piece, num_barriers=WORKERS),
    }
    return plgpu.kernel(
        kernel if y is not None else functools.partial(_without_y, kernel),
        out_type=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_types=scratch,
        grid=(groups,),
        grid_names=("group",),
        cluster=(t.cluster,) if t.cluster > 1 else (),
        cluster_names=("cluster",) if t.cluster > 1 else (),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        kernel_name="relu_squared_product" if y is None else "relu_squared_gradient",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*((x, w) if y is None else (x, w, y)))


def _emptied(t: Tiles) -> Any:
    """A barrier a block of the ring; neighbours that share blocks of W wait for each other."""
    if t.cluster == 1:
        return plgpu.Barrier(num_barriers=t.stages)
    return plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=t.stages)


def _processors() -> int:
    return getattr(jax.devices()[0], "core_count", None) or 1


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that the matrix units read and the copy engine writes."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _without_y(kernel: Any, x: Any, w: Any, result: Any, **scratch: Any) -> None:
    kernel(x, w, None, result, **scratch)


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
    t: Tiles,
    depth: int,
    groups: int,
    tiles: int,
    columns: int,
) -> None:
    """The tiles are dealt out to `groups` of multiprocessors; the members of a group have them one below the other."""
    group, member = lax.axis_index("group"), 0 if t.cluster == 1 else lax.axis_index("cluster")
    me = lax.axis_index("warpgroup")
    own = lax.div(tiles - 1 - group, jnp.int32(groups)) + 1

    def start(number: Any) -> Any:
        """Where in the ring the first block of a tile lies."""
        return lax.rem(number * depth, jnp.int32(t.stages))

    def after(stage: Any) -> Any:
        return jnp.where(stage == t.stages - 1, 0, stage + 1)

    def corner(number: Any) -> tuple[Any, Any]:
        """First row and column of our tile `number`; along the columns first: x is then read once."""
        index = group + number * groups
        row = lax.div(index, jnp.int32(columns)) * t.cluster + member
        return row * t.m, lax.rem(index, jnp.int32(columns)) * t.n

    @pl.when(me == COPIER)
    def copy() -> None:
        plgpu.set_max_registers(t.copier_registers, action="decrease")

        def tile(number: Any, _: None) -> None:
            top, left = corner(number)
            reader = lax.rem(number, jnp.int32(WORKERS)) * t.stages

            def block(step: Any, stage: Any) -> Any:
                here, there = pl.ds(step * t.k, t.k), filled.at[reader + stage]
                pl.when(number * depth + step >= t.stages)(lambda: plgpu.barrier_wait(emptied.at[stage]))
                plgpu.copy_gmem_to_smem(x.at[pl.ds(top, t.m), here], x_ring.at[stage], there)
                everyone = None if t.cluster == 1 else "cluster"
                plgpu.copy_gmem_to_smem(
                    w.at[here, pl.ds(left, t.n)], w_ring.at[stage], there, collective_axes=everyone
                )
                return after(stage)

            lax.fori_loop(0, depth, block, start(number))

        lax.fori_loop(0, own, tile, None)
        for stage in range(t.stages):  # a block is not left while a neighbour may still write into it
            plgpu.barrier_wait(emptied.at[stage])

    @pl.when(me != COPIER)
    def work() -> None:
        plgpu.set_max_registers(t.worker_registers, action="increase")
        mine = lax.div(own + (WORKERS - 1) - me, jnp.int32(WORKERS))

        def multiply(number: Any, acc: Any) -> Any:
            def begin(stage: Any) -> None:
                plgpu.barrier_wait(filled.at[me * t.stages + stage])
                plgpu.wgmma(acc, x_ring.at[stage], w_ring.at[stage])

            def block(_: Any, before: Any) -> Any:
                stage = after(before)
                begin(stage)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(emptied.at[before])
                return stage

            stage = start(number)
            begin(stage)
            stage = lax.fori_loop(1, depth, block, stage)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(emptied.at[stage])
            return acc[...]

        def tile(turn: Any, _: None) -> None:
            number = turn * WORKERS + me
            top, left = corner(number)
            across = pl.ds(top, t.m)
            pieces = [pl.ds(left + i * t.piece, t.piece) for i in range(t.n // t.piece)]
            if y is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was written out last
                for i, piece in enumerate(pieces):
                    plgpu.copy_gmem_to_smem(y.at[across, piece], out.at[me, i], y_there.at[me])
            product = pl.run_scoped(functools.partial(multiply, number), plgpu.ACC((t.m, t.n), jnp.float32))
            if y is not None:
                plgpu.barrier_wait(y_there.at[me])
            for i, piece in enumerate(pieces):
                part, slot = product[:, i * t.piece : (i + 1) * t.piece], out.at[me, i]
                if y is None:
                    part = jnp.maximum(part, 0)
                    part = part * part
                    plgpu.wait_smem_to_gmem(len(pieces) - 1, wait_read_only=True)
                else:
                    was = slot[...].astype(jnp.float32)
                    part = part * (2 * was * lax.rsqrt(jnp.maximum(was, TINY)))  # 0 stays 0
                slot[...] = part.astype(out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, result.at[across, piece])

        lax.fori_loop(0, mine, tile, None)
        plgpu.wait_smem_to_gmem(0)
