"""How many sequences go through the model at once: the largest that fits, found by compiling, never by crashing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from bessemer.errors import InputError, TrainingError
from bessemer.topology import placement

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

CPU_TOKENS = 4096
"""On a CPU a pass of a few thousand tokens keeps the cores busy; more only takes memory and cache."""

SPARE = 0.9
"""Share of the device's memory a step may plan to use."""


def accumulation(batch_size: int, per_device: int, data_parallel: int) -> int:
    """S = batch_size / (per_device · data-parallel devices), exactly."""
    micro = per_device * data_parallel
    if per_device < 1 or batch_size % micro:
        fits = [n for n in range(1, batch_size + 1) if batch_size % (n * data_parallel) == 0]
        choice = (
            f"choose training.per_device_batch_size from {_some(fits)}"
            if fits
            else (f"make training.batch_size a multiple of {data_parallel}")
        )
        raise InputError(
            f"training.batch_size={batch_size} is not divisible into micro-batches of "
            f"{per_device} sequences on {data_parallel} data-parallel device(s); {choice}."
        )
    return batch_size // micro


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (" …" if len(numbers) > 12 else "")


def candidates(batch_size: int, data_parallel: int) -> list[int]:
    """Per-device sizes that divide the batch, largest first."""
    if batch_size % data_parallel:
        accumulation(batch_size, 1, data_parallel)
    share = batch_size // data_parallel
    return [n for n in range(share, 0, -1) if share % n == 0]


def lowered(wished: int, batch_size: int, data_parallel: int) -> tuple[int, str]:
    """(the largest that divides the batch here and is no more than a recipe wishes for, why)."""
    size = next((n for n in candidates(batch_size, data_parallel) if n <= wished), 1)
    why = f"the largest that divides {batch_size // data_parallel} sequences a device"
    return size, f"{why}, in place of {wished}"


def choose(trainer: BaseTrainer, abstract: Any, placed: Any) -> tuple[int, str]:
    """(sequences per device, why)."""
    sizes = candidates(trainer.data.batch_size, trainer.topology.data_parallel)
    block = trainer.settings.block_size
    device = trainer.topology.mesh.local_devices[0]
    limit = memory_limit(device)
    if limit is None:
        size = next((n for n in sizes if n * block <= CPU_TOKENS), sizes[-1])
        return size, f"at most {CPU_TOKENS} tokens a pass on a {device.platform}"
    for size in sizes:
        needed = planned_memory(trainer, abstract, placed, size)
        if needed is not None and needed <= SPARE * limit:
            return size, f"largest that fits: {needed / 2**30:.1f} of {limit / 2**30:.1f} GiB planned"
    raise InputError(
        f"one sequence of {block} tokens does not fit into {limit / 2**30:.1f} GiB. Set architecture.remat=block, "
        "shorten architecture.block_size, or shard the model with topology.fsdp."
    )


def memory_limit(device: Any) -> int | None:
    """Bytes the allocator may use; None where the backend does not say (a CPU)."""
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def machine_memory() -> int | None:
    """Bytes that a device has of the machine's own memory, which is all a CPU has."""
    import jax

    if jax.default_backend() != "cpu" or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def check_machine(trainer: BaseTrainer) -> None:
    """Refuse a model whose state alone is more than a CPU's machine has: allocating it would end not in an error but
    with the system's killer of processes, after minutes in which nothing else on it answers."""
    limit = machine_memory()
    functions = trainer.functions
    state = sum(
        row["bytes_per_device"] for row in placement(functions.abstract_state, functions.state_shardings)
    )
    if limit is not None and state > limit:
        raise InputError(
            f"the parameters and the optimizer's state take {state / 2**30:.1f} GiB, and this machine has "
            f"{limit / 2**30:.1f} GiB for a device. Choose a smaller model (model.depth, model.width), train adapters "
            "(lora.rank=8 with init=RUN), or use a machine with more; `bessemer plan` says what a recipe takes."
        )


def check_step(trainer: BaseTrainer) -> None:
    """The same for the compiled step, whose activations are known only now."""
    limit, step = machine_memory(), trainer.functions.train_step
    if limit is None or not hasattr(step, "memory_analysis"):
        return
    if (needed := step_bytes(step).total) > limit:
        size = trainer.config["training/per_device_batch_size"]
        remedy = (
            f"Continue with: bessemer resume {trainer.run_directory.word} training.per_device_batch_size={size // 2} "
            "(the update stays the same)"
            if size > 1
            else "Begin anew with architecture.remat=block, or a shorter architecture.block_size"
        )
        raise TrainingError(
            f"out of memory before the first step: it takes {needed / 2**30:.1f} GiB, and this machine has "
            f"{limit / 2**30:.1f} GiB for a device. {remedy}."
        )


class StepMemory(NamedTuple):
    """Bytes on one device, as the compiler plans them. What is donated is counted once."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


def planned_memory(trainer: BaseTrainer, abstract: Any, placed: Any, per_device: int) -> int | None:
    """Bytes of the compiled step: arguments + outputs - aliased + temporaries. None: it did not even compile."""
    memory = step_memory(trainer, abstract, placed, per_device)
    return None if memory is None else memory.total


def step_memory(trainer: BaseTrainer, abstract: Any, placed: Any, per_device: int) -> StepMemory | None:
    """Compile the step with that micro-batch, from shapes alone."""
    import jax

    from bessemer.training.feed import abstract_batch
    from bessemer.training.functions import jit_train_step

    dp = trainer.topology.data_parallel
    steps = accumulation(trainer.data.batch_size, per_device, dp)
    batch = abstract_batch(trainer.data.fields, per_device * dp, steps, trainer.topology.batch_sharding(1))
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        compiled = jit_train_step(trainer, placed, steps).lower(abstract, batch, key).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise
    return step_bytes(compiled)


def step_bytes(compiled: Any) -> StepMemory:
    """The memory analysis of a compiled step."""
    memory = compiled.memory_analysis()
    return StepMemory(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )
