"""Grouped matrix products: rows sorted by group, each group multiplied by its own matrix of a stack.

    y[i] = x[i] · W[g(i)],   x (N, D) sorted by g, W (E, D, F), sizes (E,) rows of each group

No row is multiplied by another group's matrix, and none is dropped. Implementations:

    tiles    a loop over tiles of rows that belong to one group: at most N/size + E small products. Any device.
    ragged   `jax.lax.ragged_dot`, which a TPU has an instruction sequence for. On a CPU and a GPU XLA expands it to
             E products over all rows, forward and backward, so it is not chosen there.
    mosaic   our own kernels for an NVIDIA Hopper GPU (grouped_matmul.py), for bfloat16 and widths of whole tiles.
    batched  one batched product over tiles of equal size, each with a copy of its group's matrix. Other GPUs: a loop
             there starts a dozen kernels per tile, while the copies of 32 matrices of 768² for 262,144 rows in
             tiles of 256 are 1.2 GB, .5 ms at an H200's bandwidth beside .5 ms of products.

The last two need groups of whole tiles: Order.of pads each group with zeros to a multiple of ALIGNMENT, which is at
most E · 256 rows more, where a capacity would drop rows or multiply their number.

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
from bessemer.topology.chips import backend, traced_device

IMPLEMENTATIONS = ("auto", "tiles", "ragged", "mosaic", "batched")
COUNTED = 128  # rows whose order in a group is counted by one product
SMALLEST_TILE, LARGEST_TILE = 8, 128
"""Rows per tile. Smaller ones waste less at the end of a group, larger ones need fewer products."""
ALIGNMENT = {"mosaic": 256, "batched": 256}
"""What the rows of each group are a multiple of, by implementation; 1 for the others."""


def choose(implementation: str) -> str:
    """Return the implementation that runs here, for groups of any size."""
    if implementation == "auto":
        return "ragged" if backend() == "tpu" else "tiles"
    return implementation


def choose_padded(rows: int, groups: int, dtype: Any, *widths: int) -> str:
    """Return the implementation that runs here if groups may be padded. widths: of the matrices' sides."""
    if backend() != "gpu" or rows < groups * ALIGNMENT["batched"]:  # decoding: padding would be most of the rows
        return choose("auto")
    hopper = traced_device() is not None and _kernels().runs_on(traced_device())
    if hopper and all(_kernels().suits(0, width, width, dtype) for width in widths):
        return "mosaic"
    return "batched"


def _kernels() -> Any:
    """Imported where they are used alone: it takes .2 s of every start."""
    from bessemer.kernels import grouped_matmul

    return grouped_matmul


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
    implementation = choose(implementation)
    if implementation == "ragged":
        return jax.lax.ragged_dot(x, w, sizes)
    if implementation == "mosaic" and _kernels().suits(x.shape[0], *w.shape[1:], x.dtype):
        return _kernels().product(x, w, sizes)
    if implementation in ("mosaic", "batched"):
        tiled, group = _batches(x, sizes)
        y = jnp.einsum("tmd,tdf->tmf", tiled, jnp.take(w, group, axis=0, mode="fill", fill_value=0))
        return y.reshape(x.shape[0], w.shape[2])
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
    implementation = choose(implementation)
    if implementation == "ragged":
        numbers = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        return jax.lax.ragged_dot_general(x, g, sizes, numbers, preferred_element_type=jnp.float32)
    if implementation == "mosaic" and _kernels().suits(*x.shape, g.shape[1], x.dtype) and g.dtype == x.dtype:
        return _kernels().weight_gradient(x, g, sizes)
    if implementation in ("mosaic", "batched"):
        tiled, group = _batches(x, sizes)
        above = g.reshape(*tiled.shape[:2], -1)
        each = jnp.einsum("tmd,tmf->tdf", tiled, above, preferred_element_type=jnp.float32)
        member = (group == jnp.arange(sizes.shape[0])[:, None]).astype(jnp.float32)
        return jnp.einsum("et,tdf->edf", member, each, precision="highest")  # a scatter would add in any order
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


def _batches(x: Array, sizes: Array) -> tuple[Array, Array]:
    """Return x in tiles, (N, D) → (tiles, 256, D), and the group of each tile, E where it has none."""
    size = ALIGNMENT["batched"]
    tiled = x.reshape(-1, size, x.shape[1])
    first = jnp.arange(tiled.shape[0], dtype=jnp.int32)[:, None] * size
    return tiled, jnp.sum(first >= jnp.cumsum(sizes), axis=1, dtype=jnp.int32)


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
    """N tokens with k groups each as rows sorted by group; tokens of one group stay in their order.

    order: (rows,), row → token · k + choice, N·k for a row of padding; inverse: (N·k,), token · k + choice → row;
    sizes: (E,) int32, with the padding. Without padding there are N·k rows, and the two are permutations.
    """

    order: Array
    inverse: Array
    sizes: Array

    @classmethod
    def of(cls, chosen: Array, groups: int, multiple: int = 1) -> Order:
        """chosen: (N, k) groups of each token; multiple: what the rows of each group are padded to a multiple of."""
        flat = chosen.reshape(-1)
        if multiple > 1:
            return cls._padded(flat, groups, multiple)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.sum(flat[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)
        return cls(order, jnp.argsort(order), sizes)

    @classmethod
    def _padded(cls, flat: Array, groups: int, multiple: int) -> Order:
        """Count instead of sorting: a row's place is that of its group, and how many of its group come before it."""
        count = flat.shape[0]
        blocks = jnp.pad(flat, (0, -count % COUNTED), constant_values=groups).reshape(-1, COUNTED)
        member = (blocks[..., None] == jnp.arange(groups)).astype(jnp.bfloat16)  # (blocks, 128, E)
        earlier = jnp.tri(COUNTED, k=-1, dtype=jnp.bfloat16)
        within = jnp.einsum("ij,bje->bie", earlier, member, preferred_element_type=jnp.float32)  # exact: below 128
        totals = jnp.sum(member, axis=1, dtype=jnp.float32).astype(jnp.int32)
        sizes = jnp.sum(totals, axis=0)
        padded = -(-sizes // multiple) * multiple
        base = jnp.cumsum(totals, axis=0) - totals + jnp.cumsum(padded) - padded  # (blocks, E)
        place = jnp.where(member > 0, within.astype(jnp.int32) + base[:, None], 0)
        inverse = jnp.sum(place, axis=-1).reshape(-1)[:count]
        rows = -(-count // multiple) * multiple + groups * multiple
        numbers = jnp.arange(count, dtype=jnp.int32)
        order = jnp.full(rows, count, jnp.int32).at[inverse].set(numbers, unique_indices=True)
        return cls(order, inverse, padded)


@jax.custom_vjp
def dispatch(x: Array, order: Array, inverse: Array) -> Array:
    """Return the rows of tokens in sorted order: (N, D) → (rows, D). Its gradient adds a token's k rows in order."""
    token = order // (inverse.shape[0] // x.shape[0])
    return x[token] if order.shape == inverse.shape else _filled(x, token)


def _filled(x: Array, places: Array) -> Array:
    """Return x[places], with zeros for places beyond the last."""
    return x.at[places].get(mode="fill", fill_value=0)


def _dispatch_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, Any]:
    return dispatch(x, order, inverse), (inverse, jnp.zeros((x.shape[0], 0), x.dtype))


def _dispatch_backward(residuals: Any, g: Array) -> tuple[Array, None, None]:
    inverse, like = residuals
    rows = g[inverse].reshape(like.shape[0], -1, g.shape[-1])
    return jnp.sum(rows.astype(jnp.float32), axis=1).astype(like.dtype), None, None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def collect(y: Array, order: Array, inverse: Array) -> Array:
    """Return rows in the order of tokens and choices again: (rows, D) → (N·k, D)."""
    return y[inverse]


def _collect_forward(y: Array, order: Array, inverse: Array) -> tuple[Array, Array]:
    return collect(y, order, inverse), order


def _collect_backward(order: Array, g: Array) -> tuple[Array, None, None]:
    return g[order] if order.shape[0] == g.shape[0] else _filled(g, order), None, None


collect.defvjp(_collect_forward, _collect_backward)
