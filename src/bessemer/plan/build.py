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
from bessemer.training.setup.compiled import Functions, step_memory
from bessemer.training.setup.model import flops_formula
from bessemer.training.setup.plan import RunPlan, StepHooks

Say = Callable[[str], None]


def make_plan(
    recipe: Any = "quickstart",
    overrides: Overrides = (),
    *,
    compiles: bool = True,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Everything known before the first step, as plain values. Without `compiles` memory and share are None."""
    trainer = planned_trainer(recipe, overrides, compiles=compiles)
    plan, functions, context = trainer.plan, trainer.functions, trainer.context
    with context.topology.scope():
        memory = plan_memory(plan, trainer.hooks, functions, say) if compiles else None
    if compiles:
        say("timing a pass of the model beside a matrix product")
    rate = measure_rate(plan, functions, with_pass=compiles)
    return {
        "recipe": str(recipe) if isinstance(recipe, str | Path) else "given",
        "model": plan_model(plan),
        "derived": context.notes.derived,
        "horizon": plan_horizon(plan, functions, trainer.epochs),
        "flops": plan_flops(plan),
        "optimizer": plan_optimizer(plan, trainer.hooks, functions),
        "devices": context.topology.describe(),
        "memory": memory,
        "time": predict(plan, functions, rate),
        "schedules": sample_curves(functions.optimizer, plan.data.steps),
        "notes": [*context.topology.notes, *context.config.notes, *trainer.said],
    }


def plan_model(plan: RunPlan) -> dict[str, Any]:
    """Family, sizes, and parameters by group; "total" is all of them, "scaling" N."""
    model, settings = plan.model.model, plan.context.settings
    shape = getattr(model, "shape", None)
    sizes: dict[str, Any] = {}
    if isinstance(shape, Shape):
        sizes = {name: getattr(shape, name) for name in ("depth", "width", "heads", "kv_heads", "head_dim")}
    return {
        "family": settings.family,
        **sizes,
        "vocab_size": getattr(model, "vocab_size", None),
        "block_size": settings.block_size,
        "parameters": plan.model.counts,
    }


def plan_horizon(plan: RunPlan, functions: Functions, epochs: float | None) -> dict[str, Any]:
    scaling = plan.model.counts.get("scaling")
    return {
        "steps": plan.data.steps,
        "tokens": plan.tokens,
        "epochs": epochs,
        "tokens_per_scaling_parameter": plan.tokens / scaling if scaling else None,
        "batch_size": plan.data.batch_size,
        "batch_tokens": plan.tokens_per_step,
        "per_device_batch_size": functions.per_device,
        "accumulate_steps": functions.accumulate_steps,
    }


def plan_flops(plan: RunPlan) -> dict[str, Any]:
    return {
        "per_token": plan.model.flops_per_token,
        "per_token_causal": plan.model.flops_per_token_causal,
        "total": plan.flops,
        "formula": flops_formula(plan.model, plan.context.settings.block_size),
    }


def plan_optimizer(plan: RunPlan, hooks: StepHooks, functions: Functions) -> dict[str, Any]:
    """Peak rates and decay by group. Decay is that of step 0; the curves show how it changes."""
    name = plan.context.settings.optimizer or hooks.optimizer()
    return {
        "name": name if isinstance(name, str) else type(name).__name__,
        "groups": optimizer_groups(functions),
    }


def plan_memory(plan: RunPlan, hooks: StepHooks, functions: Functions, say: Say) -> dict[str, Any]:
    """Bytes of one device for the compiled step; `fits` is None where the backend does not report its memory."""
    say("compiling the step, which is what memory is read from (--no-compile skips it)")
    begun = time.monotonic()
    abstract, placed = functions.abstract_state, functions.state_shardings
    memory = step_memory(plan, hooks, abstract, placed, functions.per_device)
    limit = microbatch.memory_limit(jax.local_devices()[0]) or microbatch.machine_memory()
    seconds = time.monotonic() - begun
    say(f"compiled in {seconds:.1f} s")
    facts: dict[str, Any] = {"limit": limit, "compile_seconds": round(seconds, 2)}
    if memory is None:
        return {**facts, "total": None, "fits": False}
    fits = None if limit is None else memory.total <= limit
    return {**facts, **memory._asdict(), "total": memory.total, "fits": fits}
