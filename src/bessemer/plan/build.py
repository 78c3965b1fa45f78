"""A plan as one document: what a recipe derives, and what it will take on the devices at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bessemer.models.shape import Shape
from bessemer.plan.measure import measure_rate, predict
from bessemer.plan.show import sample_curves
from bessemer.plan.trainer import planned_trainer
from bessemer.training.console.output import optimizer_groups
from bessemer.training.launch import Overrides
from bessemer.training.setup import microbatch
from bessemer.training.setup.model import flops_formula
from bessemer.training.trainer import BaseTrainer

Say = Callable[[str], None]


def make_plan(
    recipe: Any = "quickstart",
    overrides: Overrides = (),
    *,
    compiles: bool = True,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Everything known before the first step, as plain values. Without `compiles` memory and share are None."""
    trainer: Any = planned_trainer(recipe, overrides, compiles=compiles)
    with trainer.topology.scope():
        memory = plan_memory(trainer, say) if compiles else None
    if compiles:
        say("timing a pass of the model beside a matrix product")
    rate = measure_rate(trainer, with_pass=compiles)
    return {
        "recipe": str(recipe) if isinstance(recipe, str | Path) else "given",
        "model": plan_model(trainer),
        "derived": trainer.derived,
        "horizon": plan_horizon(trainer),
        "flops": plan_flops(trainer),
        "optimizer": plan_optimizer(trainer),
        "devices": trainer.topology.describe(),
        "memory": memory,
        "time": predict(trainer, rate),
        "schedules": sample_curves(trainer.functions.optimizer, trainer.steps),
        "notes": [*trainer.topology.notes, *trainer.config.notes, *trainer.said],
    }


def plan_model(trainer: BaseTrainer) -> dict[str, Any]:
    """Family, sizes, and parameters by group; "total" is all of them, "scaling" N."""
    shape = getattr(trainer.model, "shape", None)
    sizes: dict[str, Any] = {}
    if isinstance(shape, Shape):
        sizes = {name: getattr(shape, name) for name in ("depth", "width", "heads", "kv_heads", "head_dim")}
    return {
        "family": trainer.settings.family,
        **sizes,
        "vocab_size": getattr(trainer.model, "vocab_size", None),
        "block_size": trainer.settings.block_size,
        "parameters": trainer.model_parts.counts,
    }


def plan_horizon(trainer: BaseTrainer) -> dict[str, Any]:
    tokens, scaling = trainer.steps * trainer.tokens_per_step, trainer.model_parts.counts.get("scaling")
    return {
        "steps": trainer.steps,
        "tokens": tokens,
        "epochs": getattr(trainer, "epochs", None),
        "tokens_per_scaling_parameter": tokens / scaling if scaling else None,
        "batch_size": trainer.data.batch_size,
        "batch_tokens": trainer.tokens_per_step,
        "per_device_batch_size": trainer.config["training/per_device_batch_size"],
        "accumulate_steps": trainer.functions.accumulate_steps,
    }


def plan_flops(trainer: BaseTrainer) -> dict[str, Any]:
    return {
        "per_token": trainer.model_parts.flops_per_token,
        "per_token_causal": trainer.model_parts.flops_per_token_causal,
        "total": trainer.calculate_number_total_flops(),
        "formula": flops_formula(trainer),
    }


def plan_optimizer(trainer: BaseTrainer) -> dict[str, Any]:
    """Peak rates and decay by group. Decay is that of step 0; the curves say how it goes on."""
    name = trainer.settings.optimizer or trainer.optimizer()
    return {
        "name": name if isinstance(name, str) else type(name).__name__,
        "groups": optimizer_groups(trainer),
    }


def plan_memory(trainer: BaseTrainer, say: Say) -> dict[str, Any]:
    """Bytes of one device for the compiled step; `fits` is None where nobody tells how much there is."""
    say("compiling the step, which is what memory is read from (--no-compile skips it)")
    functions, begun = trainer.functions, time.monotonic()
    per_device = trainer.config["training/per_device_batch_size"]
    memory = microbatch.step_memory(trainer, functions.abstract_state, functions.state_shardings, per_device)
    limit = microbatch.memory_limit(jax.local_devices()[0]) or microbatch.machine_memory()
    seconds = time.monotonic() - begun
    say(f"compiled in {seconds:.1f} s")
    facts: dict[str, Any] = {"limit": limit, "compile_seconds": round(seconds, 2)}
    if memory is None:
        return {**facts, "total": None, "fits": False}
    fits = None if limit is None else memory.total <= limit
    return {**facts, **memory._asdict(), "total": memory.total, "fits": fits}
