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
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import Functions, abstract_state, check_sequence, make_optimizer

MICRO = "training/per_device_batch_size"


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


def absent_functions(trainer: Any) -> Functions:
    """`build_functions` without a device: the micro-batch is the given one, or the largest that divides the batch."""
    topology = trainer.topology
    check_sequence(trainer.settings.block_size, topology.mesh.shape["context"])
    optimizer = make_optimizer(trainer)
    abstract, placed = abstract_state(trainer, optimizer)
    per_device = fit_micro_batch(trainer)
    key = jax.eval_shape(lambda: jax.random.key(0))
    accumulate = microbatch.accumulation(trainer.data.batch_size, per_device, topology.data_parallel)
    micro = per_device * topology.data_parallel
    return Functions(optimizer, abstract, placed, key, None, None, accumulate, micro, 1)


def fit_micro_batch(trainer: Any) -> int:
    """A recipe's micro-batch that does not divide this mesh's share is lowered and noted; one that was asked for stays.

    An open one (-1) begins as the whole share; the plan then lowers it until it fits.
    """
    trainer.wished_rows = trainer.config[MICRO]
    asked, batch, parallel = trainer.config[MICRO], trainer.data.batch_size, trainer.topology.data_parallel
    if asked != -1 and trainer.config.provenance[MICRO].is_caller:
        microbatch.accumulation(batch, asked, parallel)
        return int(asked)
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
        trainer.config.set(MICRO, size, why)
        trainer.note_derived("training.per_device_batch_size", size, why)
    return size
