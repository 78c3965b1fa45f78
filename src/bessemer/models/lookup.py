"""Lookup layers (L3, arXiv 2601.21461): x ← x + L3(x, ids) between blocks.

Token id t owns k_t learned rows, and the hidden state attends over just those: no router, no balancing loss.

    h = norm(x);  a = softmax(h·K_j/√d), j in [b_t, b_{t+1});  e = Σ a_j V_j;  out = W_mix [norm(W_up e); h]

W_mix starts at 0, so a model starts as the same model without them. Which rows a token owns is an `Allocation`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.kernels import fp8
from bessemer.kernels.ops import Axes, linear, rms_norm
from bessemer.kernels.quantized import Quantized, quantized_linear
from bessemer.models.allocation import Allocation, allocation_to_bounds, compute_lzw_allocation
from bessemer.models.layers import declare, symmetric
from bessemer.models.lora import Adapted
from bessemer.models.shape import LookupShape, Shape, round_up
from bessemer.topology.chips import backend
from bessemer.topology.rules import constrain, mesh_axes, shards

__all__ = ["Allocation", "allocation_to_bounds", "compute_lzw_allocation"]

ROWS_MULTIPLE = 64
PARAMETERS_PER_ROW = 1000
SAMPLE_PER_ROW = 5
# A table rests split over its columns and is whole in use: any token may read any row.
AXES: dict[str, Axes] = {"table": ("rows", "embed"), "up": ("embed", "mlp"), "mix": (None, "embed")}


class LookupSettings(nn.Module):
    """Settings of the lookup layers, for a model family to inherit. `allocation` is state, not a setting."""

    lookup_after_layers: list[int] = field(
        "architecture/lookup/after_layers",
        default_factory=list,
        minimum=0,
        help="blocks (from 0) that a lookup layer follows; none = off",
    )
    lookup_rows: int = field(
        "architecture/lookup/rows",
        default=0,
        minimum=0,
        help="rows of a table; 0 = max(vocabulary, parameters // 1000) up to 64s",
    )
    lookup_d_up: int = field(
        "architecture/lookup/d_up", default=0, minimum=0, help="width of W_up's output; 0 = 4 × width"
    )
    lookup_k_max: int = field("architecture/lookup/k_max", default=512, minimum=1, help="most rows of one token")
    lookup_tied: bool = field("architecture/lookup/tied", default=False, help="one table for keys and values")
    lookup_sample_tokens: int = field(
        "architecture/lookup/sample_tokens",
        default=0,
        minimum=0,
        help="training tokens that LZW reads to share out the rows; 0 = 5 × (rows − vocabulary)",
    )
    lookup_path: str = field(
        "architecture/lookup/path",
        default="auto",
        choices=("auto", "gather", "sorted"),
        help="gather + mask, or tokens sorted by id in tiles; auto by size",
    )
    allocation: Allocation | None = None

    @property
    def lookup_sample(self) -> int:
        """Tokens to read for an allocation."""
        shape: Shape = self.shape
        assert shape.lookup is not None
        return self.lookup_sample_tokens or SAMPLE_PER_ROW * (shape.lookup.rows - shape.vocab_size)


def has_lookup(model: nn.Module) -> bool:
    return isinstance(model, LookupSettings) and bool(model.lookup_after_layers)


def allocation_of(model: nn.Module) -> Allocation | None:
    return model.allocation if isinstance(model, LookupSettings) else None


def without_lookup(model: nn.Module) -> nn.Module:
    return model.clone(lookup_after_layers=()) if isinstance(model, LookupSettings) else model


def with_lookup(model: LookupSettings, shape: Shape) -> Shape:
    """The shape with its lookup layers, rows and widths derived where they are 0."""
    if not model.lookup_after_layers:
        return shape
    layers = tuple(sorted(model.lookup_after_layers))
    d_up = model.lookup_d_up or 4 * shape.width
    smallest = LookupShape(layers, shape.vocab_size, d_up, model.lookup_tied, 1.0)
    rows = model.lookup_rows
    if rows == 0 and model.allocation is not None:
        rows = model.allocation.rows
    if rows == 0:
        parameters = dataclasses.replace(shape, lookup=smallest).count_parameters()["total"]
        rows = round_up(max(shape.vocab_size, parameters // PARAMETERS_PER_ROW), ROWS_MULTIPLE)
    mean_k = model.allocation.mean_k if model.allocation is not None else rows / shape.vocab_size
    return dataclasses.replace(shape, lookup=dataclasses.replace(smallest, rows=rows, mean_k=mean_k))


class LookupParameters(nn.Module):
    """Declares the parameters of one lookup layer. K, V, W_up: U(±√3/√d); W_mix: 0."""

    shape: LookupShape
    width: int

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        s, d = self.shape, self.width
        uniform = symmetric(math.sqrt(3 / d))
        names = ("lookup_keys",) if s.tied else ("lookup_keys", "lookup_values")
        params = {name: declare(self, name, uniform, AXES["table"], (s.rows, d)) for name in names}
        params["up"] = declare(self, "up", uniform, AXES["up"], (d, s.d_up))
        params["mix"] = declare(self, "mix", nn.initializers.zeros, AXES["mix"], (s.d_up + d, d))
        return params


@dataclass(frozen=True)
class LookupOptions:
    """The static options of a lookup layer; tiles None: the platform's."""

    dtype: Any
    allocation: Allocation | None
    path: str = "auto"
    tiles: Tiles | None = None
    fp8: str | None = None  # the scaling of W_up and W_mix, where they fit; None: in `dtype`


def lookup_layer(options: LookupOptions, params: dict[str, Array], x: Array, ids: Array) -> Array:
    """x + W_mix [norm(W_up e); h]. x: (B, T, D); ids: (B, T)."""
    if not fp8.fits(params["up"].shape):  # nor does W_mix then: a part of it has these sides
        options = dataclasses.replace(options, fp8=None)
    h = rms_norm(x)
    keys = params["lookup_keys"]
    e = look_up(options, h, keys, params.get("lookup_values", keys), ids)
    up = constrain(_product(options, "up", params["up"], e), "batch", "sequence", "mlp")
    mixed = _mix(options, rms_norm(up), h, params["mix"])
    return constrain(x + mixed, "batch", "sequence", "embed_act")


def _mix(options: LookupOptions, up: Array, h: Array, mix: Array) -> Array:
    """W_mix [up; h] of two outputs of norms. up: (B, T, d_up); h: (B, T, D)."""
    bounds = [math.sqrt(part.shape[-1]) for part in (up, h)]
    if shards("mlp") == 1:
        return _product(options, "mix", mix, jnp.concatenate([up, h], axis=-1), max(bounds))
    # Joined, a split axis and a whole one would have to be laid out anew. W_mix is asked for whole, as it is gathered;
    # each device then takes its rows of it: asked for by rows, the compiler goes there by the last of its ways.
    wide = up.shape[-1]
    mixed = _product(options, "mix", mix[:wide], up, bounds[0])
    return mixed + _product(options, "mix", mix[wide:], h, bounds[1])


def _product(
    options: LookupOptions, name: str, w: Array | Quantized | Adapted, x: Array, bound: float | None = None
) -> Array:
    """x W for the matrix called `name`, in the precision of the run; `bound` ≥ max|x| where it is known."""
    if isinstance(w, Adapted):
        return w.add(_product(options, name, w.w, x, bound), x, AXES[name], options.dtype)
    if isinstance(w, Quantized):
        return quantized_linear(x, w, AXES[name], options.dtype)
    if options.fp8 is None:
        return linear(x, w, AXES[name], options.dtype)
    return fp8.linear(x, w, AXES[name], options.dtype, options.fp8, bound)


def look_up(options: LookupOptions, h: Array, keys: Array, values: Array, ids: Array) -> Array:
    """Return e = Σ a_j V_j, (B, T, D). On a mesh every device sorts and reads for its own tokens."""
    allocation = options.allocation
    if allocation is None:
        raise InputError(
            "this model has lookup layers but nothing says which rows a token owns: give it an allocation, "
            "model.clone(allocation=Allocation.of(compute_lzw_allocation(sequences, vocab_size, rows, k_max)))."
        )

    def local(h: Array, keys: Array, values: Array, ids: Array) -> Array:
        rows, flat = h.reshape(-1, h.shape[-1]), jnp.asarray(ids).reshape(-1)
        bounds = jnp.asarray(allocation.bounds)
        if choose_path(options.path, rows.shape[0], allocation.longest) == "gather":
            out = gathered(rows, keys, values, flat, bounds, allocation.longest)
        else:
            out = tiled(rows, keys, values, flat, bounds, options.tiles or default_tiles())
        return out.reshape(h.shape)

    split = [mesh_axes(name, size) for name, size in zip(("batch", "sequence"), ids.shape, strict=True)]
    if not any(split):
        return local(h, keys, values, ids)
    tokens, whole = PartitionSpec(*split), PartitionSpec()
    shared = jax.shard_map(
        local,
        in_specs=(PartitionSpec(*split, None), whole, whole, tokens),
        out_specs=PartitionSpec(*split, None),
        axis_names={axis for axes in split for axis in axes},  # the others repeat it, and sum no gradient
        check_vma=False,
    )
    return shared(h, keys, values, ids)


# -- attention over a token's rows, softmax(h·K_j/√d) V_j for j in [b_t, b_{t+1}), in two ways -------------------------
# `gathered` fetches max k rows per token and masks: simple, and fast for a few tokens. `tiled` sorts tokens by id, so
# that neighbors read neighboring rows, and goes over tiles of tokens × rows with a running softmax, like flash
# attention; its memory does not depend on k.


GATHERED_ROWS = 1 << 16
"""Rows that `gathered` holds at once (100 MB in bf16 at width 768)."""
CPU_GATHERED_ROWS = 1 << 13
"""On a CPU the tiled path is faster above this: 8 ms against 92 for 2,048 tokens of up to 59 rows, width 128."""
NEVER = -1e30  # finite, so that exp(NEVER − NEVER) is a number


def gathered(h: Array, keys: Array, values: Array, ids: Array, bounds: Array, longest: int) -> Array:
    """The reference: gather and mask, in chunks of tokens. h: (N, D); keys, values: (R, D); ids: (N,) → (N, D)."""
    count = h.shape[0]
    chunk = max(1, GATHERED_ROWS // longest)

    def some(h: Array, ids: Array) -> Array:
        rows = bounds[ids][:, None] + jnp.arange(longest)  # (n, k)
        real = rows < bounds[ids + 1][:, None]
        k, v = (table.at[rows].get(mode="clip").astype(h.dtype) for table in (keys, values))
        logits = jnp.einsum("nd,nkd->nk", h, k, preferred_element_type=jnp.float32) / math.sqrt(h.shape[-1])
        weights = jax.nn.softmax(jnp.where(real, logits, NEVER), axis=-1)
        out = jnp.einsum("nk,nkd->nd", weights.astype(h.dtype), v, preferred_element_type=jnp.float32)
        return out.astype(h.dtype)

    if count <= chunk:
        return some(h, ids)
    pad = -count % chunk
    h, ids = jnp.pad(h, ((0, pad), (0, 0))), jnp.pad(ids, (0, pad))
    pieces = (h.reshape(-1, chunk, h.shape[-1]), ids.reshape(-1, chunk))
    out = jax.lax.map(jax.checkpoint(lambda piece: some(*piece)), pieces)
    return out.reshape(-1, h.shape[-1])[:count]


class Tiles(NamedTuple):
    """Sizes of the tiled path: a block of sorted tokens meets a tile of rows; blocks go side by side."""

    tokens: int = 128
    rows: int = 128
    blocks: int = 64


CPU_TILES = Tiles(32, 64, 8)
"""57 ms against 276 with the sizes of accelerators (4,096 tokens, 8,192 rows, mean k 85, width 256, with backward)."""


def default_tiles() -> Tiles:
    return CPU_TILES if backend() == "cpu" else Tiles()


def choose_path(path: str, tokens: int, longest: int) -> str:
    """ "gather" or "sorted": what was asked for, or by how many rows these tokens would gather."""
    if path != "auto":
        return path
    most = CPU_GATHERED_ROWS if backend() == "cpu" else GATHERED_ROWS
    return "gather" if tokens * longest <= most else "sorted"


class Layout(NamedTuple):
    """The place of each sorted token in G groups of C blocks of S tokens, and the rows it may read.

    Blocks are grouped by the length of their range of rows, so that those of a group end together. The last block is
    padded with the last token, whose results are dropped.
    """

    place: Array  # (G, C, S): the token's number before sorting
    real: Array  # (G, C, S): False for repetitions
    low: Array  # (G, C, S): first row of the token
    high: Array  # (G, C, S): its last row + 1
    back: Array  # (N,): from a token's number to its place among G·C·S


def _layout(tiles: Tiles, ids: Array, bounds: Array) -> Layout:
    count = ids.shape[0]
    size = min(tiles.tokens, count)
    group = min(tiles.blocks, -(-count // size))
    padded = -(-count // (size * group)) * size * group
    order = jnp.argsort(ids)
    order = jnp.concatenate([order, jnp.broadcast_to(order[-1:], (padded - count,))]).reshape(-1, size)
    lengths = bounds[ids[order[:, -1]] + 1] - bounds[ids[order[:, 0]]]
    by_length = jnp.argsort(-lengths)
    real = (jnp.arange(padded) < count).reshape(-1, size)[by_length]
    place = order[by_length]
    slots = jnp.where(real, place, count).ravel()
    back = jnp.zeros(count, jnp.int32).at[slots].set(jnp.arange(padded, dtype=jnp.int32), mode="drop")
    shape = (-1, group, size)
    owner = ids[place]
    return Layout(
        place.reshape(shape), real.reshape(shape), bounds[owner].reshape(shape), bounds[owner + 1].reshape(shape), back
    )


class _Tile(NamedTuple):
    """One tile of rows for each block of a group."""

    rows: Array  # (C, r) row numbers
    mask: Array  # (C, S, r): may this token read that row?
    keys: Array  # (C, r, D)
    values: Array  # (C, r, D)


def _tile(tiles: Tiles, keys: Array, values: Array, low: Array, high: Array, step: Array) -> _Tile:
    """Return tile number `step` of each block. Near the table's end a tile is moved back to lie within it, and the rows
    it then shares with the tile before are masked. low, high: (C, S)."""
    size = min(tiles.rows, keys.shape[0])
    first = low[:, 0] + step * size
    start = jnp.minimum(first, keys.shape[0] - size)
    rows = start[:, None] + jnp.arange(size)  # (C, r)
    number = rows[:, None, :]
    mask = (number >= jnp.maximum(low, first[:, None])[..., None]) & (number < high[..., None])

    def fetch(table: Array) -> Array:
        return jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(table, at, size))(start)

    return _Tile(rows, mask, fetch(keys), fetch(values))


def _steps(tiles: Tiles, keys: Array, low: Array, high: Array) -> Array:
    """Tiles of the longest block."""
    size = min(tiles.rows, keys.shape[0])
    return jnp.max(-(-(high[:, -1] - low[:, 0]) // size))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def tiled(h: Array, keys: Array, values: Array, ids: Array, bounds: Array, tiles: Tiles) -> Array:
    """The fast path: sorted tokens in blocks against tiles of rows. Shapes as in `gathered`.

    The gradient recomputes the weights from the forward pass's log-sum-exp and sums in float32; unread rows get 0.
    """
    return _tiled_forward(h, keys, values, ids, bounds, tiles)[0]


def _logits(q: Array, keys: Array, mask: Array) -> Array:
    """(C, S, r) in float32."""
    product = jnp.einsum("csd,crd->csr", q, keys, preferred_element_type=jnp.float32)
    return jnp.where(mask, product / math.sqrt(q.shape[-1]), NEVER)


def _tiled_forward(h: Array, keys: Array, values: Array, ids: Array, bounds: Array, tiles: Tiles) -> tuple[Array, Any]:
    layout = _layout(tiles, ids, bounds)
    tables = keys.astype(h.dtype), values.astype(h.dtype)

    def group(xs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        place, low, high = xs
        q = h[place]  # (C, S, D)

        def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            tile = _tile(tiles, *tables, low, high, step)
            logits = _logits(q, tile.keys, tile.mask)
            new = jnp.maximum(top, logits.max(-1))
            weights = jnp.where(tile.mask, jnp.exp(logits - new[..., None]), 0)
            kept = jnp.exp(top - new)
            added = jnp.einsum("csr,crd->csd", weights.astype(h.dtype), tile.values, preferred_element_type=jnp.float32)
            return new, kept * total + weights.sum(-1), kept[..., None] * out + added

        start = (jnp.full(low.shape, NEVER), jnp.zeros(low.shape), jnp.zeros(q.shape, jnp.float32))
        top, total, out = jax.lax.fori_loop(0, _steps(tiles, keys, low, high), body, start)
        return (out / total[..., None]).astype(h.dtype), top + jnp.log(total)

    out, lse = jax.lax.map(group, (layout.place, layout.low, layout.high))
    result = out.reshape(-1, h.shape[-1])[layout.back]
    return result, (h, keys, values, ids, bounds, result, lse)


def _tiled_backward(tiles: Tiles, residuals: Any, g: Array) -> tuple[Array, Array, Array, None, None]:
    h, keys, values, ids, bounds, result, lse = residuals
    layout = _layout(tiles, ids, bounds)
    tables = keys.astype(h.dtype), values.astype(h.dtype)
    through = jnp.sum(g.astype(jnp.float32) * result.astype(jnp.float32), axis=-1)  # (N,): Σ_j a_j ∂a_j

    def group(carry: tuple[Array, Array], xs: Any) -> tuple[tuple[Array, Array], Array]:
        place, real, low, high, lse = xs
        q, through_q = h[place], through[place][..., None]
        dout = jnp.where(real[..., None], g[place], 0)
        counted = real[..., None]

        def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dkeys, dvalues, dq = carry
            tile = _tile(tiles, *tables, low, high, step)
            mask = tile.mask & counted
            weights = jnp.where(mask, jnp.exp(_logits(q, tile.keys, mask) - lse[..., None]), 0)
            dweights = jnp.einsum("csd,crd->csr", dout, tile.values, preferred_element_type=jnp.float32)
            dlogits = (weights * (dweights - through_q) / math.sqrt(h.shape[-1])).astype(h.dtype)
            per_row = partial(jnp.einsum, "csr,csd->crd", preferred_element_type=jnp.float32)
            dkeys = dkeys.at[tile.rows].add(per_row(dlogits, q))
            dvalues = dvalues.at[tile.rows].add(per_row(weights.astype(h.dtype), dout))
            added = jnp.einsum("csr,crd->csd", dlogits, tile.keys, preferred_element_type=jnp.float32)
            return dkeys, dvalues, dq + added

        start = (*carry, jnp.zeros(q.shape, jnp.float32))
        dkeys, dvalues, dq = jax.lax.fori_loop(0, _steps(tiles, keys, low, high), body, start)
        return (dkeys, dvalues), dq.astype(h.dtype)

    zeros = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    xs = (layout.place, layout.real, layout.low, layout.high, lse)
    (dkeys, dvalues), dq = jax.lax.scan(group, zeros, xs)
    dh = dq.reshape(-1, h.shape[-1])[layout.back]
    return dh, dkeys.astype(keys.dtype), dvalues.astype(values.dtype), None, None


tiled.defvjp(_tiled_forward, _tiled_backward)
