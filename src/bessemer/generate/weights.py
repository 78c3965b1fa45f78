"""`generate.weights`: the matrices that sampling reads, in 8 bits. Training never sees them.

Quantized are the matrices of plain products (`Adaptable.projected_groups`): those of attention, feed-forward layers and
experts, and the frozen ones beneath adapters. Embeddings, head, norms and routers stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax import Array

from bessemer.errors import InputError
from bessemer.generate.rows import compiled_shapes
from bessemer.kernels.quantized import SAMPLING_KINDS, Quantized
from bessemer.models.lora import Adapted, Path, is_node
from bessemer.models.protocol import Adaptable
from bessemer.topology import CompiledTogether, unbox


class Quantizer:
    """Makes 8-bit copies of a model's parameters. kind: of SAMPLING_KINDS.

    Create and call it under the mesh of the parameters.
    """

    def __init__(self, model: Any, kind: str):
        if not isinstance(model, Adaptable):
            raise InputError(
                f"generate.weights={kind} needs a model that multiplies by its matrices through the package, as gpt "
                f"and llama do; {type(model).__name__} is not one. Set generate.weights=auto."
            )
        self.model, self.kind = model, kind
        self._program = CompiledTogether(
            jax.jit(functools.partial(_quantized, SAMPLING_KINDS[kind])), f"the {kind} weights"
        )

    def __call__(self, params: Any) -> Any:
        """Return the parameters with quantized matrices; everything else is not copied."""
        leaves, form, places = self._matrices(params)
        made = self._program([_bare(leaves[n]) for n in places])
        return _filled(leaves, form, places, made)

    def abstract(self, params: Any) -> Any:
        """Return the same of abstract parameters, with the shardings that the compiler chooses."""
        leaves, form, places = self._matrices(params)
        made = compiled_shapes(self._program.program, [_bare(leaves[n]) for n in places])
        return _filled(leaves, form, places, made)

    def unread(self, params: Any) -> Any:
        """Return abstract parameters, each on one device, with nodes that are quantized as they are read (`place`)."""
        leaves, form, places = self._matrices(params)

        def node(leaf: Any) -> Any:
            made = jax.eval_shape(SAMPLING_KINDS[self.kind].of, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
            return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=leaf.sharding), made)

        return _filled(leaves, form, places, [node(leaves[n]) for n in places])

    def release_each(self, params: Any) -> Any:
        """Return the same, one matrix at a time, emptying the nested dicts of `params`: beside the result memory holds
        what is not quantized yet."""
        leaves, form, places = self._matrices(params)
        _empty(params)
        quantize = jax.jit(SAMPLING_KINDS[self.kind].of)
        for n in places:
            made = jax.block_until_ready(quantize(_bare(leaves[n])))
            leaves[n] = _put(leaves[n], made)
        return jax.tree.unflatten(form, leaves)

    def check(self, boxed: Any, quantized: Collection[Path]) -> None:
        """Raise InputError if there is nothing to quantize. boxed: the parameters as shapes; quantized: which of them a
        run keeps in fewer bits already."""
        flat = flatten_dict(boxed).items()
        if not any(path not in quantized and self._takes(path, unbox(leaf)) for path, leaf in flat):
            raise self._nothing()

    def _takes(self, path: Path, leaf: Any) -> bool:
        return len(leaf.shape) > 1 and self.model.group_of(path) in self.model.projected_groups

    def _nothing(self) -> InputError:
        return InputError(
            f"generate.weights={self.kind} has nothing to quantize: the matrices are quantized already "
            "(lora.quantize). Set generate.weights=auto."
        )

    def _matrices(self, params: Any) -> tuple[list[Any], Any, list[int]]:
        """Return all leaves (nodes of one matrix are leaves), the tree's form, and which leaves to quantize."""
        named, form = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_node)
        places = [
            n
            for n, (path, leaf) in enumerate(named)
            if not isinstance(_bare(leaf), Quantized)
            and self._takes(tuple(str(getattr(key, "key", key)) for key in path), leaf)
        ]
        if not places:
            raise self._nothing()
        return [leaf for _, leaf in named], form, places


def _quantized(kind: type[Quantized], matrices: Sequence[Array]) -> list[Quantized]:
    return [kind.of(matrix) for matrix in matrices]


def _bare(leaf: Any) -> Any:
    return leaf.w if isinstance(leaf, Adapted) else leaf


def _put(leaf: Any, made: Quantized) -> Any:
    return replace(leaf, w=made) if isinstance(leaf, Adapted) else made


def _filled(leaves: list[Any], form: Any, places: Sequence[int], made: Sequence[Quantized]) -> Any:
    for n, node in zip(places, made, strict=True):
        leaves[n] = _put(leaves[n], node)
    return jax.tree.unflatten(form, leaves)


def _empty(tree: Any) -> None:
    if isinstance(tree, dict):
        for value in tree.values():
            _empty(value)
        tree.clear()
