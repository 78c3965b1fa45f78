"""What XLA's compiler must know of a GPU that is not here: the description of each NVIDIA chip of the table."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.topology import Chip

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
