"""The micro-batch: how many sequences fit in one pass, from the memory that the compiler plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bessemer.config import Config
from bessemer.errors import InputError
from bessemer.topology import Topology, placement

KEY = "training/per_device_batch_size"

CPU_TOKENS = 4096  # on a CPU a pass of a few thousand tokens keeps the cores busy; more only takes memory and cache
SPARE = 0.9  # share of the device's memory a step may plan to use


def accumulation(batch_size: int, per_device: int, data_parallel: int) -> int:
    """Return batch_size / (per_device · data-parallel devices); raise InputError if it does not divide."""
    micro = per_device * data_parallel
    if per_device < 1 or batch_size % micro:
        fits = [n for n in range(1, batch_size + 1) if batch_size % (n * data_parallel) == 0]
        some = ", ".join(map(str, fits[:12])) + (" …" if len(fits) > 12 else "")
        choice = f"choose training.per_device_batch_size from {some}"
        if not fits:
            choice = f"make training.batch_size a multiple of {data_parallel}"
        raise InputError(
            f"training.batch_size={batch_size} is not divisible into micro-batches of "
            f"{per_device} sequences on {data_parallel} data-parallel device(s); {choice}."
        )
    return batch_size // micro


def candidates(batch_size: int, data_parallel: int) -> list[int]:
    """Return the per-device sizes that divide the batch, largest first."""
    if batch_size % data_parallel:
        accumulation(batch_size, 1, data_parallel)
    share = batch_size // data_parallel
    return [n for n in range(share, 0, -1) if share % n == 0]


def lowered(requested: int, batch_size: int, data_parallel: int) -> tuple[int, str]:
    """Return (the largest size that divides the batch and is at most `requested`, why)."""
    size = next((n for n in candidates(batch_size, data_parallel) if n <= requested), 1)
    why = f"the largest that divides {batch_size // data_parallel} sequences per device"
    return size, f"{why}, in place of {requested}"


def within_tokens(sizes: list[int], block_size: int) -> int:
    """Return the first of `sizes` (largest first) with at most CPU_TOKENS tokens per pass."""
    return next((n for n in sizes if n * block_size <= CPU_TOKENS), sizes[-1])


def memory_limit(device: Any) -> int | None:
    """Return the bytes that the allocator may use; None if the backend does not report them (a CPU)."""
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def machine_memory() -> int | None:
    """Return the bytes of main memory per CPU device; None on other backends."""
    if jax.default_backend() != "cpu" or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def check_machine(state: int) -> None:
    """Raise InputError if the state alone is larger than the memory of a CPU's machine, before the kernel's OOM killer
    ends the run."""
    limit = machine_memory()
    if limit is not None and state > limit:
        raise InputError(
            f"the parameters and the optimizer's state take {state / 2**30:.1f} GiB, and this machine has "
            f"{limit / 2**30:.1f} GiB per device. Choose a smaller model (model.depth, model.width), train adapters "
            "(lora.rank=8 with init=RUN), or use a machine with more; `bessemer plan` says what a recipe takes."
        )


def state_bytes(abstract: Any, placed: Any) -> int:
    """Return the bytes of the parameters and the optimizer's state on one device."""
    return sum(row["bytes_per_device"] for row in placement(abstract, placed))


def device_limit(topology: Topology) -> int | None:
    """Return the bytes that a device may use; None if the backend does not report them."""
    return memory_limit(topology.mesh.local_devices[0]) or machine_memory()


def largest_fitting(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """Return the first of `sizes` (largest first) that fits, by bisection; None: none does."""
    low, high = 0, len(sizes)  # sizes[high:] fit
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            high = middle
        else:
            low = middle + 1
    return sizes[high] if high < len(sizes) else None


def without_a_fit(config: Config, state: int, needed: int | None, limit: int | None) -> str:
    """Return the error for a single sequence that does not fit; it names only changes that can help."""
    smaller = ["a smaller model (model.depth, model.width)", "adapters (lora.rank=8 with init=RUN)"]
    spread = "more devices with topology.fsdp=-1"
    if limit is not None and state > limit:
        changes = [*smaller, spread]
    else:
        remat = [] if "block" in config.get("architecture/remat", []) else ["architecture.remat=block"]
        changes = [*remat, "a shorter architecture.block_size", smaller[0], spread]
    takes = f"takes {gib(needed)}" if needed is not None else "does not fit"
    where = f", and a device has {gib(limit)}" if limit is not None else ""
    return (
        f"No micro-batch fits: even one sequence of {config['architecture/block_size']} tokens per pass {takes} "
        f"({gib(state)} of it for parameters and optimizer state){where}. Start a new run with "
        f"{', '.join(changes[:-1])} or {changes[-1]}; `bessemer plan` shows what a recipe takes."
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def step_total(step: Any) -> int | None:
    return step_bytes(step).total if hasattr(step, "memory_analysis") else None


class StepMemory(NamedTuple):
    """Bytes on one device as the compiler plans them. Donated arguments are counted once."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


def step_bytes(compiled: Any) -> StepMemory:
    """Return the memory analysis of a compiled step."""
    memory = compiled.memory_analysis()
    return StepMemory(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )
