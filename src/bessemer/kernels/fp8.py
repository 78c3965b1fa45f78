"""Matrix products in float8: e4m3 forward, e5m2 gradients, one power of two as scale per tensor or per row.

    x ≈ values · scale,   scale = 2^⌈log₂(bound / largest float8)⌉,   bound ≥ max|x|

Multiplying by a power of two is exact in every dtype: the emulation on a CPU gives the same products as the float8
units, up to the order of sums. Scales come from the value at hand, so there is no state to save. A known bound saves
the pass over the tensor: a norm's output is at most √D, and e5m2 spans 30 octaves, so a gradient's bound may be loose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from bessemer.kernels.ops import Axes, over_tokens
from bessemer.topology.rules import constrain, shards

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
# Merged products of q, k and v hide the float8 pattern from cuBLASLt, which then multiplies dequantized bf16 copies. So
# do XLA's own Triton products, which the topology's options turn off for every precision.
GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
SCALINGS = TENSORWISE, ROWWISE = ("tensorwise", "rowwise")
SMALLEST = 128  # sides of a converted matrix: at least this,
MULTIPLE = 16  # and divisible by this, as the units need it


class Scaled(NamedTuple):
    """x ≈ values · scale. `scale` is float32: () or one per row, with the axis that is summed over kept as 1."""

    values: Array
    scale: Array

    def wide(self, dtype: Any) -> Array:
        """Given one scale: back in a wider dtype, exactly, as the scale is a power of two."""
        return self.values.astype(dtype) * self.scale.astype(dtype)

    def rows(self) -> Scaled:
        """Given one scale: (B, T, D) → (B·T, D)."""
        return Scaled(self.values.reshape(-1, self.values.shape[-1]), self.scale)


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether a matrix is worth converting and the units take it."""
    return len(shape) == 2 and min(shape) >= SMALLEST and all(side % MULTIPLE == 0 for side in shape)


def quantize(x: Array, kind: Any, axis: int | None = None, bound: Array | float | None = None) -> Scaled:
    """`x` in float8 `kind`. One scale, or one per row along `axis`; `bound` ≥ max|x| spares the pass for it.

    What lies above the bound saturates; NaN stays NaN, and an infinite value becomes one when it is measured.
    """
    limit = float(jnp.finfo(kind).max)
    if bound is None:
        bound = jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None)
    scale = power_of_two(jnp.asarray(bound, jnp.float32) / limit)
    values = jnp.clip(x.astype(jnp.float32) * (1 / scale), -limit, limit)
    return Scaled(values.astype(kind), scale)


def power_of_two(x: Array) -> Array:
    """Return the smallest power of two ≥ x > 0, by its bits; 1 for 0. Float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    up = jax.lax.bitcast_convert_type((bits + 0x007FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(up == 0, 1.0, up)


def product(a: Scaled, b: Scaled, axes: tuple[int, int], dtype: Any, exact: bool = False) -> Array:
    """Σ over axis `axes[0]` of a and `axes[1]` of b, given in `dtype`.

    `exact` accumulates in float32; without it Hopper's units keep about 14 bits of a partial sum, which is enough
    for one forward product and not for a gradient's sum over every token of the batch.
    """
    precision = jax.lax.Precision.HIGHEST if exact else None
    dims = (((axes[0] % a.values.ndim,), (axes[1],)), ((), ()))
    if a.scale.ndim == 0:
        # The compiler replaces these casts and scales by one float8 product that scales its result by itself.
        wide_a, wide_b = a.wide(jnp.bfloat16), b.wide(jnp.bfloat16)
        return jax.lax.dot_general(wide_a, wide_b, dims, precision, preferred_element_type=dtype)
    y = jax.lax.dot_general(a.values, b.values, dims, precision, preferred_element_type=dtype)
    return (y * a.scale * b.scale.reshape(-1)).astype(dtype)


# -- one layer's product -----------------------------------------------------------------------------------------


def _table(w: Array, axes: Axes, scaling: str, summed: int) -> Scaled:
    """Return a parameter in float8, cast before it is gathered: a quarter of the bytes travel."""
    values, scale = quantize(w, FORWARD, summed if scaling == ROWWISE else None)
    return Scaled(constrain(values, *axes), scale)


def _cast(x: Array, kind: Any, scaling: str, bound: Array | float | None = None) -> Scaled:
    """An activation or its gradient; `bound` ≥ max|x| is of use where one scale serves the whole tensor."""
    return quantize(x, kind, -1) if scaling == ROWWISE else quantize(x, kind, bound=bound)


def _times(x: Array, w: Array, axes: Axes, dtype: Any, scaling: str, bound: Array | float | None = None) -> Array:
    return product(_cast(x, FORWARD, scaling, bound), _table(w, axes, scaling, 0), (-1, 0), dtype)


def _gradients(
    x: Array,
    w: Array,
    g: Array,
    axes: Axes,
    scaling: str,
    x_bound: Array | float | None = None,
    g_bound: Array | None = None,
) -> tuple[Array, Array]:
    """(dx, dW) of x W for the gradient g of the result. x: (B, T, D), g: (B, T, F)."""
    g8 = _cast(g, GRADIENT, scaling, g_bound)
    dx = product(g8, _table(w, axes, scaling, 1), (-1, 1), g.dtype, exact=True)
    if scaling == ROWWISE:  # dW sums over tokens, whose scales differ: it stays in the compute dtype
        return dx, over_tokens(x, g).astype(w.dtype)
    x8 = _cast(x, FORWARD, scaling, x_bound)
    if shards("sequence") > 1:
        return dx, over_tokens(x8.wide(g.dtype), g8.wide(g.dtype)).astype(w.dtype)
    return dx, product(x8.rows(), g8.rows(), (0, 0), jnp.float32, exact=True).astype(w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def linear(x: Array, w: Array, axes: Axes, dtype: Any, scaling: str, bound: float | None = None) -> Array:
    """x W with both in float8, W a float32 parameter; `bound` ≥ max|x| where it is known. x: (B, T, D)."""
    return _times(x, w, axes, dtype, scaling, bound)


def _linear_forward(x: Array, w: Array, axes: Axes, dtype: Any, scaling: str, bound: float | None) -> tuple[Array, Any]:
    return linear(x, w, axes, dtype, scaling, bound), (x, w)


def _linear_backward(
    axes: Axes, dtype: Any, scaling: str, bound: float | None, residuals: Any, g: Array
) -> tuple[Array, Array]:
    x, w = residuals
    # The barrier keeps the compiler from merging this cast with the forward pass's and holding a second copy of
    # every layer's input until here: x itself is kept anyway, by the norm or the attention that made it.
    x = jax.lax.optimization_barrier(x)
    return _gradients(x, w, g, axes, scaling, bound)


linear.defvjp(_linear_forward, _linear_backward)


# -- the feed-forward layer --------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def feed_forward(
    h: Array, up: Array, down: Array, axes: tuple[Axes, Axes], dtype: Any, scaling: str, name: str
) -> Array:
    """relu(h W_up)² W_down for the output h of a norm. Keeps h and u = h W_up (called `name`) for the backward pass.

    One function, as the gradient of u needs a bound from both sides: |du| ≤ 2 max(u) · max‖dy‖ · max‖W_down row‖.
    """
    return _feed_forward_forward(h, up, down, axes, dtype, scaling, name)[0]


def _feed_forward_forward(
    h: Array, up: Array, down: Array, axes: tuple[Axes, Axes], dtype: Any, scaling: str, name: str
) -> tuple[Array, Any]:
    u = _times(h, up, axes[0], dtype, scaling, math.sqrt(h.shape[-1]))
    u = constrain(checkpoint_name(u, name), "batch", "sequence", axes[0][1])
    top = jnp.maximum(jnp.max(u), 0)  # the largest square is top²
    y = _times(jnp.square(jnp.maximum(u, 0)), down, axes[1], dtype, scaling, jnp.square(top))
    return y, (h, u, top, up, down)


def _feed_forward_backward(
    axes: tuple[Axes, Axes], dtype: Any, scaling: str, name: str, residuals: Any, g: Array
) -> tuple[Array, Array, Array]:
    h, u, top, up, down = residuals
    h, u = jax.lax.optimization_barrier((h, u))  # as in linear: casts are made again rather than kept
    positive, top, longest = jnp.maximum(u, 0), top.astype(jnp.float32), _longest_row(g)
    squared = jnp.square(positive)
    dsquared, ddown = _gradients(squared, down, g, axes[1], scaling, jnp.square(top), longest)
    du = (dsquared * (2 * positive)).astype(dtype)
    bound = 2 * top * longest * _longest_row(down)
    dh, dup = _gradients(h, up, du, axes[0], scaling, math.sqrt(h.shape[-1]), bound)
    return dh, dup, ddown


def _longest_row(x: Array) -> Array:
    """max ‖row‖ ≥ max|x|, float32."""
    return jnp.sqrt(jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)))


feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)


# -- the head ----------------------------------------------------------------------------------------------------


def head_products(head: Array, scaling: str) -> tuple[Callable[..., Array], Callable[..., tuple[Array, Array | None]]]:
    """Return the loss's products with the head (D, V), for the output h (B, t, D) of a norm; all results float32.

    (h → logits, (h, dlogits, bound of |dlogits|, groups) → (dh, dW (*groups, D, V))); groups None: no dW is made
    """
    axes = ("embed", "vocab")
    into, back = _table(head, axes, scaling, 0), _table(head, axes, scaling, 1)

    def cast(h: Array) -> Scaled:
        return _cast(h, FORWARD, scaling, math.sqrt(head.shape[0]))

    def logits(h: Array, dtype: Any = jnp.float32) -> Array:
        return constrain(product(cast(h), into, (-1, 0), dtype), "batch", "sequence", "vocab")

    def gradients(h: Array, dlogits: Array, bound: Array, groups: tuple[int, int] | None) -> tuple[Array, Array | None]:
        g8 = _cast(dlogits, GRADIENT, scaling, bound)
        dh = product(g8, back, (-1, 1), jnp.float32, exact=True)
        if groups is None:
            return dh, None
        if scaling == ROWWISE or groups != (1, 1):
            return dh, over_rows(h, dlogits.astype(h.dtype), groups)
        return dh, product(cast(h).rows(), g8.rows(), (0, 0), jnp.float32, exact=True)[None, None]

    return logits, gradients


def over_rows(x: Array, g: Array, groups: tuple[int, int]) -> Array:
    """xᵀ g per group of rows and of positions, float32: (B, t, D), (B, t, V) → (*groups, D, V)."""
    batch, sequence = groups
    if sequence == 1:
        rows, grows = (a.reshape(batch, -1, a.shape[-1]) for a in (x, g))
        return jnp.einsum("gnd,gnv->gdv", rows, grows, preferred_element_type=jnp.float32)[:, None]
    # positions that are split over devices are not flattened, which would gather them
    rows, grows = (a.reshape(batch, -1, sequence, a.shape[1] // sequence, a.shape[-1]) for a in (x, g))
    return jnp.einsum("gbstd,gbstv->gsdv", rows, grows, preferred_element_type=jnp.float32)
