"""Where the optimizer's state lives on a mesh, and how Muon's stacks are spread over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Spread:
    """How a stack of matrices (n, m, k) is laid over devices for the polar step: `scatter`, then `gather`.

    n must be a multiple of `multiple`: the stack is padded with zero matrices, whose polar factor is zero.
    """

    multiple: int
    scatter: Callable[[jax.Array], jax.Array]
    gather: Callable[[jax.Array], jax.Array]


def mesh_spread(mesh: Mesh, axes: tuple[str, ...] = ("data", "fsdp")) -> Spread | None:
    """Each device of `axes` orthogonalises its share of a stack, not everything. None on a single one.

    The stack axis is split over one mesh axis after the other, and joined in the reverse order, with the
    matrix axes left to the compiler in between. So each move is one collective that it knows: a slice or
    all-gather over an axis that only replicates, an all-to-all over one that splits the matrices. Asked for
    everything in a single move, it replicates the stack.
    """
    axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
    if not axes:
        return None
    free = PartitionSpec.UNCONSTRAINED
    between = [PartitionSpec(axes[:used] or None, free, free) for used in range(len(axes))]
    spread = PartitionSpec(axes, None, None)

    def through(stack: jax.Array, specs: list[PartitionSpec]) -> jax.Array:
        for spec in specs:
            stack = jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, spec))
        return stack

    return Spread(
        math.prod(mesh.shape[axis] for axis in axes),
        lambda stack: through(stack, [*between, spread]),
        lambda stack: through(stack, between[::-1]),
    )


def _like(state: Any, param: Any, sharding: NamedSharding, replicated: NamedSharding) -> Any:
    """A parameter's sharding for one leaf of its state; axes the state has reduced are not split."""
    if isinstance(state, optax.MaskedNode):
        return state
    if state.shape == param.shape:
        return sharding
    if len(state.shape) != len(param.shape):
        return replicated
    spec = tuple(sharding.spec) + (None,) * (len(param.shape) - len(sharding.spec))
    kept = (axis if a == b else None for axis, a, b in zip(spec, state.shape, param.shape, strict=True))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def state_shardings(
    tx: optax.GradientTransformation, abstract_params: Any, param_shardings: Any, replicated: NamedSharding
) -> Any:
    """Shardings of `tx.init(params)`, for `jit(tx.init, out_shardings=…)` and for restoring.

    Without them jit leaves the state replicated. A leaf that belongs to a parameter lies as the parameter
    does; an axis it has reduced to one value is not split; counters and factored moments are replicated.
    """
    return optax.tree_utils.tree_map_params(
        tx,
        lambda state, param, sharding: _like(state, param, sharding, replicated),
        jax.eval_shape(tx.init, abstract_params),
        abstract_params,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
