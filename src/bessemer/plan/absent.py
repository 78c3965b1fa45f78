"""A trainer for hardware that is not here: its mesh is sizes and names, and nothing is put on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType

from bessemer.errors import InputError
from bessemer.plan.target import Target
from bessemer.topology import AXES, Topology, TopologySettings, planned_for
from bessemer.topology.mesh import _fill
from bessemer.training.context import RunContext
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import (
    Functions,
    abstract_state,
    check_sequence,
    make_optimizer,
    record_micro_batch,
)
from bessemer.training.setup.microbatch import KEY as MICRO
from bessemer.training.setup.plan import RunPlan, StepHooks


@dataclass(frozen=True)
class AbsentTopology(Topology):
    """The mesh of a target: shardings and shapes can be asked of it, programs are traced for its platform."""

    target: Target = field(kw_only=True)

    @property
    def platform(self) -> str:
        return self.target.platform

    @property
    def device_kind(self) -> str:
        return self.target.chip.name

    @property
    def float8(self) -> bool:
        return self.target.chip.fp8_flops is not None

    @property
    def device_count(self) -> int:
        return math.prod(self.mesh.shape.values())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Without a mesh in force: what is traced in it is one device's program. See compiled.py for the whole."""
        with planned_for(self.platform), nn.logical_axis_rules(list(self.compute_rules)):
            yield

    def describe(self) -> dict[str, Any]:
        return {
            "axes": {axis: int(size) for axis, size in self.mesh.shape.items()},
            "platform": self.platform,
            "device_kind": self.device_kind,
            "chip": self.target.chip.name,
            "chips": self.target.chips,
            "devices": self.device_count,
            "slices": self.target.slices,
            "grid": list(self.target.grid),
            "jax": jax.__version__,
        }


def absent_topology(settings: TopologySettings, target: Target) -> AbsentTopology:
    sizes = _fill(settings, target.devices)
    mesh: Any = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return AbsentTopology(mesh, target.chip, settings, target=target)


def absent_functions(plan: RunPlan, hooks: StepHooks) -> Functions:
    """`build_functions` without a device: the micro-batch is the caller's, or the largest that divides the batch."""
    topology, batch_size = plan.context.topology, plan.data.batch_size
    check_sequence(plan.context.settings.block_size, topology.mesh.shape["context"])
    optimizer = make_optimizer(plan, hooks)
    abstract, placed = abstract_state(plan, hooks, optimizer)
    per_device = fit_micro_batch(plan.context, batch_size)
    key = jax.eval_shape(lambda: jax.random.key(0))
    accumulate = microbatch.accumulation(batch_size, per_device, topology.data_parallel)
    micro = per_device * topology.data_parallel
    return Functions(optimizer, abstract, placed, key, None, None, accumulate, per_device, micro, 1)


def fit_micro_batch(context: RunContext[Any], batch: int) -> int:
    """Return the caller's micro-batch, or a recipe's lowered until it divides this mesh's share of the batch.

    An open one (-1) begins as the whole share; the plan then lowers it until it fits.
    """
    config, parallel = context.config, context.topology.data_parallel
    asked = int(config[MICRO])
    if asked != -1 and config.asked(MICRO):
        microbatch.accumulation(batch, asked, parallel)
        return asked
    if batch % parallel:
        raise InputError(
            f"a step of {batch:,} sequences cannot be shared by {parallel:,} data-parallel devices "
            f"(topology.data × topology.fsdp): make training.batch_size a multiple of {parallel:,}, or use fewer and "
            "put the rest on topology.tensor or topology.context."
        )
    size, why = batch // parallel, f"the largest that divides {batch // parallel} sequences a device"
    if asked != -1:
        size, why = microbatch.lowered(asked, batch, parallel)
    if size != asked:
        record_micro_batch(context, size, why)
    return size
