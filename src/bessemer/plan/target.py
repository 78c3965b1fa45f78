"""Hardware that is not here, named as in `v5e:4x4`, `2xv6e:16x16` or `h200:8`: its mesh and the functions of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType

from bessemer.errors import InputError
from bessemer.topology import AXES, CHIPS, Chip, Topology, TopologySettings, chip_of, planned_for
from bessemer.topology.mesh import fill_sizes
from bessemer.training.settings import RunContext
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import (
    Functions,
    RunPlan,
    StepHooks,
    abstract_state,
    check_mesh,
    make_optimizer,
    record_micro_batch,
)
from bessemer.training.setup.microbatch import KEY as MICRO

NAME = re.compile(r"(?:(?P<slices>\d+)x(?=[a-z]))?(?P<chip>[a-z][a-z0-9 _-]*?):(?P<grid>\d+(?:x\d+)*)")
FLAT = ("TPU v5e", "TPU v6e")  # a torus of two dimensions; the other TPUs have three
TWO_DEVICES = ("TPU v7x",)  # JAX shows two devices a chip
LARGEST = {"TPU v4": 4096, "TPU v5e": 256, "TPU v5p": 8960, "TPU v6e": 256, "TPU v7x": 9216}  # chips per slice


@dataclass(frozen=True)
class Target:
    """Chips of one kind: `slices` times a `grid` of them. A GPU's grid is a plain count."""

    name: str
    chip: Chip
    slices: int
    grid: tuple[int, ...]

    @property
    def platform(self) -> str:
        return "tpu" if self.chip.name.startswith("TPU") else "gpu"

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.grid)

    @property
    def devices(self) -> int:
        """Return the number of JAX devices of all slices."""
        return self.chips * (2 if self.chip.name in TWO_DEVICES else 1)

    @property
    def compiler_name(self) -> str:
        """Return libtpu's name of one slice."""
        kind = self.chip.name.removeprefix("TPU ")
        return f"{'tpu7x' if kind == 'v7x' else kind}:{'x'.join(map(str, self.grid))}"


def parse_target(name: str) -> Target:
    """Return the hardware that `name` stands for, or raise an InputError that explains the names."""
    found = NAME.fullmatch(name.strip().lower())
    if found is None:
        raise InputError(f"--topology '{name}' is not understood. {_forms()}")
    chip = chip_of(found["chip"]) or chip_of(f"tpu {found['chip']}")
    if chip is None:
        raise InputError(f"--topology '{name}': the chip '{found['chip']}' is not in the table. {_forms()}")
    slices, grid = int(found["slices"] or 1), tuple(int(size) for size in found["grid"].split("x"))
    target = Target(name, chip, slices, grid)
    if target.chips < 1:
        raise InputError(f"--topology '{name}' has no chips.")
    return _torus(target) if target.platform == "tpu" else _count(target)


def _torus(target: Target) -> Target:
    dimensions = 2 if target.chip.name in FLAT else 3
    chips, most = math.prod(target.grid), LARGEST[target.chip.name]
    if chips > most:
        raise InputError(
            f"--topology '{target.name}': a slice of {target.chip.name} has at most {most} chips, not {chips}. Name "
            f"several slices, for example {-(-chips // most)}x{_short(target)}:{most}."
        )
    if len(target.grid) == 1:
        return replace(target, grid=balanced(chips, dimensions))
    if len(target.grid) != dimensions:
        shape = "x".join(map(str, balanced(chips, dimensions)))
        raise InputError(
            f"--topology '{target.name}': {target.chip.name} has a torus of {dimensions} dimensions, for example "
            f"{_short(target)}:{shape}."
        )
    return target


def _count(target: Target) -> Target:
    if len(target.grid) > 1 or target.slices > 1:
        raise InputError(
            f"--topology '{target.name}': GPUs are counted, for example {_short(target)}:{target.chips}; how many "
            "share a node is in prices.yaml."
        )
    return target


def _short(target: Target) -> str:
    return target.chip.name.removeprefix("TPU ").lower().replace(" ", "-")


def balanced(count: int, dimensions: int) -> tuple[int, ...]:
    """Return the most cubic torus of `count` chips, smallest side first: 16 → (4, 4), 32 → (2, 4, 4)."""
    if dimensions == 1:
        return (count,)
    sides = [side for side in range(1, count + 1) if count % side == 0 and side**dimensions <= count]
    rest = balanced(count // sides[-1], dimensions - 1)
    return (sides[-1], *rest)


def _forms() -> str:
    known = ", ".join(chip.lower().removeprefix("tpu ").replace(" ", "-") for chip in CHIPS)
    return (
        "A name is CHIP:COUNT or, for a TPU, CHIP:AxB or CHIP:AxBxC with the number of slices in front: h200:8, "
        f"v5e:4x4, v5p:2x2x4, 2xv6e:16x16. Chips: {known}."
    )


# --- its mesh and functions ---
@dataclass(frozen=True)
class AbsentTopology(Topology):
    """The mesh of a target. It has shardings and shapes; programs are traced for its platform."""

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
        """Set no mesh, so that the program of one device is traced. compiled.py compiles the whole."""
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
    sizes = fill_sizes(settings, target.devices)
    mesh: Any = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return AbsentTopology(mesh, target.chip, settings, target=target)


def absent_functions(plan: RunPlan, hooks: StepHooks) -> Functions:
    """Return what `build_functions` does, without a device and without jitted steps."""
    topology, batch_size = plan.context.topology, plan.data.batch_size
    check_mesh(plan)
    optimizer = make_optimizer(plan, hooks)
    abstract, placed = abstract_state(plan, hooks, optimizer)
    per_device = fit_micro_batch(plan.context, batch_size)
    key = jax.eval_shape(lambda: jax.random.key(0))
    accumulate = microbatch.accumulation(batch_size, per_device, topology.data_parallel)
    micro = per_device * topology.data_parallel
    return Functions(optimizer, abstract, placed, key, None, None, accumulate, micro, 1)


def fit_micro_batch(context: RunContext[Any], batch: int) -> int:
    """Return the caller's micro-batch, or the recipe's lowered until it divides this mesh's share of the batch; -1 is
    the whole share, which the plan then lowers until it fits."""
    config, parallel = context.config, context.topology.data_parallel
    asked = int(config[MICRO])
    if asked != -1 and config.asked(MICRO):
        microbatch.accumulation(batch, asked, parallel)
        return asked
    if batch % parallel:
        raise InputError(
            f"a step of {batch:,} sequences cannot be shared by {parallel:,} data-parallel devices "
            "(topology.data × topology.pipeline × topology.fsdp × topology.expert): make training.batch_size a "
            f"multiple of {parallel:,}, or use fewer and put the rest on topology.tensor or topology.context."
        )
    size, why = batch // parallel, f"the largest that divides {batch // parallel} sequences per device"
    if asked != -1:
        size, why = microbatch.lowered(asked, batch, parallel)
    if size != asked:
        record_micro_batch(context, size, why)
    return size
