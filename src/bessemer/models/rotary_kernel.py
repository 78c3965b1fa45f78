"""Rotary positions and norm of queries and keys in one pass over packed projections (see kernels.py)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from bessemer.models.blocks import NORM_EPSILON
from bessemer.models.kernels import call

ROWS, WARPS = 8, 4
"""Rows a program takes, a head of all of them at a time. A multiple is not needed, but a batch has one."""


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
    (gradient,) = call(
        kernel, inputs, [(shape, q.dtype)], (0, 0, 0, 0, 0, 0, 0, 1, 0), warps=WARPS, rows=_rows(count)
    )
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
    """With u = y/scale: t = scale·r·(g − u·mean(g·u)), turned back by the angle; v's gradient as it is.

    u·mean(g·u) = y·Σ g·y / (n·scale²): no quotient an element, which would take as long as an exponential.
    """
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
