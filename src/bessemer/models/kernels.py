"""One-pass GPU kernels for the row-wise work between matmuls: residual mix + norm, rotary + norm of queries and keys.

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

NORM_EPSILON = 1e-6
ROWS = 4  # rows a program holds; a multiple of it is not needed, but a batch has one
WARPS = 4
MOST_PIECES = 16


def suits(width: int) -> bool:
    """Whether a row of this width can be held in a few power-of-two pieces."""
    size = _piece(width)
    return size >= 32 and width // size <= MOST_PIECES


def _piece(width: int) -> int:
    return width & -width


def _rows(count: int) -> int:
    return min(ROWS, count & -count)


def _call(
    kernel: Callable[..., None],
    inputs: Sequence[Array],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    rows: int,
    row_axis: Sequence[int | None],
) -> list[Array]:
    """Run `kernel` on blocks of rows. row_axis: for each input, then output, the axis that is cut (None: whole)."""
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
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
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
    y, h, r = _call(kernel, (scalars, x, z), outputs, _rows(count), (None, 0, 0, 0, 0, 0))
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
    rows = _rows(count)
    partial = ((count // rows,), jnp.float32)
    kernel = functools.partial(_mix_norm_backward_kernel, width=width)
    dx, dz, da, db = _call(
        kernel,
        (scalars, x, z, h, r, *cotangents),
        [(x.shape, x.dtype), (z.shape, z.dtype), partial, partial],
        rows,
        (None, *(0,) * 11),
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
    y, h, r = _call(kernel, (x, z), outputs, _rows(count), (0,) * 5)
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
    count, width = h.shape
    kernel = functools.partial(_add_norm_backward_kernel, width=width)
    (t,) = _call(kernel, (h, r, *cotangents), [(h.shape, h.dtype)], _rows(count), (0,) * 5)
    return t, t


def _add_norm_backward_kernel(
    h_ref: Any, r_ref: Any, gy_ref: Any, gh_ref: Any, t_ref: Any, *, width: int
) -> None:
    for piece, t in zip(_pieces(width), _norm_totals(h_ref, r_ref, gy_ref, gh_ref, width), strict=True):
        t_ref[:, piece] = t.astype(t_ref.dtype)


add_norm.defvjp(_add_norm_forward, _add_norm_backward)


# -- rotary + norm of queries and keys -------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def rotate_norm(
    packed: Array, cos: Array, sin: Array, heads: int, kv_heads: int, scale: float
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of packed projections: q, k = scale · norm(rotate(·)) of each head, v as it is.

    packed: (M, (N + 2K)·H), queries first; cos, sin: (M, H/2) float32 → (M, N·H), (M, K·H), (M, K·H). Packed, because
    one wide matmul makes it, and one takes its gradient back.
    """
    return _rotate_norm_forward(packed, cos, sin, heads, kv_heads, scale)[0]


def _rotate_norm_forward(
    packed: Array, cos: Array, sin: Array, heads: int, kv_heads: int, scale: float
) -> tuple[tuple[Array, Array, Array], Any]:
    count, half = cos.shape
    widths = [2 * half * n for n in (heads, kv_heads)]
    kernel = functools.partial(_rotate_norm_kernel, heads=heads, kv_heads=kv_heads, half=half, scale=scale)
    outputs = [((count, width), packed.dtype) for width in widths]
    outputs.append(((heads + kv_heads, count), jnp.float32))
    q, k, r = _call(kernel, (packed, cos, sin), outputs, _rows(count), (0, 0, 0, 0, 0, 1))
    return (q, k, packed[:, sum(widths) :]), (q, k, r, cos, sin)


def _halves(head: int, half: int) -> tuple[Any, Any]:
    return pl.ds(2 * head * half, half), pl.ds((2 * head + 1) * half, half)


def _rotate_norm_kernel(
    packed_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    q_ref: Any,
    k_ref: Any,
    r_ref: Any,
    *,
    heads: int,
    kv_heads: int,
    half: int,
    scale: float,
) -> None:
    cos, sin = cos_ref[...], sin_ref[...]
    for head in range(heads + kv_heads):
        low, high = _halves(head, half)
        p, q = packed_ref[:, low].astype(jnp.float32), packed_ref[:, high].astype(jnp.float32)
        p, q = p * cos + q * sin, q * cos - p * sin
        r = jax.lax.rsqrt((jnp.sum(p * p, axis=1) + jnp.sum(q * q, axis=1)) / (2 * half) + NORM_EPSILON)
        r_ref[head, :] = r
        y_ref, own = (q_ref, head) if head < heads else (k_ref, head - heads)
        low, high = _halves(own, half)
        y_ref[:, low] = (scale * p * r[:, None]).astype(y_ref.dtype)
        y_ref[:, high] = (scale * q * r[:, None]).astype(y_ref.dtype)


def _rotate_norm_backward(
    heads: int, kv_heads: int, scale: float, residuals: Any, cotangents: tuple[Array, Array, Array]
) -> tuple[Array, None, None]:
    q, k, r, cos, sin = residuals
    count, half = cos.shape
    kernel = functools.partial(
        _rotate_norm_backward_kernel, heads=heads, kv_heads=kv_heads, half=half, scale=scale
    )
    inputs = (q, k, *cotangents, cos, sin, r)
    shape = (count, 2 * half * (heads + 2 * kv_heads))
    (gradient,) = _call(kernel, inputs, [(shape, q.dtype)], _rows(count), (0, 0, 0, 0, 0, 0, 0, 1, 0))
    return gradient, None, None


def _rotate_norm_backward_kernel(
    q_ref: Any,
    k_ref: Any,
    gq_ref: Any,
    gk_ref: Any,
    gv_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    r_ref: Any,
    out_ref: Any,
    *,
    heads: int,
    kv_heads: int,
    half: int,
    scale: float,
) -> None:
    """With u = y/scale: t = scale·r·(g − u·mean(g·u)), turned back by the angle; v's gradient as it is."""
    cos, sin = cos_ref[...], sin_ref[...]
    for head in range(heads + kv_heads):
        y_ref, g_ref, own = (q_ref, gq_ref, head) if head < heads else (k_ref, gk_ref, head - heads)
        low, high = _halves(own, half)
        u, v = y_ref[:, low].astype(jnp.float32) / scale, y_ref[:, high].astype(jnp.float32) / scale
        p, q = g_ref[:, low].astype(jnp.float32), g_ref[:, high].astype(jnp.float32)
        mean = ((jnp.sum(p * u, axis=1) + jnp.sum(q * v, axis=1)) / (2 * half))[:, None]
        r = (scale * r_ref[head, :])[:, None]
        p, q = r * (p - u * mean), r * (q - v * mean)
        low, high = _halves(head, half)
        out_ref[:, low] = (p * cos - q * sin).astype(out_ref.dtype)
        out_ref[:, high] = (q * cos + p * sin).astype(out_ref.dtype)
    for head in range(kv_heads):
        for source, target in zip(_halves(head, half), _halves(heads + kv_heads + head, half), strict=True):
            out_ref[:, target] = gv_ref[:, source]


rotate_norm.defvjp(_rotate_norm_forward, _rotate_norm_backward)
