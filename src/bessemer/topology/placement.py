"""Where each array of a tree lies on the mesh, and what it takes of one device: the table behind `bessemer plan`."""

from __future__ import annotations

import math
from typing import Any

import jax


def placement(abstract_tree: Any, shardings: Any) -> list[dict[str, Any]]:
    """One row an array: name, shape, dtype, spec (mesh axes by dimension), bytes, bytes_per_device.

    abstract_tree: arrays or ShapeDtypeStructs; shardings: NamedShardings in the same structure. No array is read.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_tree)
    placed = jax.tree.leaves(shardings)
    rows = []
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        size = jax.numpy.dtype(leaf.dtype).itemsize
        spec = tuple(sharding.spec) + (None,) * (len(leaf.shape) - len(sharding.spec))
        rows.append(
            {
                "name": jax.tree_util.keystr(path, simple=True, separator="/"),
                "shape": list(leaf.shape),
                "dtype": str(jax.numpy.dtype(leaf.dtype)),
                "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
                "bytes": math.prod(leaf.shape) * size,
                "bytes_per_device": math.prod(sharding.shard_shape(tuple(leaf.shape))) * size,
            }
        )
    return rows
