"""Where each array of a tree rests, as rows of a table: its shape, its split, its bytes on one device."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def placement(tree: Any, shardings: Any) -> list[dict[str, Any]]:
    """One row an array, in the order of the tree: parameter, shape, dtype, spec, shards, bytes, bytes_per_device.

    tree: arrays or abstract ones; shardings: the same structure, as `shardings(…)` and `state_shardings(…)` give it.
    `spec` names the mesh axes of each dimension ("fsdp", "data·fsdp", "" for whole); `shards` is how many different
    pieces there are, so that bytes = shards · bytes_per_device.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    places = jax.tree.leaves(shardings, is_leaf=lambda leaf: isinstance(leaf, Sharding))
    return [
        _row(jax.tree_util.keystr(path, simple=True, separator="/"), leaf, place)
        for (path, leaf), place in zip(leaves, places, strict=True)
    ]


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Bytes that the whole tree takes on one device."""
    return sum(row["bytes_per_device"] for row in placement(tree, shardings))


def _row(name: str, leaf: Any, place: Any) -> dict[str, Any]:
    shape = tuple(leaf.shape)
    piece = tuple(place.shard_shape(shape))
    size = _item_size(leaf.dtype)
    return {
        "parameter": name,
        "shape": shape,
        "dtype": str(leaf.dtype),
        "spec": tuple(_axes(entry) for entry in tuple(place.spec) + (None,) * (len(shape) - len(place.spec))),
        "shards": math.prod(shape) // max(1, math.prod(piece)),
        "bytes": math.prod(shape) * size,
        "bytes_per_device": math.prod(piece) * size,
    }


def _axes(entry: Any) -> str:
    if entry is None:
        return ""
    return entry if isinstance(entry, str) else "·".join(entry)


def _item_size(dtype: Any) -> int:
    return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize
