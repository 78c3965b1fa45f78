"""Where the optimizer's state lives on a mesh, and how Muon's stacks are spread over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bessemer.optim.moments import Packed

# Axes that replicate the matrices, and axes that split them at rest. The first come first: a slice makes the stack
# smaller before anything travels, and of one dimension's axes (fsdp, pipeline) the last moves without the other.
REPEATING, SPLITTING = ("data", "context", "expert"), ("pipeline", "fsdp", "tensor")
ROW_AXES = ("fsdp", "pipeline")  # of a matrix whose rows are "embed", as rules.REST_RULES place it
POLAR_COST = 4.0  # a polar step takes about as long as sending its matrix so many times


@dataclass(frozen=True)
class Stack:
    """How a stack of matrices (n, m, k) is distributed over devices: `run(function, stack)`.

    n must be a multiple of `multiple`; the stack is padded with zero matrices.
    """

    multiple: int
    run: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]


@dataclass(frozen=True)
class Spread:
    """Distributes a stack over the mesh: each device orthogonalizes its share."""

    mesh: Mesh
    axes: tuple[str, ...]  # those with more than one device

    def align(self, matrix: jax.Array) -> jax.Array:
        """One layout for all square matrices on fsdp × tensor: some rest on (fsdp, tensor) and some on (tensor, fsdp),
        such as q and out, and the compiler would gather them whole to stack them."""
        rows, columns = matrix.shape
        split = tuple(axis for axis in ROW_AXES if axis in self.axes)
        mixed = rows == columns and split and "tensor" in self.axes
        if not mixed or rows % self._devices(split, SPLITTING) or columns % self.mesh.shape["tensor"]:
            return matrix
        return jax.lax.with_sharding_constraint(matrix, NamedSharding(self.mesh, PartitionSpec(split, "tensor")))

    def chosen(self, count: int) -> tuple[str, ...]:
        """Return the axes over which a stack of `count` matrices is split: those with the least to compute and to send.

        Not always all: 26 matrices on 512 devices are 486 of padding, which an all-gather would send with the rest.
        """
        some = [part for n in range(len(self.axes) + 1) for part in combinations(self.axes, n)]
        return min(some, key=lambda axes: self.cost(count, axes))

    def cost(self, count: int, axes: tuple[str, ...]) -> float:
        """Return one device's time in units of sending a whole matrix: its polar steps, and what it receives."""
        repeats, parts = (self._devices(axes, kind) for kind in (REPEATING, SPLITTING))
        pieces = self._devices(self.axes, SPLITTING)
        own = -(-count // (repeats * parts))
        padded = own * repeats * parts
        there_and_back = 2 * padded / (repeats * pieces) if parts > 1 else 0.0  # all-to-alls
        made_whole = own * (1 - parts / pieces)  # all-gather over splitting axes that are not chosen
        joined = padded / pieces * (1 - 1 / repeats)  # all-gather over repeating ones
        return POLAR_COST * own + there_and_back + made_whole + joined

    def _devices(self, axes: tuple[str, ...], kind: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes if axis in kind)

    def over(self, count: int) -> Stack:
        """Return the layout of a stack of `count` matrices.

        The stack axis is split over one mesh axis after the other, and joined in reverse order. So each move is one
        collective: a slice or all-gather over an axis that replicates, an all-to-all over one that splits the matrices.
        Asked for a single move, the compiler replicates the stack.
        """
        axes = self.chosen(count)
        free = PartitionSpec.UNCONSTRAINED
        between = [PartitionSpec(axes[:used] or None, free, free) for used in range(len(axes))]
        if not set(self.axes) <= set(axes):  # the others may still split the matrices: gathered last
            between.append(PartitionSpec(axes or None, free, free))
        own = PartitionSpec(axes or None, None, None)

        def through(stack: jax.Array, specs: list[PartitionSpec]) -> jax.Array:
            for spec in specs:
                stack = jax.lax.with_sharding_constraint(stack, NamedSharding(self.mesh, spec))
            return stack

        def run(function: Callable[[jax.Array], jax.Array], stack: jax.Array) -> jax.Array:
            # Not left to the compiler, which would split the products again, with collectives in each of them.
            alone = jax.shard_map(function, mesh=self.mesh, in_specs=own, out_specs=own, check_vma=False)
            return through(alone(through(stack, [*between, own])), between[::-1])

        return Stack(math.prod(self.mesh.shape[axis] for axis in axes), run)


def mesh_spread(mesh: Mesh) -> Spread | None:
    """Return how Muon's stacks are laid out over the mesh; None on a single device."""
    axes = tuple(axis for axis in (*REPEATING, *SPLITTING) if mesh.shape.get(axis, 1) > 1)
    return Spread(mesh, axes) if axes else None


def _like(state: Any, param: Any, sharding: NamedSharding, replicated: NamedSharding) -> Any:
    """Return a parameter's sharding for one leaf of its state; axes the state has reduced are not split."""
    if isinstance(state, optax.MaskedNode):
        return state
    if isinstance(state, Packed):
        return Packed(*(_like(part, param, sharding, replicated) for part in state))
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

    Without them jit leaves the state replicated. A leaf that belongs to a parameter is sharded as the parameter is,
    except axes it has reduced, to one value or one per block; counters and factored moments are replicated.
    """
    return optax.tree_utils.tree_map_params(
        tx,
        lambda state, param, sharding: _like(state, param, sharding, replicated),
        jax.eval_shape(tx.init, abstract_params),
        abstract_params,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode | Packed),
    )
