"""What a model and its step need, whatever the mesh: what estimates are made of, taken from a planned run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from bessemer.config import configuration
from bessemer.errors import InputError
from bessemer.models.layers import remat_names
from bessemer.plan.kept import Kept, kept_tensors
from bessemer.plan.target import Target
from bessemer.topology import AXES, placement, shardings, unbox
from bessemer.training.setup.compiled import Functions
from bessemer.training.setup.model import precision_of
from bessemer.training.setup.plan import RunPlan, StepHooks


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one device, at rest."""

    parameters: int
    optimizer: int
    other: int  # average, frozen weights, reference, counters
    trained: int  # parameters that get a gradient, in float32
    largest: int  # bytes of the largest gathered parameter, float32, over fsdp but not over tensor


@dataclass(frozen=True)
class PlannedStep:
    """A planned run with the functions of its step, which hold shapes alone where the hardware is absent."""

    plan: RunPlan
    hooks: StepHooks
    functions: Functions

    @property
    def model(self) -> Any:
        return self.plan.model.model


@dataclass
class Facts:
    """A planned step, asked about meshes other than its own. `axes` is in the order of AXES."""

    step: PlannedStep
    target: Target
    _state: dict[tuple[int, ...], StateBytes] = field(default_factory=dict)
    _kept: dict[tuple[str, ...], Kept] = field(default_factory=dict)

    @cached_property
    def shape(self) -> Any:
        return getattr(self.step.model, "shape", None)

    @property
    def block(self) -> int:
        return int(self.step.plan.context.settings.block_size)

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        return int(self.step.plan.data.batch_size)

    @property
    def precision(self) -> str:
        return precision_of(self.step.model)

    @property
    def compute_bytes(self) -> int:
        """Of one number of the weights in use."""
        return int(jax.numpy.dtype(getattr(self.step.model, "compute_dtype", "float32")).itemsize)

    @property
    def remat(self) -> tuple[str, ...]:
        return tuple(getattr(self.step.model, "remat", ("none",)))

    @cached_property
    def float8_flops(self) -> float:
        """Of a token's training FLOPs those that run in float8: 6 × the matrices of blocks, and the head's if asked."""
        model, counts = self.step.model, self.step.plan.model.counts
        if self.precision != "fp8":
            return 0.0
        return 6.0 * (counts["matrix"] + counts["head"] * getattr(model, "fp8_head", False))

    @cached_property
    def update_flops(self) -> float:
        functions = self.step.functions
        return float(functions.optimizer.update_flops(functions.abstract_state.params))

    @cached_property
    def muon_parameters(self) -> int:
        """Parameters whose update is a product of matrices, spread over the mesh."""
        functions = self.step.functions
        rows = functions.optimizer.describe(functions.abstract_state.params)
        name = self.step.plan.context.settings.optimizer or self.step.hooks.optimizer()
        return sum(row.parameters for row in rows if row.group == "matrix") if name == "muon" else 0

    @cached_property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.step.functions.abstract_state.params))

    def kept(self, remat: tuple[str, ...] | None = None) -> Kept:
        """What a micro-batch keeps; sizes are scaled from the traced one."""
        wanted = self.remat if remat is None else remat
        if wanted not in self._kept:
            context, state = self.step.plan.context, self.step.functions.abstract_state
            with configuration(context.config), context.topology.scope():
                self._kept[wanted] = kept_tensors(
                    state, self.step.model, self.step.plan.data.fields, self.block, wanted
                )
        return self._kept[wanted]

    def one_layer(self, remat: tuple[str, ...]) -> float:
        """Bytes a row that recomputing one block brings back: a layer's share of what is kept without remat."""
        if remat_names(remat) is None:
            return 0.0
        whole = self.kept(("none",))
        return whole.activations(whole.rows) / whole.rows / max(1, getattr(self.shape, "depth", 1))

    @cached_property
    def leaves(self) -> Counter[Leaf]:
        """Alike arrays of all layers counted together."""
        return Counter(state_leaves(self.step))

    def state(self, axes: Mapping[str, int]) -> StateBytes:
        """Bytes at rest on a mesh of these sizes; an InputError where it does not divide the model."""
        sizes = tuple(axes[name] for name in AXES)
        if sizes not in self._state:
            held: dict[str, int] = {"parameters": 0, "optimizer": 0, "other": 0}
            trained = largest = 0
            for leaf, count in self.leaves.items():
                size = leaf.held(axes)
                if leaf.part == "in use":
                    largest = max(largest, size)
                    continue
                held[leaf.part] += count * size
                trained += count * size // leaf.itemsize * 4 if leaf.part == "parameters" else 0
            self._state[sizes] = StateBytes(**held, trained=trained, largest=largest)
        return self._state[sizes]


@dataclass(frozen=True)
class Leaf:
    """One array of the state: which part it belongs to, its shape, and the mesh axes that split each dimension."""

    part: str
    shape: tuple[int, ...]
    itemsize: int
    spec: tuple[tuple[str, ...], ...]

    def held(self, axes: Mapping[str, int]) -> int:
        """Bytes on one device; an InputError where a size does not divide."""
        count = 1
        for size, names in zip(self.shape, self.spec, strict=True):
            shards = math.prod(axes[name] for name in names)
            if size % shards:
                raise InputError(f"{self.part}: {size} is not divided by {' × '.join(names)} = {shards}.")
            count *= size // shards
        return count * self.itemsize


def leaves_of(part: str, tree: Any, placed: Any) -> list[Leaf]:
    """Specs name mesh axes whatever their sizes, so one placement answers for every mesh."""
    rows = placement(tree, placed)
    return [
        Leaf(part, tuple(row["shape"]), jax.numpy.dtype(row["dtype"]).itemsize, _axes(row["spec"]))
        for row in rows
    ]


def _axes(spec: list[Any]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        () if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec
    )


def state_leaves(step: PlannedStep) -> list[Leaf]:
    state, placed = step.functions.abstract_state, step.functions.state_shardings
    found = leaves_of("parameters", state.params, placed.params)
    found += leaves_of("optimizer", state.opt_state, placed.opt_state)
    rest = (state.replace(params=None, opt_state=None), placed.replace(params=None, opt_state=None))
    found += leaves_of("other", *rest)
    boxed, topology = step.plan.model.boxed, step.plan.context.topology
    in_use = shardings(boxed, topology.mesh, topology.compute_rules)
    return found + leaves_of("in use", unbox(boxed), in_use)
