"""One-pass GPU kernels for the row-wise work between matmuls: here residual mix + norm, rotary in rotary_kernel.py.

XLA makes two or three kernels of each (statistics first, then the result), so the tensor travels twice. At depth 12
that was 140 of 515 ms a step on an H200. Here a program holds its rows in registers: every input is read once and
every output written once. Kernels are Pallas (Triton); off a GPU they run interpreted, which is how they are tested.

A row of W numbers is held as W/size pieces, `size` the largest power of two that divides W: Triton's shapes are
powers of two, a model's width need not be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bessemer.models.blocks import NORM_EPSILON

MOST_PIECES = 16
WARP_WIDTH = 1536
"""What of a row one warp can hold in registers, 48 numbers a lane of each tensor."""


def suits(width: int) -> bool:
    """Whether a row of this width can be held in a few power-of-two pieces."""
    size = _piece(width)
    return size >= 32 and width // size <= MOST_PIECES


def _piece(width: int) -> int:
    return width & -width


def _warps(width: int) -> int:
    """Warps a program has for its row: a power of two. One row and one warp were the fastest (benchmarks/LOG.md)."""
    return 1 << ((width - 1) // WARP_WIDTH).bit_length()


def call(
    kernel: Callable[..., None],
    inputs: Sequence[Array],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    row_axis: Sequence[int | None],
    *,
    warps: int,
    rows: int = 1,
) -> list[Array]:
    """Run `kernel` on blocks of `rows`, each with so many warps.

    row_axis: for each input, then output, the axis that is cut (None: whole).
    """
    count = next(x.shape[axis] for x, axis in zip(inputs, row_axis, strict=False) if axis is not None)

    def spec(shape: tuple[int, ...], axis: int | None) -> pl.BlockSpec:
        block = tuple(size if axis != i else rows * size // count for i, size in enumerate(shape))
        return pl.BlockSpec(block, lambda i: tuple(i if axis == a else 0 for a in range(len(shape))))

    shapes = [x.shape for x in inputs] + [shape for shape, _ in outputs]
    specs = [spec(shape, axis) for shape, axis in zip(shapes, row_axis, strict=True)]
    return pl.pallas_call(
        kernel,
        grid=(count // rows,),
        in_specs=specs[: len(inputs)],
        out_specs=specs[len(inputs) :],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=jax.default_backend() != "gpu",
    )(*inputs)


def _pieces(width: int) -> list[Any]:
    size = _piece(width)
    return [pl.ds(start, size) for start in range(0, width, size)]


# -- residual mix + norm ---------------------------------------------------------------------------------------------


@jax.custom_vjp
def mix_norm(x: Array, z: Array, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """y = a·x + b·z; (y, norm(y), z). x, z: (M, W); a, b: scalars.

    z is handed on so that its gradient, a sum over all layers that use it, is added up inside the backward kernel.
    """
    return _mix_norm_forward(x, z, a, b)[0]


def _mix_norm_forward(x: Array, z: Array, a: Array, b: Array) -> tuple[tuple[Array, Array, Array], Any]:
    count, width = x.shape
    scalars = jnp.stack([a, b]).astype(jnp.float32)
    outputs = [(x.shape, x.dtype), (x.shape, x.dtype), ((count,), jnp.float32)]
    kernel = functools.partial(_mix_norm_kernel, width=width)
    y, h, r = call(kernel, (scalars, x, z), outputs, (None, 0, 0, 0, 0, 0), warps=_warps(width))
    return (y, h, z), (scalars, x, z, h, r)


def _mix_norm_kernel(
    s_ref: Any, x_ref: Any, z_ref: Any, y_ref: Any, h_ref: Any, r_ref: Any, *, width: int
) -> None:
    a, b = s_ref[0], s_ref[1]
    held = []
    for piece in _pieces(width):
        y = a * x_ref[:, piece].astype(jnp.float32) + b * z_ref[:, piece].astype(jnp.float32)
        held.append(y.astype(y_ref.dtype))
        y_ref[:, piece] = held[-1]
    _write_norm(held, h_ref, r_ref, width)


def _write_norm(held: list[Array], h_ref: Any, r_ref: Any, width: int) -> None:
    wide = [y.astype(jnp.float32) for y in held]
    r = jax.lax.rsqrt(sum(jnp.sum(y * y, axis=1) for y in wide) / width + NORM_EPSILON)
    r_ref[...] = r
    for piece, y in zip(_pieces(width), wide, strict=True):
        h_ref[:, piece] = (y * r[:, None]).astype(h_ref.dtype)


def _mix_norm_backward(
    residuals: Any, cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array, Array]:
    scalars, x, z, h, r = residuals
    count, width = x.shape
    partial = ((count,), jnp.float32)
    kernel = functools.partial(_mix_norm_backward_kernel, width=width)
    dx, dz, da, db = call(
        kernel,
        (scalars, x, z, h, r, *cotangents),
        [(x.shape, x.dtype), (z.shape, z.dtype), partial, partial],
        (None, *(0,) * 11),
        warps=_warps(width),
    )
    return dx, dz, jnp.sum(da), jnp.sum(db)


def _mix_norm_backward_kernel(
    s_ref: Any,
    x_ref: Any,
    z_ref: Any,
    h_ref: Any,
    r_ref: Any,
    gy_ref: Any,
    gh_ref: Any,
    gz_ref: Any,
    dx_ref: Any,
    dz_ref: Any,
    da_ref: Any,
    db_ref: Any,
    *,
    width: int,
) -> None:
    """t = gy + r·(gh − h·mean(gh·h)); dx = a·t, dz = gz + b·t, da = Σ t·x, db = Σ t·z."""
    a, b = s_ref[0], s_ref[1]
    da = db = jnp.float32(0)
    for piece, t in zip(_pieces(width), _norm_totals(h_ref, r_ref, gy_ref, gh_ref, width), strict=True):
        da += jnp.sum(t * x_ref[:, piece].astype(jnp.float32))
        db += jnp.sum(t * z_ref[:, piece].astype(jnp.float32))
        dx_ref[:, piece] = (a * t).astype(dx_ref.dtype)
        dz_ref[:, piece] = (gz_ref[:, piece].astype(jnp.float32) + b * t).astype(dz_ref.dtype)
    da_ref[...] = jnp.full((1,), da)
    db_ref[...] = jnp.full((1,), db)


def _norm_totals(h_ref: Any, r_ref: Any, gy_ref: Any, gh_ref: Any, width: int) -> list[Array]:
    """gy + r·(gh − h·mean(gh·h)), in pieces: the gradient at y of (y, norm y)."""
    h = [h_ref[:, piece].astype(jnp.float32) for piece in _pieces(width)]
    g = [gh_ref[:, piece].astype(jnp.float32) for piece in _pieces(width)]
    products = [jnp.sum(p * q, axis=1) for p, q in zip(h, g, strict=True)]
    r, mean = r_ref[...][:, None], (functools.reduce(jnp.add, products) / width)[:, None]
    return [
        gy_ref[:, piece].astype(jnp.float32) + r * (q - p * mean)
        for piece, p, q in zip(_pieces(width), h, g, strict=True)
    ]


mix_norm.defvjp(_mix_norm_forward, _mix_norm_backward)


@jax.custom_vjp
def add_norm(x: Array, z: Array) -> tuple[Array, Array]:
    """y = x + z; (y, norm(y)). x, z: (M, W)."""
    return _add_norm_forward(x, z)[0]


def _add_norm_forward(x: Array, z: Array) -> tuple[tuple[Array, Array], Any]:
    count, width = x.shape
    outputs = [(x.shape, x.dtype), (x.shape, x.dtype), ((count,), jnp.float32)]
    kernel = functools.partial(_add_norm_kernel, width=width)
    y, h, r = call(kernel, (x, z), outputs, (0,) * 5, warps=_warps(width))
    return (y, h), (h, r)


def _add_norm_kernel(x_ref: Any, z_ref: Any, y_ref: Any, h_ref: Any, r_ref: Any, *, width: int) -> None:
    held = []
    for piece in _pieces(width):
        held.append(
            (x_ref[:, piece].astype(jnp.float32) + z_ref[:, piece].astype(jnp.float32)).astype(y_ref.dtype)
        )
        y_ref[:, piece] = held[-1]
    _write_norm(held, h_ref, r_ref, width)


def _add_norm_backward(residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Array, Array]:
    h, r = residuals
    width = h.shape[1]
    kernel = functools.partial(_add_norm_backward_kernel, width=width)
    (t,) = call(kernel, (h, r, *cotangents), [(h.shape, h.dtype)], (0,) * 5, warps=_warps(width))
    return t, t


def _add_norm_backward_kernel(
    h_ref: Any, r_ref: Any, gy_ref: Any, gh_ref: Any, t_ref: Any, *, width: int
) -> None:
    for piece, t in zip(_pieces(width), _norm_totals(h_ref, r_ref, gy_ref, gh_ref, width), strict=True):
        t_ref[:, piece] = t.astype(t_ref.dtype)


add_norm.defvjp(_add_norm_forward, _add_norm_backward)
