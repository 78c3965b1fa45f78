"""The `topology/*` settings, the mesh they describe, and what follows from it: shardings, placement, tracing scope."""

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

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.topology.chips import Chip, chip_of, has_float8
from bessemer.topology.distributed import process_index
from bessemer.topology.rules import BATCH_AXES, COMPUTE_RULES, REST_RULES, Rules, check_rules, shardings, unbox

# Outermost first: neighbors in the device order share a tensor/context group, where links are fastest.
AXES: tuple[str, ...] = ("data", "pipeline", "fsdp", "expert", "tensor", "context")


@dataclass(frozen=True)
class TopologySettings:
    """The `topology/*` settings. Mesh sizes multiply to the device count; one of them may be -1 to fill the rest."""

    platform: str = field(
        "topology/platform",
        default="auto",
        choices=("auto", "cpu", "gpu", "tpu"),
        help="which devices to use; auto takes JAX's default",
    )
    data: int = field(
        "topology/data", default=-1, minimum=1, also=(-1,), help="replicas of the model; -1 fills what is left"
    )
    pipeline: int = field(
        "topology/pipeline",
        default=1,
        minimum=1,
        also=(-1,),
        help="stages of consecutive layers, at most model.depth; a micro-batch is one sequence; -1 fills",
    )
    fsdp: int = field(
        "topology/fsdp", default=1, minimum=1, also=(-1,), help="shards of parameters and optimizer state; -1 fills"
    )
    expert: int = field(
        "topology/expert",
        default=1,
        minimum=1,
        also=(-1,),
        help="shards of the experts of a mixture, a divisor of model.experts; -1 fills",
    )
    tensor: int = field(
        "topology/tensor", default=1, minimum=1, also=(-1,), help="shards of heads, mlp and vocabulary; -1 fills"
    )
    context: int = field("topology/context", default=1, minimum=1, also=(-1,), help="shards of the sequence; -1 fills")
    deterministic: bool = field(
        "topology/deterministic",
        default=False,
        help="bit-exact kernels on a GPU, at a cost in speed (a CPU is always exact)",
    )
    coordinator: str | None = field(
        "topology/coordinator",
        default=None,
        help="host:port of process 0; also BESSEMER_COORDINATOR. SLURM, Kubernetes and TPU pods need none",
    )
    processes: int | None = field(
        "topology/processes", default=None, minimum=1, help="number of processes; also BESSEMER_PROCESSES"
    )
    process_id: int | None = field(
        "topology/process_id", default=None, minimum=0, help="number of this process from 0; also BESSEMER_PROCESS_ID"
    )
    start_timeout: int = field(
        "topology/start_timeout", default=300, minimum=1, help="seconds to wait for all processes to connect"
    )
    peer_timeout: int = field(
        "topology/peer_timeout",
        default=45,
        minimum=5,
        help="seconds without a heartbeat after which a process counts as lost and the others exit (code 4)",
    )

    def sizes(self) -> dict[str, int]:
        """Return axis name -> requested size, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}


@dataclass(frozen=True)
class Topology:
    """A mesh of AXES, all `AxisType.Auto`: linen constraints raise under Explicit."""

    mesh: Mesh
    chip: Chip | None
    settings: TopologySettings
    rest_rules: Rules = REST_RULES
    compute_rules: Rules = COMPUTE_RULES
    notes: tuple[str, ...] = ()  # how the mesh fits the wiring of the devices

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def device_kind(self) -> str:
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
        """The number of devices with different rows of the batch: data · pipeline · fsdp · expert."""
        return int(math.prod(self.mesh.shape[axis] for axis in self.batch_axes))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return BATCH_AXES

    @property
    def is_process_zero(self) -> bool:
        return process_index() == 0

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self, ndim_leading: int = 0) -> NamedSharding:
        """Return the sharding of (B, T), or (S, B, T) with `ndim_leading=1`.

        B lies over data, fsdp, expert and pipeline, T over context.
        """
        return NamedSharding(self.mesh, PartitionSpec(*[None] * ndim_leading, self.batch_axes, "context"))

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """The `compiler_options` of `jax.jit` on a GPU.

        Matrix products use cuBLAS only: Triton's gained nothing on an H200 and took a quarter of the compile time.
        `topology.deterministic` also ends autotuning, which may choose differently in another process.
        """
        if self.platform != "gpu":
            return None
        options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
        if self.settings.deterministic:
            options["xla_gpu_deterministic_ops"] = True
        return options

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Set mesh and compute rules for init, tracing and calls.

        Both are thread-local, and the rules are not in jit's cache key: enter it in every thread that traces, and
        around calls as well, or a later retrace silently loses all constraints.
        """
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(list(self.compute_rules)):
            yield

    @contextmanager
    def layout(self) -> Iterator[None]:
        """Set the mesh's sizes and the rules for checks of settings, which need no device."""
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), nn.logical_axis_rules(list(self.compute_rules)):
            yield

    def describe(self) -> dict[str, Any]:
        """Return what bit-exactness depends on, for meta.json; resume reports any difference."""
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
    """Return the topology over `devices` (default: all of the platform)."""
    settings = settings or TopologySettings()
    chosen = list(_devices(settings.platform) if devices is None else devices)
    placed, notes = arrange(fill_sizes(settings, len(chosen)), chosen)
    mesh = Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    topology = Topology(mesh, chip_of(chosen[0]), settings, notes=notes)
    check_rules(topology.rest_rules, mesh)
    check_rules(topology.compute_rules, mesh)
    return topology


def init_sharded(init_fn: Callable[[Any], Any], key: Any, topology: Topology) -> tuple[Any, Any]:
    """Return (variables, shardings), both unboxed, from one jitted init that creates each shard on its device.

    `init_fn(key)` returns boxed variables. With a traced key it becomes part of the surrounding program and its scope.
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
        try:
            found = f" (found: {', '.join(sorted({device.platform for device in jax.devices()}))})"
        except (RuntimeError, AssertionError):  # JAX was told to look for this platform only
            found = ""
        raise InputError(
            f"topology.platform={platform}: JAX sees no such device here{found}. "
            f"Set topology.platform=auto, or install JAX for {platform}."
        ) from error


def fill_sizes(settings: TopologySettings, count: int) -> tuple[int, ...]:
    """Return the requested mesh sizes with -1 replaced, so that their product is `count`."""
    sizes = settings.sizes()
    written = ", ".join(f"topology.{axis}={size}" for axis, size in sizes.items())
    bad = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    if bad:
        raise InputError(f"topology.{bad[0]}={sizes[bad[0]]}: a mesh size is at least 1, or -1 to fill what is left.")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        names = " and ".join(f"topology.{axis}" for axis in open_axes)
        raise InputError(f"{names} are both -1; only one mesh size can fill what is left ({written}).")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not open_axes and fixed != count):
        remedy = f"Make the product {count}, or set topology.data=-1."
        if open_axes:
            remedy = f"Choose sizes whose product divides {count}."
        raise InputError(f"the mesh does not fit the {count} device(s) here: {written}. {remedy}")
    return tuple(count // fixed if size == -1 else size for size in sizes.values())


def _xla_cpu_threads() -> int:
    """Return the size of XLA's CPU thread pool, which decides how sums are split and so their bits."""
    try:
        cores = int(os.environ.get("NPROC", ""))
    except ValueError:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores, jax.local_device_count("cpu"))


def arrange(sizes: Sequence[int], devices: Sequence[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the devices in the shape of the mesh, and notes on what that costs; the devices may be absent ones.

    The innermost axes send most, so they get neighbors (on GPUs, one node); TPU slices go to the outermost axes.
    `jax.make_mesh` refuses several slices, and most meshes whose sizes are not products of the torus's sides.
    """
    platform = str(devices[0].platform)
    if platform != "tpu":
        ordered = sorted(devices, key=lambda device: device.id) if platform == "gpu" else list(devices)
        return _shaped(ordered, sizes), ()
    slices: dict[int, list[Any]] = defaultdict(list)
    for device in devices:
        slices[getattr(device, "slice_index", 0)].append(device)
    if len({len(members) for members in slices.values()}) > 1:
        raise InputError(f"the {len(slices)} slices here differ in size: a mesh takes as many devices of each.")
    across = across_slices(sizes, len(slices))
    inside = [size // count for size, count in zip(sizes, across, strict=True)]
    placed, notes = zip(*(_on_torus(inside, slices[index]) for index in sorted(slices)), strict=True)
    blocks = np.empty(len(slices), object)
    blocks[:] = placed
    joined = np.block(blocks.reshape(across).tolist())
    return joined, (*_far(across), *dict.fromkeys(note for note in notes if note))


def across_slices(sizes: Sequence[int], slices: int) -> list[int]:
    """Return how many slices each axis spans: as many as divide it, starting with the outermost, which sends least."""
    across = []
    for size in sizes:
        across.append(math.gcd(size, slices))
        slices //= across[-1]
    return across


def _far(across: Sequence[int]) -> list[str]:
    return [
        f"topology.{axis} spans {count} slices: what it exchanges goes over the data center's network. "
        "A topology.data that is a multiple of the slices keeps it inside of them."
        for axis, count in zip(AXES, across, strict=True)
        if count > 1 and axis != "data"
    ]


def _on_torus(sizes: Sequence[int], devices: list[Any]) -> tuple[np.ndarray, str]:
    """Place one slice: axes on whole sides of the torus, else on parts of sides, else in plain order. Also a note."""
    from jax.experimental import mesh_utils

    for split in (False, True):
        try:
            placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
        except (NotImplementedError, ValueError, AssertionError):
            continue
        return placed, _note(sizes, devices, "two mesh axes share a side of it") if split else ""
    ordered = sorted(devices, key=lambda device: device.id)
    return _shaped(ordered, sizes), _note(sizes, devices, "devices are in plain order, neighbors or not")


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


def placement(abstract_tree: Any, shardings: Any) -> list[dict[str, Any]]:
    """Return one row per array: name, shape, dtype, spec (mesh axes by dimension), bytes, bytes_per_device.

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


SETTING = "jax_threefry_gpu_kernel_lowering"


@contextmanager
def quick_draws(mesh: Mesh) -> Iterator[None]:
    """Lower random draws to JAX's GPU kernel if there is one device (with several, each would draw everything).

    The 54 draws of a depth-12 model took 24 s to compile on an H200 without the kernel, 0.8 s with it; same bits.
    """
    before = getattr(jax.config, SETTING)
    jax.config.update(SETTING, mesh.size == 1)  # other platforms ignore it
    try:
        yield
    finally:
        jax.config.update(SETTING, before)
