"""Trees as flat tables of named arrays, and the strict comparison of two such tables.

Flattened by us, any tree of states, named tuples and dicts has one stable name an array
("params/wte/embedding"), which is what error messages, the manifest and partial restores speak.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from bessemer.errors import InputError, StorageError

Leaves = dict[str, Any]
Signature = dict[str, tuple[str, tuple[int, ...]]]


def flatten(tree: Any) -> Leaves:
    """Name -> array, in tree order. Leaves that are not arrays or numbers cannot be saved."""
    leaves: Leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        if name in leaves:
            raise InputError(f"two arrays of the state have the same name '{name}'; rename one of the keys.")
        leaves[name] = _as_array(name, leaf)
    return leaves


def rebuild(abstract: Any, values: Leaves) -> Any:
    """The arrays in the structure of `abstract`, whose flattening gave the names."""
    names = flatten_names(abstract)
    return jax.tree.unflatten(jax.tree.structure(abstract), [values[name] for name in names])


def flatten_names(tree: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "value" for path, _ in paths]


def signature(leaves: Leaves) -> Signature:
    """Name -> (dtype, shape)."""
    return {name: (str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for name, leaf in leaves.items()}


def check_same(saved: Signature, wanted: Signature, where: str) -> None:
    """Raise one error that names the arrays which differ: nothing is cast, dropped or left fresh."""
    problems = [f"'{name}' is not in the checkpoint" for name in wanted if name not in saved]
    problems += [f"'{name}' is in the checkpoint only" for name in saved if name not in wanted]
    for name in wanted:
        if name in saved and saved[name] != wanted[name]:
            (have_dtype, have_shape), (want_dtype, want_shape) = saved[name], wanted[name]
            if have_shape != want_shape:
                problems.append(f"'{name}' has shape {have_shape} there and {want_shape} here")
            if have_dtype != want_dtype:
                problems.append(f"'{name}' is {have_dtype} there and {want_dtype} here")
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise StorageError(
            f"{where} does not fit this model and optimizer: {shown}{more}. Use the configuration it was "
            "saved with; to start from other weights use init=RUN in a new run."
        )


def select(saved: Signature, only: str | None) -> Signature:
    """The part of a signature under `only`, with that prefix removed; all of it for None."""
    if only is None:
        return saved
    prefix = only + "/"
    return {name[len(prefix) :]: entry for name, entry in saved.items() if name.startswith(prefix)}


def _as_array(name: str, leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float):
        return np.asarray(leaf)
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        raise InputError(
            f"the state's '{name}' is a {type(leaf).__name__}; only arrays and numbers can be saved."
        )
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise InputError(f"the state's '{name}' is a typed random key; save jax.random.key_data of it.")
    return leaf
