"""Lookup layers (L3, arXiv 2601.21461): x ← x + L3(x, ids) between blocks.

Token id t owns k_t learned rows, and the hidden state attends over just those: no router, no balancing loss.

    h = norm(x);  a = softmax(h·K_j/√d), j in [b_t, b_{t+1});  e = Σ a_j V_j;  out = W_mix [norm(W_up e); h]

W_mix starts at 0, so a model starts as the same model without them. Which rows a token owns is an `Allocation`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.models import fp8
from bessemer.models.allocation import Allocation, allocation_to_bounds, compute_lzw_allocation
from bessemer.models.axes import constrain, mesh_axes, shards
from bessemer.models.blocks import Axes, linear, rms_norm
from bessemer.models.layers import declare, symmetric
from bessemer.models.segment_attention import Tiles, choose_path, default_tiles, gathered, tiled
from bessemer.models.shape import LookupShape, Shape, round_up

__all__ = ["Allocation", "allocation_to_bounds", "compute_lzw_allocation"]

ROWS_MULTIPLE = 64
PARAMETERS_PER_ROW = 1000
SAMPLE_PER_ROW = 5
# A table rests split over its columns and is whole in use: any token may read any row.
AXES: dict[str, Axes] = {"table": ("rows", "embed"), "up": ("embed", "mlp"), "mix": (None, "embed")}


class LookupSettings(nn.Module):
    """Settings of the lookup layers, for a model family to inherit; and the rows of each token, which are no
    setting but state: see `Allocation`."""

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
    lookup_k_max: int = field(
        "architecture/lookup/k_max", default=512, minimum=1, help="most rows of one token"
    )
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
    """The static part of a lookup layer; tiles None: those of the platform."""

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


def _product(options: LookupOptions, name: str, w: Array, x: Array, bound: float | None = None) -> Array:
    """x W for the matrix called `name`, in the precision of the run; `bound` ≥ max|x| where it is known."""
    if options.fp8 is None:
        return linear(x, w, AXES[name], options.dtype)
    return fp8.linear(x, w, AXES[name], options.dtype, options.fp8, bound)


def look_up(options: LookupOptions, h: Array, keys: Array, values: Array, ids: Array) -> Array:
    """e = Σ a_j V_j, (B, T, D). On a mesh every device sorts and reads for the tokens it holds."""
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
