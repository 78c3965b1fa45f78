"""One-pass GPU kernels for the row-wise work between matmuls: residual mix + norm, rotary + norm.

XLA makes two or three kernels of each, so the tensor travels twice: 140 of 515 ms per step at depth 12 on an H200. Here
a program holds its rows in registers and reads and writes everything once. Kernels are Pallas (Triton); off a GPU they
run interpreted, which is how they are tested. A row of W numbers is held in W/size pieces, `size` the largest power of
two that divides W, as Triton's shapes are powers of two.
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
from jax.sharding import PartitionSpec

from bessemer.kernels import ops
from bessemer.kernels.ops import NORM_EPSILON
from bessemer.topology.chips import backend
from bessemer.topology.rules import mesh_axes, shards

MOST_PIECES = 16
WARP_WIDTH = 1536
"""Numbers of a row that one warp can hold in registers: 48 per lane of each tensor."""


def suits(width: int) -> bool:
    """Return whether a row of this width can be held in a few power-of-two pieces."""
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
        interpret=backend() != "gpu",
    )(*inputs)


def _pieces(width: int) -> list[Any]:
    size = _piece(width)
    return [pl.ds(start, size) for start in range(0, width, size)]


# -- residual mix + norm ---------------------------------------------------------------------------------------------


@jax.custom_vjp
def mix_norm_kernel(x: Array, z: Array, a: Array, b: Array) -> tuple[Array, Array, Array]:
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


def _mix_norm_kernel(*refs: Any, width: int) -> None:
    s_ref, x_ref, z_ref, y_ref, h_ref, r_ref = refs
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


def _mix_norm_backward(residuals: Any, cotangents: tuple[Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
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


def _mix_norm_backward_kernel(*refs: Any, width: int) -> None:
    """t = gy + r·(gh − h·mean(gh·h)); dx = a·t, dz = gz + b·t, da = Σ t·x, db = Σ t·z."""
    s_ref, x_ref, z_ref, h_ref, r_ref, gy_ref, gh_ref, gz_ref, dx_ref, dz_ref, da_ref, db_ref = refs
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


mix_norm_kernel.defvjp(_mix_norm_forward, _mix_norm_backward)


@jax.custom_vjp
def add_norm_kernel(x: Array, z: Array) -> tuple[Array, Array]:
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
        held.append((x_ref[:, piece].astype(jnp.float32) + z_ref[:, piece].astype(jnp.float32)).astype(y_ref.dtype))
        y_ref[:, piece] = held[-1]
    _write_norm(held, h_ref, r_ref, width)


def _add_norm_backward(residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Array, Array]:
    h, r = residuals
    width = h.shape[1]
    kernel = functools.partial(_add_norm_backward_kernel, width=width)
    (t,) = call(kernel, (h, r, *cotangents), [(h.shape, h.dtype)], (0,) * 5, warps=_warps(width))
    return t, t


def _add_norm_backward_kernel(h_ref: Any, r_ref: Any, gy_ref: Any, gh_ref: Any, t_ref: Any, *, width: int) -> None:
    for piece, t in zip(_pieces(width), _norm_totals(h_ref, r_ref, gy_ref, gh_ref, width), strict=True):
        t_ref[:, piece] = t.astype(t_ref.dtype)


add_norm_kernel.defvjp(_add_norm_forward, _add_norm_backward)


# -- rotary positions and norm of queries and keys, over packed projections ------------------------------------------


ROWS, WARPS = 8, 4
"""Rows per program, which takes one head of all of them at a time."""


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
    q, k, r = call(kernel, (packed, cos, sin), outputs, (0, 0, 0, 0, 0, 1), warps=WARPS, rows=_rows(count))
    return (q, k, packed[:, sum(widths) :]), (q, k, r, cos, sin)


def _rows(count: int) -> int:
    return min(ROWS, count & -count)


def _halves(head: int, half: int) -> tuple[Any, Any]:
    return pl.ds(2 * head * half, half), pl.ds((2 * head + 1) * half, half)


def _rotate_norm_kernel(*refs: Any, heads: int, kv_heads: int, half: int, scale: float) -> None:
    packed_ref, cos_ref, sin_ref, q_ref, k_ref, r_ref = refs
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
    kernel = functools.partial(_rotate_norm_backward_kernel, heads=heads, kv_heads=kv_heads, half=half, scale=scale)
    inputs = (q, k, *cotangents, cos, sin, r)
    shape = (count, 2 * half * (heads + 2 * kv_heads))
    (gradient,) = call(kernel, inputs, [(shape, q.dtype)], (0, 0, 0, 0, 0, 0, 0, 1, 0), warps=WARPS, rows=_rows(count))
    return gradient, None, None


def _rotate_norm_backward_kernel(*refs: Any, heads: int, kv_heads: int, half: int, scale: float) -> None:
    """With u = y/scale: t = scale·r·(g − u·mean(g·u)), turned back by the angle; v's gradient as it is.

    u·mean(g·u) = y·Σ g·y / (n·scale²): no quotient an element, which would take as long as an exponential.
    """
    q_ref, k_ref, gq_ref, gk_ref, gv_ref, cos_ref, sin_ref, r_ref, out_ref = refs
    cos, sin = cos_ref[...], sin_ref[...]
    for head in range(heads + kv_heads):
        y_ref, g_ref, own = (q_ref, gq_ref, head) if head < heads else (k_ref, gk_ref, head - heads)
        low, high = _halves(own, half)
        u, v = y_ref[:, low].astype(jnp.float32), y_ref[:, high].astype(jnp.float32)
        p, q = g_ref[:, low].astype(jnp.float32), g_ref[:, high].astype(jnp.float32)
        mean = ((jnp.sum(p * u, axis=1) + jnp.sum(q * v, axis=1)) / (2 * half * scale**2))[:, None]
        r = (scale * r_ref[head, :])[:, None]
        p, q = r * (p - u * mean), r * (q - v * mean)
        low, high = _halves(head, half)
        out_ref[:, low] = (p * cos - q * sin).astype(out_ref.dtype)
        out_ref[:, high] = (q * cos + p * sin).astype(out_ref.dtype)
    for head in range(kv_heads):
        for source, target in zip(_halves(head, half), _halves(heads + kv_heads + head, half), strict=True):
            out_ref[:, target] = gv_ref[:, source]


rotate_norm.defvjp(_rotate_norm_forward, _rotate_norm_backward)


# -- plain JAX or kernels, with the same numbers ---------------------------------------------------------------------
# On a mesh kernels run under `shard_map`, each device on its own rows. A decode step (one token per row) is always
# plain JAX: it is over before a kernel's programs are spread, and XLA joins more of its neighbors.


Implementation = str  # "xla" or "pallas"


def choose_kernels(setting: str, dtype: Any) -> Implementation:
    """`architecture/kernels`: auto takes the one-pass kernels on a GPU in half precision."""
    if setting != "auto":
        return setting
    return "pallas" if backend() == "gpu" and dtype == jnp.bfloat16 else "xla"


def mix_norm(x: Array, x0: Array, rho: Array, xi: Array, implementation: Implementation) -> tuple[Array, Array, Array]:
    """x ← ρx + ξx0; (x, norm x, x0). x, x0: (B, T, D). x0 is handed on: see kernels.mix_norm."""
    if _can(x, implementation):
        return on_rows(mix_norm_kernel, (x, x0), (rho, xi), 3)
    x = (rho * x + xi * x0).astype(x.dtype)
    return x, ops.rms_norm(x), x0


def add_norm(x: Array, z: Array, implementation: Implementation) -> tuple[Array, Array]:
    """x ← x + z; (x, norm x). x, z: (B, T, D)."""
    if _can(x, implementation):
        return on_rows(add_norm_kernel, (x, z), (), 2)
    x = x + z
    return x, ops.rms_norm(x)


def can_pack(head_dim: int, implementation: Implementation) -> bool:
    """Whether queries, keys and values are made by one matmul and one kernel: heads must not be split over devices."""
    return implementation == "pallas" and suits(head_dim // 2) and shards("heads") * shards("kv") == 1


def unpack_rotate_norm(
    packed: Array, rotary: tuple[Array, Array], heads: int, kv_heads: int, scale: float
) -> tuple[Array, Array, Array]:
    """q, k = scale · norm(rotate(·)) and v of (B, T, (N + 2K)·H) → (B, T, N, H), (B, T, K, H), (B, T, K, H)."""
    half = rotary[0].shape[-1]
    if _is_step(packed):
        q, k, v = (
            part.reshape(*packed.shape[:2], -1, 2 * half)
            for part in jnp.split(packed, (2 * half * heads, 2 * half * (heads + kv_heads)), axis=-1)
        )
        return ops.rotate_norm(q, *rotary, scale), ops.rotate_norm(k, *rotary, scale), v

    def rows(packed: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
        tables = (table.reshape(-1, half) for table in (cos, sin))
        parts = rotate_norm(packed.reshape(-1, packed.shape[-1]), *tables, heads, kv_heads, scale)
        return tuple(part.reshape(*packed.shape[:2], -1, 2 * half) for part in parts)

    tables = [jnp.broadcast_to(t[:, :, 0], (*packed.shape[:2], half)) for t in rotary]
    q, k, v = on_parts(rows, (packed, *tables), (), 3)
    return q, k, v


def _can(x: Array, implementation: Implementation) -> bool:
    fits = x.shape[0] % shards("batch") == 0 and x.shape[1] % shards("sequence") == 0
    return implementation == "pallas" and suits(x.shape[-1]) and fits and not _is_step(x)


def _is_step(x: Array) -> bool:
    return x.shape[1] == 1


def on_rows(kernel: Callable[..., Any], tensors: tuple[Array, ...], whole: tuple[Array, ...], outputs: int) -> Any:
    """Run `kernel` on (B·T, …) rows of (B, T, …) tensors; `whole` is replicated."""

    def rows(*args: Array) -> tuple[Array, ...]:
        local = [x.reshape(-1, x.shape[-1]) for x in args[: len(tensors)]]
        results = kernel(*local, *args[len(tensors) :])
        return tuple(y.reshape(*args[0].shape[:2], y.shape[-1]) for y in results)

    return on_parts(rows, tensors, whole, outputs)


def on_parts(function: Callable[..., Any], tensors: tuple[Array, ...], whole: tuple[Array, ...], outputs: int) -> Any:
    """Run `function` on each device's part of (B, T, …) tensors; `whole` is replicated."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        spec = PartitionSpec(mesh_axes("batch"), mesh_axes("sequence"))
        in_specs = (spec,) * len(tensors) + (PartitionSpec(),) * len(whole)
        function = jax.shard_map(function, in_specs=in_specs, out_specs=(spec,) * outputs, check_vma=False)
    return function(*tensors, *whole)
