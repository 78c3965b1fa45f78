"""Compile the training step for TPUs and GPUs that are not here, on any CPU machine (extras `tpu-plan`, `gpu-plan`).

libtpu has the compiler for TPUs, JAX's CUDA plugin the one for GPUs; it needs no driver and no CUDA library. The
devices of `jax.experimental.topologies` cannot compute, so nothing may run eagerly while their mesh is in force.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from bessemer.errors import InputError, to_install
from bessemer.plan.collectives import Collective, Layout, collectives_of
from bessemer.plan.estimate import PlannedStep
from bessemer.plan.trainer import AbsentTopology, Target
from bessemer.topology import AXES, Chip, Topology, arrange, first_line, planned_for
from bessemer.training.feed import abstract_batch
from bessemer.training.setup.compiled import abstract_state, jit_train_step, make_optimizer
from bessemer.training.setup.microbatch import StepMemory, step_bytes

USED = re.compile(
    r"(?:Used |required for [\w ]*\()([\d.]+)([KMGT])(?: of |\) exceeds available HBM \()([\d.]+)([KMGT])"
)
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
}
"""Without these, libtpu searches for its machine and prints warnings, then compiles all the same."""
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
COMPILERS = {"tpu": "libtpu", "gpu": "XLA's GPU compiler"}

LEAST = -1.0
PATIENCE = 20.0  # seconds between two signs of life
Say = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """What the compiler planned. `memory` is None if it ran out; `needed` and `limit` are then its own figures."""

    memory: StepMemory | None
    collectives: tuple[Collective, ...]
    seconds: float
    needed: float | None = None
    limit: float | None = None
    message: str = ""
    notes: tuple[str, ...] = ()


def has_compiler(platform: str) -> bool:
    """Return whether the compiler for `tpu` or `gpu` is installed."""
    if platform == "tpu":
        return bool(os.environ.get("TPU_LIBRARY_PATH")) or _installed("libtpu")
    return any(_installed(plugin) for plugin in PLUGINS)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def require_libtpu(name: str) -> None:
    if not has_compiler("tpu"):
        raise InputError(
            f"--topology {name} is compiled with libtpu, which is not installed: {to_install('tpu-plan')}. "
            "Or give --no-compile for the analytic model alone, in seconds."
        )


def compile_step(step: PlannedStep, node: int | None, say: Say, quick: bool = False) -> Compiled:
    """Compile the step for its absent devices. Out of memory is a result; any other error is raised.

    node: GPUs that share one. quick: compile with the least effort, for TPUs in a fifth of the time; memory and traffic
    are then overestimated.
    """
    own = step.plan.context.topology
    assert isinstance(own, AbsentTopology)
    mesh, notes = compile_mesh(own, node)
    begun = time.monotonic()
    try:
        with _effort(quick), _signs_of_life(say):
            program = compile_program(step, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = " ".join(str(error).split())[:300]
        return Compiled(None, (), time.monotonic() - begun, *_words_of(str(error)), message, notes)
    layout = Layout({axis: int(mesh.shape[axis]) for axis in AXES}, node)
    found = collectives_of(program.as_text(), layout)
    return Compiled(step_bytes(program), tuple(found), time.monotonic() - begun, notes=notes)


def compile_program(step: PlannedStep, mesh: Mesh) -> Any:
    """Return the executable of the step for a mesh of `compile_mesh`."""
    plan, hooks, functions = step.plan, step.hooks, step.functions
    own = plan.context.topology
    topology = Topology(mesh, own.chip, own.settings, own.rest_rules, own.compute_rules)
    plan = replace(plan, context=replace(plan.context, topology=topology))
    key = jax.eval_shape(lambda: jax.random.key(0))
    with planned_for(own.platform, mesh.devices.flat[0]):
        abstract, placed = abstract_state(plan, hooks, make_optimizer(plan, hooks))
        fields, sharding = plan.data.fields, topology.batch_sharding(1)
        batch = abstract_batch(fields, functions.micro, functions.accumulate_steps, sharding)
        step_program = jit_train_step(plan, hooks, placed, functions.accumulate_steps)
        with topology.scope():
            return step_program.lower(abstract, batch, key).compile()


def compile_mesh(topology: AbsentTopology, node: int | None) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh over compile-only devices, placed as in a run, and notes on the placement. node: GPUs per node"""
    target = topology.target
    sizes = tuple(int(topology.mesh.shape[axis]) for axis in AXES)
    devices = _tpus(target) if target.platform == "tpu" else _gpus(target, node)
    placed, notes = arrange(sizes, devices)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES)), notes


def _tpus(target: Target) -> list[Any]:
    from jax.experimental import topologies

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
    if math.prod(target.grid) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(target.compiler_name, "tpu", **options).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--topology {target.name}: libtpu makes no such slice ({first_line(error)[:300]}). Try another shape, or "
            "--no-compile."
        ) from error


def _gpus(target: Target, node: int | None) -> list[Any]:
    from jax.experimental import topologies

    shared = math.gcd(target.devices, node or target.devices)
    shape = f"1x{target.devices // shared}x{shared}"  # slices, hosts, devices of a host
    try:
        described = topologies.get_topology_desc(
            target.chip.name, "cuda", target_config=target_config(target.chip), topology=shape
        )
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--topology {target.name}: XLA's GPU compiler does not start ({first_line(error)[:300]}). Install "
            f"JAX's plugin in the version of jax ({jax.__version__}): {to_install('gpu-plan')}. Or give --no-compile."
        ) from error
    return list(described.devices)


def _words_of(message: str) -> tuple[float | None, float | None]:
    """Return (bytes needed, bytes available) of the compiler's message."""
    found = USED.search(message)
    if found is None:
        return None, None
    needed, unit, limit, other = found.groups()
    return float(needed) * UNITS[unit], float(limit) * UNITS[other]


@contextmanager
def _effort(quick: bool) -> Iterator[None]:
    name = "jax_exec_time_optimization_effort"
    before = getattr(jax.config, name)
    jax.config.update(name, LEAST if quick else before)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextmanager
def _signs_of_life(say: Say) -> Iterator[None]:
    begun, done = time.monotonic(), threading.Event()

    def talk() -> None:
        while not done.wait(PATIENCE):
            say(f"compiling, {time.monotonic() - begun:.0f} s")

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# --- what XLA's compiler must know of a GPU that is not here


KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Generation:
    """What all chips of a compute capability share, per multiprocessor. Shared memory is in KiB."""

    threads: int
    float32_units: int
    shared: int
    shared_of_block: int  # the most that one block may ask for


# CUDA C++ Programming Guide, "Compute Capabilities": technical specifications and throughput of arithmetic. Each has
# 65,536 registers.
GENERATIONS = {
    "8.0": Generation(threads=2048, float32_units=64, shared=164, shared_of_block=163),
    "8.9": Generation(threads=1536, float32_units=128, shared=100, shared_of_block=99),
    "9.0": Generation(threads=2048, float32_units=128, shared=228, shared_of_block=227),
    "10.0": Generation(threads=2048, float32_units=128, shared=228, shared_of_block=227),
    "12.0": Generation(threads=1536, float32_units=128, shared=100, shared_of_block=99),
}


@dataclass(frozen=True)
class Gpu:
    """A chip: its compute capability, multiprocessors, L2 cache in MiB, and boost clock in GHz."""

    capability: str
    processors: int
    cache: float
    clock: float


# NVIDIA's data sheets and the white papers of the Ampere, Ada, Hopper and Blackwell architectures. Memory and its
# bandwidth are those of topology/chips.py.
GPUS = {
    "H100": Gpu("9.0", 132, 50, 1.98),
    "H100 PCIe": Gpu("9.0", 114, 50, 1.755),
    "H100 NVL": Gpu("9.0", 132, 50, 1.785),
    "H200": Gpu("9.0", 132, 50, 1.98),
    "H200 NVL": Gpu("9.0", 132, 50, 1.785),
    "B200": Gpu("10.0", 148, 126, 1.965),
    "A100 80GB": Gpu("8.0", 108, 40, 1.41),
    "A100 40GB": Gpu("8.0", 108, 40, 1.41),
    "L40S": Gpu("8.9", 142, 96, 2.52),
    "RTX 4090": Gpu("8.9", 128, 72, 2.52),
    "RTX 5090": Gpu("12.0", 170, 96, 2.407),
}


def target_config(chip: Chip) -> str:
    """Return the chip as XLA reads it: a `GpuTargetConfigProto` in text form."""
    gpu = GPUS[chip.name]
    generation = GENERATIONS[gpu.capability]
    major, minor = gpu.capability.split(".")
    accelerated = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""  # sm_90a rather than sm_90
    return f"""\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
  core_count: {gpu.processors}
  fpus_per_core: {generation.float32_units}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {generation.threads}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_block_optin: {generation.shared_of_block * KIB}
  shared_memory_per_core: {generation.shared * KIB}
  l2_cache_size: {int(gpu.cache * MIB)}
  clock_rate_ghz: {gpu.clock}
  memory_bandwidth: {int(chip.hbm_bytes_s)}
  device_memory_size: {int(chip.memory_gib * GIB)}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA {chip.name}"
"""
