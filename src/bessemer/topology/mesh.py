"""The mesh of a run and what follows from it: shardings of batches, the scope models are traced in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bessemer.errors import InputError
from bessemer.topology.arrange import arrange
from bessemer.topology.chips import Chip, chip_of, has_float8
from bessemer.topology.distributed import process_index
from bessemer.topology.rules import COMPUTE_RULES, REST_RULES, Rules, check_rules, shardings, unbox
from bessemer.topology.settings import AXES, TopologySettings


@dataclass(frozen=True)
class Topology:
    """A mesh of data, fsdp, tensor, context, all `AxisType.Auto`: linen constraints raise under Explicit."""

    mesh: Mesh
    chip: Chip | None
    settings: TopologySettings
    rest_rules: Rules = REST_RULES
    compute_rules: Rules = COMPUTE_RULES
    notes: tuple[str, ...] = ()  # what the devices' own wiring makes of this mesh

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def device_kind(self) -> str:
        """The vendor's name of the devices."""
        return str(self.mesh.devices.flat[0].device_kind)

    @property
    def float8(self) -> bool:
        """Whether the devices multiply in float8."""
        return has_float8(self.mesh.local_devices[0])

    @property
    def device_count(self) -> int:
        return int(self.mesh.devices.size)

    @property
    def data_parallel(self) -> int:
        """Devices that see different rows of the batch: data · fsdp."""
        return int(math.prod(self.mesh.shape[axis] for axis in self.batch_axes))

    @property
    def batch_axes(self) -> tuple[str, str]:
        return ("data", "fsdp")

    @property
    def is_process_zero(self) -> bool:
        return process_index() == 0

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self, ndim_leading: int = 0) -> NamedSharding:
        """For (B, T) arrays, or (S, B, T) with `ndim_leading=1`: rows over data·fsdp, T over context."""
        spec = PartitionSpec(*([None] * ndim_leading), self.batch_axes, "context")
        return NamedSharding(self.mesh, spec)

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """For `jax.jit(..., compiler_options=)`: what is asked of XLA on a GPU.

        Products go to cuBLAS alone: trying Triton's as well gained nothing on an H200 and took a quarter of the
        compile time. `topology.deterministic` also ends autotuning, which may choose otherwise in another process.
        """
        if self.platform != "gpu":
            return None
        options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
        if self.settings.deterministic:
            options["xla_gpu_deterministic_ops"] = True
        return options

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Mesh and compute rules for init, tracing and calls.

        Both are thread-local and the rules are not in jit's cache key: enter it in every thread that
        traces, and around calls as well, or a later retrace silently loses all constraints.
        """
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(list(self.compute_rules)):
            yield

    def describe(self) -> dict[str, Any]:
        """Facts for meta.json on which bit-exactness rests; when they differ on resume, one line says so."""
        import jaxlib

        return {
            "axes": {axis: int(size) for axis, size in self.mesh.shape.items()},
            "platform": self.platform,
            "device_kind": self.device_kind,
            "chip": self.chip.name if self.chip else None,
            "devices": self.device_count,
            "processes": jax.process_count(),
            "deterministic": self.settings.deterministic or self.platform == "cpu",
            "cpu_threads": _xla_cpu_threads() if self.platform == "cpu" else None,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "x64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
            "threefry_partitionable": bool(jax.config.jax_threefry_partitionable),  # type: ignore[attr-defined]
        }


def make_topology(settings: TopologySettings | None = None, devices: Sequence[Any] | None = None) -> Topology:
    """Build the mesh over `devices` (default: all of the platform); sizes multiply to their count."""
    settings = settings or TopologySettings()
    chosen = list(_devices(settings.platform) if devices is None else devices)
    sizes = _fill(settings, len(chosen))
    placed, notes = arrange(sizes, chosen)
    mesh = Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    topology = Topology(mesh, chip_of(chosen[0]), settings, notes=notes)
    check_rules(topology.rest_rules, mesh)
    check_rules(topology.compute_rules, mesh)
    return topology


def init_sharded(init_fn: Callable[[Any], Any], key: Any, topology: Topology) -> tuple[Any, Any]:
    """Variables born on their devices: shapes by `eval_shape`, shardings from axis names, one jitted init.

    `init_fn(key)` returns boxed variables; returns `(variables, shardings)`, both unboxed and of the same
    structure. Inside a program (a traced key) it becomes part of that program, whose scope is in force already.
    """
    traced = isinstance(key, jax.core.Tracer)
    with nullcontext() if traced else topology.scope():
        placement = shardings(jax.eval_shape(init_fn, key), topology.mesh, topology.rest_rules)
        variables = jax.jit(lambda k: unbox(init_fn(k)), out_shardings=placement)(key)
    return variables, placement


def _devices(platform: str) -> list[Any]:
    if platform == "auto":
        return jax.devices()
    try:
        return jax.devices(platform)
    except (RuntimeError, AssertionError) as error:  # the latter: no plugin of that platform is installed
        raise InputError(
            f"topology.platform={platform}: JAX sees no such device here{_found()}. "
            f"Set topology.platform=auto, or install JAX for {platform}."
        ) from error


def _found() -> str:
    """What is there instead, where JAX can say it: not when it was told to look for one platform alone."""
    try:
        return f" (found: {', '.join(sorted({device.platform for device in jax.devices()}))})"
    except (RuntimeError, AssertionError):
        return ""


def _fill(settings: TopologySettings, count: int) -> tuple[int, ...]:
    """Requested sizes with the -1 replaced; their product is exactly `count`."""
    sizes = settings.sizes()
    written = ", ".join(f"topology.{axis}={size}" for axis, size in sizes.items())
    bad = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    if bad:
        raise InputError(
            f"topology.{bad[0]}={sizes[bad[0]]}: a mesh size is at least 1, or -1 to fill what is left."
        )
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        names = " and ".join(f"topology.{axis}" for axis in open_axes)
        raise InputError(f"{names} are both -1; only one mesh size can fill what is left ({written}).")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not open_axes and fixed != count):
        remedy = (
            f"Choose sizes whose product divides {count}."
            if open_axes
            else f"Make the product {count}, or set topology.data=-1."
        )
        raise InputError(f"the mesh does not fit the {count} device(s) here: {written}. {remedy}")
    return tuple(count // fixed if size == -1 else size for size in sizes.values())


def _xla_cpu_threads() -> int:
    """Size of XLA's CPU thread pool, which decides how sums are split and so their bits."""
    try:
        cores = int(os.environ.get("NPROC", ""))
    except ValueError:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores, jax.local_device_count("cpu"))
