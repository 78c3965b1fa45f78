"""Grouped matrix products: rows sorted by group, each group multiplied by its own matrix of a stack.

    y[i] = x[i] · W[g(i)],   x (N, D) sorted by g, W (E, D, F), sizes (E,) rows of each group

Nothing is padded to a capacity and no row is multiplied by another group's matrix. Two implementations:

    tiles    a loop over tiles of rows that belong to one group: at most N/size + E small products. Any device.
    ragged   `jax.lax.ragged_dot`, which a TPU has an instruction sequence for. On a CPU and a GPU XLA expands it to
             E products over all rows, forward and backward, so it is not chosen there.

The gradients are grouped products too: dx[i] = g[i] · W[g(i)]ᵀ, and dW[e] = Σ x[i]ᵀ g[i] over the rows of group e,
summed in float32. Of a frozen W none is computed, and x is not kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.kernels.quantized import Quantized, tied
from bessemer.topology.chips import backend

IMPLEMENTATIONS = ("auto", "tiles", "ragged")
SMALLEST_TILE, LARGEST_TILE = 8, 128
"""Rows per tile. Smaller ones waste less at the end of a group, larger ones need fewer products."""


def choose(implementation: str) -> str:
    """Return the implementation that runs here."""
    if implementation == "auto":
        return "ragged" if backend() == "tpu" else "tiles"
    return implementation


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_linear(x: Array, w: Array, sizes: Array, dtype: Any, implementation: str = "auto") -> Array:
    """Return x W by group in `dtype`. x: (N, D) sorted by group; w: (E, D, F); sizes: (E,) int32 whose sum is N."""
    return _products(x, w.astype(dtype), sizes, implementation)


def _forward(x: Any, w: Any, sizes: Any, dtype: Any, implementation: str) -> tuple[Array, Any]:
    y = grouped_linear(x.value, w.value, sizes.value, dtype, implementation)
    return y, (x.value if w.perturbed else None, w.value, sizes.value)


def _backward(dtype: Any, implementation: str, residuals: Any, g: Array) -> tuple[Array, Array | None, None]:
    x, w, sizes = residuals
    dx = _products(g, w.astype(dtype).swapaxes(1, 2), sizes, implementation)
    return dx, None if x is None else _weight_gradient(x, g, sizes, implementation).astype(w.dtype), None


grouped_linear.defvjp(_forward, _backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def quantized_grouped_linear(x: Array, w: Quantized, sizes: Array, dtype: Any, implementation: str = "auto") -> Array:
    """The same with a frozen, quantized stack, dequantized in the forward pass and again in the backward pass."""
    x, w = tied(x, w)
    return _products(x, w.dequantized(dtype), sizes, implementation)


def _quantized_forward(x: Array, w: Quantized, sizes: Array, dtype: Any, implementation: str) -> tuple[Array, Any]:
    return quantized_grouped_linear(x, w, sizes, dtype, implementation), (w, sizes)


def _quantized_backward(dtype: Any, implementation: str, residuals: Any, g: Array) -> tuple[Array, None, None]:
    w, sizes = residuals
    g, w = tied(g, w)
    return _products(g, w.dequantized(dtype).swapaxes(1, 2), sizes, implementation), None, None


quantized_grouped_linear.defvjp(_quantized_forward, _quantized_backward)


# -- the products ------------------------------------------------------------------------------------------------------


def _products(x: Array, w: Array, sizes: Array, implementation: str) -> Array:
    """(N, D), (E, D, F) → (N, F)."""
    if choose(implementation) == "ragged":
        return jax.lax.ragged_dot(x, w, sizes)
    rows, tiles = x.shape[0], Tiles.of(sizes, x.shape[0])
    padded = jnp.pad(x, ((0, tiles.size), (0, 0)))

    def product(number: Array, y: Array) -> Array:
        # A tile may reach into the next group; those rows are written again by that group's own tile.
        tile = jax.lax.dynamic_slice_in_dim(padded, tiles.start[number], tiles.size)
        out = tile @ jax.lax.dynamic_index_in_dim(w, tiles.group[number], keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(y, out, tiles.start[number], axis=0)

    return tiles.loop(product, jnp.zeros((rows + tiles.size, w.shape[2]), x.dtype))[:rows]


def _weight_gradient(x: Array, g: Array, sizes: Array, implementation: str) -> Array:
    """Σ xᵀ g over the rows of each group: (N, D), (N, F) → (E, D, F) in float32."""
    if choose(implementation) == "ragged":
        numbers = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        return jax.lax.ragged_dot_general(x, g, sizes, numbers, preferred_element_type=jnp.float32)
    tiles = Tiles.of(sizes, x.shape[0])
    padded, upstream = (jnp.pad(rows, ((0, tiles.size), (0, 0))) for rows in (x, g))

    def product(number: Array, dw: Array) -> Array:
        start, group = tiles.start[number], tiles.group[number]
        inside = start + jnp.arange(tiles.size) < tiles.stop[number]
        tile = jnp.where(inside[:, None], jax.lax.dynamic_slice_in_dim(padded, start, tiles.size), 0)
        above = jax.lax.dynamic_slice_in_dim(upstream, start, tiles.size)
        added = jnp.einsum("nd,nf->df", tile, above, preferred_element_type=jnp.float32)
        held = jax.lax.dynamic_index_in_dim(dw, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw, held + added, group, axis=0)

    return tiles.loop(product, jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), jnp.float32))


class Tiles(NamedTuple):
    """Tiles of rows of one group each, in order. start, group, stop: (n,), stop the end of the tile's group."""

    size: int
    used: Array  # (): how many of the n are there
    start: Array
    group: Array
    stop: Array

    @classmethod
    def of(cls, sizes: Array, rows: int) -> Tiles:
        groups = sizes.shape[0]
        size = SMALLEST_TILE
        while size < LARGEST_TILE and size * groups < rows:
            size *= 2
        most = min(rows, rows // size + groups)  # Σ ceil(sizes / size) is never more
        ends = jnp.cumsum(-(-sizes // size))  # tiles up to and with each group
        number = jnp.arange(most, dtype=jnp.int32)
        group = jnp.minimum(jnp.searchsorted(ends, number, side="right"), groups - 1).astype(jnp.int32)
        last = jnp.cumsum(sizes)
        before = jnp.where(group > 0, ends[group - 1], 0)
        start = last[group] - sizes[group] + (number - before) * size
        return cls(size, ends[-1], start.astype(jnp.int32), group, last[group])

    def loop(self, body: Callable[[Array, Array], Array], start: Array) -> Array:
        return jax.lax.fori_loop(0, self.used, body, start)


# -- from tokens to rows of their groups, and back: permutations, whose gradients are permutations ---------------------


class Order(NamedTuple):
    """N tokens with k groups each as N·k rows sorted by group; tokens of one group stay in their order.

    order: (N·k,), row → token · k + choice; inverse: (N·k,), its inverse; sizes: (E,) int32.
    """

    order: Array
    inverse: Array
    sizes: Array

    @classmethod
    def of(cls, chosen: Array, groups: int) -> Order:
        """chosen: (N, k) groups of each token."""
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.sum(flat[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)
        return cls(order, jnp.argsort(order), sizes)


@jax.custom_vjp
def dispatch(x: Array, order: Array, inverse: Array) -> Array:
    """Return the rows of tokens in sorted order: (N, D) → (N·k, D). Its gradient adds a token's k rows in order."""
    return x[order // (order.shape[0] // x.shape[0])]


def _dispatch_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, Any]:
    return dispatch(x, order, inverse), (inverse, jnp.zeros((x.shape[0], 0), x.dtype))


def _dispatch_backward(residuals: Any, g: Array) -> tuple[Array, None, None]:
    inverse, like = residuals
    rows = g[inverse].reshape(like.shape[0], -1, g.shape[-1])
    return jnp.sum(rows.astype(jnp.float32), axis=1).astype(like.dtype), None, None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def collect(y: Array, order: Array, inverse: Array) -> Array:
    """Return rows in the order of tokens and choices again: (N·k, D) → (N·k, D)."""
    return y[inverse]


def _collect_forward(y: Array, order: Array, inverse: Array) -> tuple[Array, Array]:
    return collect(y, order, inverse), order


def _collect_backward(order: Array, g: Array) -> tuple[Array, None, None]:
    return g[order], None, None


collect.defvjp(_collect_forward, _collect_backward)
