"""Host rows to device batches: each process reads only the rows its own devices hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Rows = Mapping[str, np.ndarray]
ReadRows = Callable[[int, int], Rows]
"""(first row, end row) of one global batch -> arrays of (n, T)."""


def device_batch(
    read: ReadRows, fields: Mapping[str, tuple[tuple[int, ...], Any]], micro: int, count: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Return rows 0..count·micro as device arrays (count, micro, …); micro-batch s holds rows s·micro … (s+1)·micro.

    fields: name -> (shape of one row, dtype). Rows shared by several devices (tensor replicas) are read once.
    """
    cached: ReadRows = functools.cache(read)

    def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
        outer, inner, *rest = index
        first, end, _ = inner.indices(micro)
        blocks = [
            cached(s * micro + first, s * micro + end)[name][(slice(None), *rest)] for s in range(*outer.indices(count))
        ]
        return np.stack(blocks)

    arrays: dict[str, jax.Array] = {}
    for name, (row_shape, dtype) in fields.items():
        shape = (count, micro, *row_shape)
        callback = functools.partial(part, name)
        place = field_sharding(sharding, shape)
        arrays[name] = jax.make_array_from_callback(shape, place, callback, dtype=dtype)
    return arrays


def place_rows(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return an array that every process has read in full, sharded over the mesh."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def abstract_batch(
    fields: Mapping[str, tuple[tuple[int, ...], Any]], micro: int, count: int, sharding: NamedSharding
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a device batch, to compile before the first one exists."""

    def one(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=field_sharding(sharding, shape))

    return {name: one((count, micro, *row_shape), dtype) for name, (row_shape, dtype) in fields.items()}


def field_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of a field of shape (count, micro, …): that of tokens, without the axes that do not divide
    it, such as a few numbers per row on more context devices."""
    names = tuple(sharding.spec)[: len(shape)]
    whole = [i for i in range(2, len(names)) if names[i] and shape[i] % sharding.mesh.shape[names[i]]]
    spec = (None if i in whole else name for i, name in enumerate(names))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


calls = 0
"""Calls of `fetch` in this process; tests compare it with the number of reports."""


def fetch(tree: Any) -> Any:
    """Copy device arrays to NumPy in one bulk read, which blocks until the values exist. Nothing else in the package
    reads device values during training."""
    global calls
    calls += 1
    return jax.device_get(tree)


def start_copy(tree: Any) -> None:
    """Begin the device-to-host copies, so that a later `fetch` finds the values waiting."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
