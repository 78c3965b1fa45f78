"""The mesh of a run and what follows from it: shardings of batches, the scope models are traced in."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bessemer.errors import InputError
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


# Which device takes which place of the mesh: neighbours on a TPU's torus, slices on the outermost axes.


def arrange(sizes: Sequence[int], devices: Sequence[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """(devices in the shape of the mesh, notes on what that costs), for devices that are here or only compiled for.

    Not `jax.make_mesh`: it refuses several slices, and most meshes whose sizes are no products of a torus's sides.
    The innermost axes send most, so they are neighbours: on a GPU, devices of one node are.
    """
    platform = str(devices[0].platform)
    if platform != "tpu":
        ordered = sorted(devices, key=lambda device: device.id) if platform == "gpu" else list(devices)
        return _shaped(ordered, sizes), ()
    slices: dict[int, list[Any]] = defaultdict(list)
    for device in devices:
        slices[getattr(device, "slice_index", 0)].append(device)
    if len({len(members) for members in slices.values()}) > 1:
        raise InputError(
            f"the {len(slices)} slices here differ in size: a mesh takes as many devices of each."
        )
    across = across_slices(sizes, len(slices))
    inside = [size // count for size, count in zip(sizes, across, strict=True)]
    placed, notes = zip(*(_on_torus(inside, slices[index]) for index in sorted(slices)), strict=True)
    blocks = np.empty(len(slices), object)
    blocks[:] = placed
    joined = np.block(blocks.reshape(across).tolist())
    return joined, (*_far(across), *dict.fromkeys(note for note in notes if note))


def across_slices(sizes: Sequence[int], slices: int) -> list[int]:
    """How many slices each axis spans: as many as divide it, from the outermost on, which sends least."""
    across = []
    for size in sizes:
        across.append(math.gcd(size, slices))
        slices //= across[-1]
    return across


def _far(across: Sequence[int]) -> list[str]:
    return [
        f"topology.{axis} spans {count} slices: what it exchanges goes over the data centre's network. "
        "A topology.data that is a multiple of the slices keeps it inside of them."
        for axis, count in zip(AXES, across, strict=True)
        if count > 1 and axis != "data"
    ]


def _on_torus(sizes: Sequence[int], devices: list[Any]) -> tuple[np.ndarray, str]:
    """One slice: mesh axes on whole sides of the torus, else on parts of sides, else in plain order; and a note."""
    from jax.experimental import mesh_utils

    for split in (False, True):
        try:
            placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
        except (NotImplementedError, ValueError, AssertionError):
            continue
        return placed, _note(sizes, devices, "two mesh axes share a side of it") if split else ""
    ordered = sorted(devices, key=lambda device: device.id)
    return _shaped(ordered, sizes), _note(sizes, devices, "devices are in plain order, neighbours or not")


def _note(sizes: Sequence[int], devices: list[Any], how: str) -> str:
    sides = np.array([device.coords for device in devices])
    torus = "x".join(str(side) for side in np.ptp(sides, axis=0) + 1)
    mesh = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1)
    return (
        f"{mesh} does not fall on whole sides of the torus {torus}: {how}, so exchanges have fewer links to "
        "themselves than the sides have. Mesh sizes that are products of sides have them all."
    )


def _shaped(devices: list[Any], sizes: Sequence[int]) -> np.ndarray:
    placed = np.empty(len(devices), object)
    placed[:] = devices
    return placed.reshape(tuple(sizes))


# Where each array of a tree lies on the mesh, and what it takes of one device: the table behind `bessemer
# plan`.


def placement(abstract_tree: Any, shardings: Any) -> list[dict[str, Any]]:
    """One row an array: name, shape, dtype, spec (mesh axes by dimension), bytes, bytes_per_device.

    abstract_tree: arrays or ShapeDtypeStructs; shardings: NamedShardings in the same structure. No array is read.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_tree)
    placed = jax.tree.leaves(shardings)
    rows = []
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        size = jax.numpy.dtype(leaf.dtype).itemsize
        spec = tuple(sharding.spec) + (None,) * (len(leaf.shape) - len(sharding.spec))
        rows.append(
            {
                "name": jax.tree_util.keystr(path, simple=True, separator="/"),
                "shape": list(leaf.shape),
                "dtype": str(jax.numpy.dtype(leaf.dtype)),
                "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
                "bytes": math.prod(leaf.shape) * size,
                "bytes_per_device": math.prod(sharding.shard_shape(tuple(leaf.shape))) * size,
            }
        )
    return rows


# Random numbers that compile quickly: on one GPU their bits come from JAX's own kernel.
#
# Otherwise each draw is a program of a hundred instructions: the 54 of a model of depth 12 took 24 s to
# compile on an H200, with the kernel .8 s. The bits are the same.


SETTING = "jax_threefry_gpu_kernel_lowering"


@contextmanager
def quick_draws(mesh: Mesh) -> Iterator[None]:
    """What is lowered inside draws by the kernel, if one device holds all: of several, each would draw everything."""
    before = getattr(jax.config, SETTING)
    jax.config.update(SETTING, mesh.size == 1)  # no other platform has the kernel, so none heeds this
    try:
        yield
    finally:
        jax.config.update(SETTING, before)
