"""The pieces of a GPT block as pure functions: norms, rotary, gates, feed-forward, lookups.

Parameters are float32, matmuls run in the compute dtype; norm statistics, rotary and gates are float32 inside.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bessemer.topology.chips import backend
from bessemer.topology.rules import constrain, in_stage, mesh_axes, rule_axes, shards

NORM_EPSILON = 1e-6
FEW_ROWS = 8
"""Rows of a product that is worth a matrix unit."""
WIDE = 2**18
"""Elements of a matrix that takes longer to read than a kernel to start."""
Axes = tuple[str | None, str | None]


@jax.custom_vjp
def rms_norm(x: Array) -> Array:
    """x / √(mean(x²) + ε) over the last axis; no weights. Statistics in float32.

    Its gradient dx = r (g − y · mean(g y)), y = r x, keeps y, which the next matmul keeps too, instead of x.
    """
    return _rms_norm_forward(x)[0]


def _rms_norm_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    wide = x.astype(jnp.float32)
    r = _inverse_rms(wide)
    y = (wide * r).astype(x.dtype)
    return y, (y, r)


def _rms_norm_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array]:
    return (_norm_gradient(*residuals, g.astype(jnp.float32)).astype(g.dtype),)


def _inverse_rms(x: Array) -> Array:
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def _norm_gradient(y: Array, r: Array, g: Array) -> Array:
    y = y.astype(jnp.float32)
    return r * (g - y * jnp.mean(g * y, axis=-1, keepdims=True))


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def rotary_table(positions: Array, length: int, head_dim: int, base: float) -> tuple[Array, Array]:
    """cos and sin of position · base^(−2i/d): positions (…, T) below `length` → two (…, T, 1, head_dim/2), float32.

    A constant table: computed in place, the sines are repeated in every layer (38 ms of an 800 ms step on a CPU), and
    float32 angles are off by 1e-4 at position 2,000. A position outside the table gives NaN, not a wrong angle.
    """
    angle = np.arange(length)[:, None] * base ** (-np.arange(0, head_dim, 2) / head_dim)
    return rows_of_table(positions, np.cos(angle), np.sin(angle))


def rows_of_table(positions: Array, cos: np.ndarray, sin: np.ndarray) -> tuple[Array, Array]:
    """Rows of two constant tables (length, d/2), as `rotate` takes them."""

    def pick(table: np.ndarray) -> Array:
        rows = jnp.asarray(table, jnp.float32).at[positions].get(mode="fill", fill_value=jnp.nan)
        return rows[..., None, :]

    return pick(cos), pick(sin)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (x_i, x_{i+d/2}) by their angle, in float32. x: (B, T, N, H)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def rotate_norm(x: Array, cos: Array, sin: Array, scale: float) -> Array:
    """scale · norm(rotate(x)) for queries and keys. x: (B, T, N, H).

    Rotation keeps lengths, so the gradient follows from the result, which attention keeps anyway, and one number per
    row.
    """
    return _rotate_norm_forward(x, cos, sin, scale)[0]


def _rotate_norm_forward(x: Array, cos: Array, sin: Array, scale: float) -> tuple[Array, Any]:
    rotated = rotate(x, cos, sin)
    r = _inverse_rms(rotated)
    y = (scale * rotated * r).astype(x.dtype)
    return y, (y, r, cos, sin)


def _rotate_norm_backward(scale: float, residuals: Any, g: Array) -> tuple[Array, None, None]:
    y, r, cos, sin = residuals
    unscaled = y.astype(jnp.float32) / scale
    dx = rotate(_norm_gradient(unscaled, r, scale * g.astype(jnp.float32)), cos, -sin)
    return dx.astype(y.dtype), None, None


rotate_norm.defvjp(_rotate_norm_forward, _rotate_norm_backward)


def shift(x: Array, first: Array, *names: str | None) -> Array:
    """Return x delayed by one position, `first` in front. x: (B, T, …), first: (B, 1, …); names: axes after T.

    On a split sequence each device sends its last position on; left to itself, as in a stage, XLA moves all of x.
    """
    axes = mesh_axes("sequence", x.shape[1])
    if not axes or in_stage():
        return jnp.concatenate([first, x[:, :-1]], axis=1)

    def local(x: Array, first: Array) -> Array:
        to_next = [(piece, piece + 1) for piece in range(jax.lax.axis_size(axes) - 1)]
        handed = jax.lax.ppermute(x[:, -1:], axes, to_next)
        before = jnp.where(jax.lax.axis_index(axes) == 0, first, handed)
        return jnp.concatenate([before, x[:, :-1]], axis=1)

    rows = rule_axes("batch", x.shape[0])
    rest = [rule_axes(name, size) for name, size in zip(names, x.shape[2:], strict=False)]
    whole = PartitionSpec(rows, rule_axes("sequence", x.shape[1]), *rest)
    specs = (whole, PartitionSpec(rows, None, *rest))
    return jax.shard_map(local, in_specs=specs, out_specs=whole)(x, first)


def smear(x: Array, previous: Array, gate: Array, scale: Array, same_document: Array | None) -> Array:
    """x_t + λ · σ(W x_t[:24]) · x_{t−1}: a token sees its predecessor before any attention.

    x, previous: (B, T, D), `previous` shifted by one; same_document: (B, T), False cuts the tie.
    """
    share = scale * jax.nn.sigmoid(x[..., : gate.shape[0]].astype(jnp.float32) @ gate)  # (B, T, 1)
    if same_document is not None:
        share = share * same_document[..., None]
    return (x + share * previous).astype(x.dtype)


ROW_KEYS = "row_keys"
"""Field of a training batch, (B,): one random key per row, of the step and the row's position in the global batch."""

NOISE = 2**31 - 1
"""Folded into a row's key for the noise on its embeddings; dropout folds in the number of the layer."""


def row_keys(key: Array, rows: Array) -> Array:
    """Return a key for each of `rows` (B,), positions in the global batch.

    What a row draws then depends on neither the micro-batch, the accumulation nor the mesh.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def fold_in(keys: Array, number: Array | int) -> Array:
    """Fold `number` into every key of (B,)."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def dropout(x: Array, rate: float, keys: Array | None) -> Array:
    """Inverted dropout; no keys (evaluation) or rate 0 leaves x alone. x: (B, T, D); keys: (B,)."""
    if keys is None or rate == 0.0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1.0 - rate), 0).astype(x.dtype)


def add_noise(x: Array, alpha: float, keys: Array) -> Array:
    """x + U(−1, 1)·α/√(T·D), whatever the number of rows. x: (B, T, D); keys: (B,)."""
    scale = alpha / math.sqrt(x.shape[1] * x.shape[2])

    def draw(key: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, NOISE), x.shape[1:], x.dtype, -1.0, 1.0)

    return x + scale * jax.vmap(draw)(keys)


def product(x: Array, w: Array, dtype: Any = None) -> Array:
    """x W, in `dtype` or that of x. A single row is multiplied as the first of FEW_ROWS on a GPU.

    There XLA makes a product with one row a multiplication, which writes all x_i W_ij in the compute dtype, and a sum
    that reads them again. As rows, W is read once, sums are float32, and products of the same x join: a decode step of
    a Llama of 1.24B, compiled for an H200, has 260 kernels in place of 324.
    """
    if x.size != x.shape[-1] or w.size < WIDE or backend() != "gpu":
        return jnp.matmul(x, w, preferred_element_type=dtype)
    rows = jnp.pad(x.reshape(1, -1), ((0, FEW_ROWS - 1), (0, 0)))
    return jnp.matmul(rows, w, preferred_element_type=dtype)[:1].reshape(*x.shape[:-1], w.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def linear(x: Array, w: Array, axes: Axes, dtype: Any) -> Array:
    """x W in the compute dtype, W (fan_in, fan_out) a parameter laid out by `axes` in use. x: (B, T, D).

    Own gradient for three reasons. Of a frozen W none is computed, and x is not kept for it. dW comes straight out
    of the matmul in float32, never rounded to bf16. And it is written as one (D, B·T) × (B·T, F) product: the
    automatic rule's form makes a CPU copy both operands to transpose them (a feed-forward layer's gradient of 90 ms
    took 71 ms instead).
    """
    return product(x, constrain(w.astype(dtype), *axes))


def _linear_forward(x: Any, w: Any, axes: Axes, dtype: Any) -> tuple[Array, tuple[Array | None, Array]]:
    return linear(x.value, w.value, axes, dtype), (x.value if w.perturbed else None, w.value)


def _linear_backward(
    axes: Axes, dtype: Any, residuals: tuple[Array | None, Array], g: Array
) -> tuple[Array, Array | None]:
    x, w = residuals
    return input_gradient(w, g, axes, dtype), None if x is None else over_tokens(x, g).astype(w.dtype)


def linear_gradients(x: Array, w: Array, g: Array, axes: Axes, dtype: Any) -> tuple[Array, Array]:
    """(dx, dW) of x W for the gradient g of the result. x: (B, T, D), g: (B, T, F)."""
    return input_gradient(w, g, axes, dtype), over_tokens(x, g).astype(w.dtype)


def input_gradient(w: Array, g: Array, axes: Axes, dtype: Any) -> Array:
    """dx of x W for the gradient g: (B, T, F) of the result."""
    table = constrain(w.astype(dtype), *axes)
    if shards("sequence") > 1:
        return jnp.einsum("btf,df->btd", g, table)
    return jnp.einsum("nf,df->nd", g.reshape(-1, g.shape[-1]), table).reshape(*g.shape[:-1], w.shape[0])


def over_tokens(x: Array, g: Array) -> Array:
    """xᵀ g in float32; a sequence that is split over devices is not flattened, which would gather it."""
    if shards("sequence") > 1:
        return jnp.einsum("btd,btf->df", x, g, preferred_element_type=jnp.float32)
    rows, grows = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return jnp.einsum("nd,nf->df", rows, grows, preferred_element_type=jnp.float32)


linear.defvjp(_linear_forward, _linear_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def relu_squared(x: Array, name: str) -> Array:
    """relu(x)², kept under `name` for the backward pass; x itself is not kept.

    dx = 2·√y·g: the next matmul keeps y anyway, so the widest tensor of a layer is stored once and never recomputed
    (9 of 515 ms per step at depth 12 on an H200).
    """
    return jnp.square(jnp.maximum(x, 0))


def _relu_squared_forward(x: Array, name: str) -> tuple[Array, Array]:
    y = checkpoint_name(relu_squared(x, name), name)
    return y, y


def _relu_squared_backward(name: str, y: Array, g: Array) -> tuple[Array]:
    return (g * (2 * jnp.sqrt(y)),)


relu_squared.defvjp(_relu_squared_forward, _relu_squared_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(table: Array, ids: Array, axes: Axes, dtype: Any) -> Array:
    """table[ids] in the compute dtype: (V, D), (B, T) → (B, T, D). The table is laid out by `axes` first.

    The gradient is summed in float32: a frequent token adds up thousands of rows, which bf16 would lose.
    """
    return constrain(table.astype(dtype), *axes)[ids]


def _lookup_forward(table: Array, ids: Array, axes: Axes, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return lookup(table, ids, axes, dtype), (ids, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_backward(axes: Axes, dtype: Any, residuals: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    ids, like = residuals
    zeros = constrain(jnp.zeros((like.shape[0], g.shape[-1]), like.dtype), *axes)
    return zeros.at[ids].add(g.astype(like.dtype)), None


lookup.defvjp(_lookup_forward, _lookup_backward)
