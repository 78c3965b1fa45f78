"""`bessemer plan --topology NAME`: what a recipe will take on hardware that is not here, as one document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.config import dotted
from bessemer.errors import InputError
from bessemer.plan.absent import MICRO
from bessemer.plan.build import plan_flops, plan_horizon, plan_model
from bessemer.plan.collectives import Collective, describe
from bessemer.plan.compiled import Compiled, Say, compile_step, require_compiler
from bessemer.plan.estimate import (
    Choice,
    Estimate,
    Terms,
    estimate,
    node_of,
    run_cost,
    run_time,
    step_time,
    terms_of,
)
from bessemer.plan.facts import Facts, PlannedStep
from bessemer.plan.target import Target, parse_target
from bessemer.plan.trainer import planned_trainer
from bessemer.topology import AXES, placement
from bessemer.training.launch import Overrides
from bessemer.training.setup.compiled import record_micro_batch
from bessemer.training.setup.microbatch import SPARE, candidates

# Which setting to change: other meshes, micro-batches and remat for the same model on the same chips.


BLOCK = ("block",)
MOST_TENSOR = 8
"""Tensor parallelism beyond this sends more than it computes on every chip of the table."""


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def tried(facts: Facts, choice: Choice, terms: Terms) -> Estimate | None:
    """The estimate, or None where the mesh does not divide the model or the batch."""
    try:
        return estimate(facts, choice, terms)
    except InputError:
        return None


def remedies(facts: Facts, choice: Choice, terms: Terms, limit: float) -> list[dict[str, Any]]:
    """The smallest change of each kind that fits: micro-batch, fsdp, remat, then two of them. Empty: nothing does."""
    axes = choice.axes
    smaller = [n for n in candidates(facts.batch, choice.parallel) if n < choice.rows]
    meshes = [
        {**axes, "fsdp": size, "data": axes["data"] * axes["fsdp"] // size}
        for size in divisors(axes["data"] * axes["fsdp"])
        if size > axes["fsdp"]
    ]
    kinds: list[list[Choice]] = [
        [Choice(axes, rows, choice.remat) for rows in smaller],
        [Choice(mesh, choice.rows, choice.remat) for mesh in meshes],
    ]
    if choice.remat != BLOCK:
        kinds.append([Choice(axes, choice.rows, BLOCK)])
        kinds.append([Choice(axes, rows, BLOCK) for rows in smaller])
        kinds.append([Choice(mesh, rows, BLOCK) for rows in (choice.rows, *smaller) for mesh in meshes])
    found: list[dict[str, Any]] = []
    for kind in kinds:
        best = next((one for c in kind if (one := tried(facts, c, terms)) and one.fits(limit)), None)
        if best is not None:
            found.append({"settings": changes(choice, best.choice), "peak": round(best.memory.peak)})
        if len(found) == 3:
            break
    return found


def changes(before: Choice, after: Choice) -> list[str]:
    """The words that turn one choice into another."""
    words = [f"topology.{axis}={after.axes[axis]}" for axis in AXES if after.axes[axis] != before.axes[axis]]
    if after.rows != before.rows:
        words.append(f"{dotted(MICRO)}={after.rows}")
    if after.remat != before.remat:
        words.append(f"architecture.remat={after.remat[0]}")
    return words


def choices(facts: Facts, remat: tuple[str, ...]) -> Iterator[Choice]:
    """Every mesh of the target's devices that can hold the batch, with every micro-batch.

    Context is tried only where rows do not suffice for all devices: splitting sequences sends keys and values.
    """
    devices = facts.target.devices
    heads = getattr(facts.shape, "heads", 1)
    for tensor in (size for size in divisors(heads) if size <= MOST_TENSOR and devices % size == 0):
        rest = devices // tensor
        crowded = not any(facts.batch % size == 0 and size == rest for size in divisors(rest))
        for context in divisors(rest) if crowded else (1,):
            parallel = rest // context
            if facts.batch % parallel or facts.block % context:
                continue
            for fsdp in divisors(parallel):
                axes = {"data": parallel // fsdp, "fsdp": fsdp, "tensor": tensor, "context": context}
                for rows in candidates(facts.batch, parallel):
                    yield Choice(axes, rows, remat)


@dataclass
class Planned:
    """A planned run with its estimate, before anything is compiled."""

    facts: Facts
    estimate: Estimate
    terms: Terms
    epochs: float | None
    wished_rows: int  # the micro-batch of the recipe, -1 for an open one
    said: list[str]  # notes of setup

    @property
    def target(self) -> Target:
        return self.facts.target

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.target.chip.memory_gib * 2**30

    def time(self, found: tuple[Collective, ...] | None = None) -> dict[str, Any]:
        """The run's time, with the estimate's collectives or those that a compiler planned."""
        plan, made = self.facts.step.plan, self.estimate
        step = step_time(self.target, self.terms, made, made.collectives if found is None else found)
        per_token = plan.model.flops_per_token_causal
        return run_time(step, plan.data.steps, plan.tokens, per_token, self.target, self.facts.precision)


def asked_of(topology: str, compiles: bool) -> tuple[Target, bool]:
    """The target of --topology, and whether its step is compiled: a TPU's, with the compiler at hand."""
    target = parse_target(topology)
    compiles = compiles and target.platform == "tpu"
    if compiles:
        require_compiler(target.name)
    return target, compiles


def make_absent_plan(
    recipe: Any,
    overrides: Overrides = (),
    *,
    topology: str,
    compiles: bool = True,
    quick: bool = False,
    prices: Path | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Everything that is known without the hardware. A TPU's step is compiled unless told otherwise."""
    target, compiles = asked_of(topology, compiles)
    planned = estimated(recipe, overrides, target, prices)
    program = None
    if compiles:
        choice = planned.estimate.choice
        say(
            f"compiling the step for {target.name}, mesh {mesh_words(choice)}, {choice.rows} sequence(s) a device"
        )
        program = compile_step(planned.facts.step, node_of(target, planned.terms), say, quick)
        say(f"compiled in {program.seconds:.0f} s")
    return document(recipe, planned, program)


def estimated(recipe: Any, overrides: Overrides, target: Target, prices: Path | None = None) -> Planned:
    """Build the trainer for the target; an open micro-batch becomes the largest that fits by the estimate."""
    terms = terms_of(target.chip.name, prices)
    trainer = planned_trainer(recipe, overrides, compiles=False, target=target)
    facts = Facts(PlannedStep(trainer.plan, trainer.hooks, trainer.functions), target)
    axes = {axis: int(trainer.topology.mesh.shape[axis]) for axis in AXES}
    rows = trainer.functions.per_device
    first = estimate(facts, Choice(axes, rows, facts.remat), terms)
    planned = Planned(facts, first, terms, trainer.epochs, trainer.wished_rows, trainer.said)
    if not first.fits(planned.limit) and not trainer.config.asked(MICRO):
        _lower(planned, rows)
    return planned


def _lower(planned: Planned, rows: int) -> None:
    """The caller did not set this micro-batch: take the largest that fits, if one does."""
    facts, choice = planned.facts, planned.estimate.choice
    for size in (n for n in candidates(facts.batch, choice.parallel) if n < rows):
        made = tried(facts, Choice(choice.axes, size, choice.remat), planned.terms)
        if made is not None and made.fits(planned.limit):
            room = f"{SPARE:.0%} of a {planned.target.chip.name}"
            wished = "" if planned.wished_rows == -1 else f", in place of {planned.wished_rows}"
            why = f"the largest that fits into {room} by the estimate{wished}"
            record_micro_batch(facts.step.plan.context, size, why)
            functions = facts.step.functions._replace(
                accumulate_steps=made.accumulate, per_device=size, micro=size * choice.parallel
            )
            facts.step = replace(facts.step, functions=functions)
            planned.estimate = made
            return


def document(recipe: Any, planned: Planned, program: Compiled | None) -> dict[str, Any]:
    plan, functions = planned.facts.step.plan, planned.facts.step.functions
    context = plan.context
    found = planned.estimate.collectives if program is None or program.memory is None else program.collectives
    spent = planned.time(found)
    state, placed = functions.abstract_state, functions.state_shardings
    return {
        "recipe": str(recipe) if isinstance(recipe, str | Path) else "given",
        "model": plan_model(plan),
        "derived": context.notes.derived,
        "horizon": plan_horizon(plan, functions, planned.epochs),
        "flops": {**plan_flops(plan), "per_device_step": planned.estimate.flops},
        "devices": context.topology.describe(),
        "method": "analytic" if program is None else "compiled",
        "compile_seconds": None if program is None else round(program.seconds, 1),
        "memory": memory_of(planned, program),
        "collectives": describe(found),
        "bytes_sent_per_step": round(sum(one.sent for one in found)),
        "kept_tensors": kept_rows(planned),
        "time": spent,
        "cost": run_cost(spent["seconds"], planned.target, planned.terms),
        "placement": placement(state.params, placed.params),
        "notes": [*(program.notes if program else ()), *context.config.notes, *planned.said],
    }


def memory_of(planned: Planned, program: Compiled | None) -> dict[str, Any]:
    """Bytes of one device, what fits, and what to change. A compiler's word replaces the estimate's."""
    made = planned.estimate
    parts: dict[str, Any] = {name: round(value) for name, value in asdict(made.memory).items()}
    limit, estimated_peak = planned.limit, made.memory.peak
    if program is None:
        fits = made.fits(limit)
    elif program.memory is not None:
        memory = program.memory
        kept = parts["parameters"] + parts["optimizer"] + parts["other"]
        parts |= {
            "gradients": None,
            "activations": None,
            "workspace": None,
            "temporaries": memory.temporaries,
        }
        parts |= {"batch": max(0, memory.arguments - kept), "peak": memory.total}
        fits = memory.total <= limit
    else:
        limit = program.limit or limit
        parts |= {"peak": None if program.needed is None else round(program.needed)}
        parts |= {"compiler": program.message}
        fits = False
    parts |= {"limit": round(limit), "fits": fits, "estimated_peak": round(estimated_peak)}
    parts["remedies"] = (
        [] if fits else remedies(planned.facts, made.choice, planned.terms, _room(parts, limit))
    )
    return parts


def _room(parts: dict[str, Any], limit: float) -> float:
    """The limit for estimates, where a compiler needed more than the estimate said."""
    peak = parts["peak"]
    return limit if not peak else limit * min(1.0, parts["estimated_peak"] / peak)


def kept_rows(planned: Planned) -> list[dict[str, Any]]:
    """What a micro-batch keeps for its backward pass, the largest first; before tensor and context split it."""
    kept = planned.facts.kept(planned.estimate.choice.remat)
    scale = planned.estimate.choice.rows / kept.rows
    rows = [
        {
            "shape": list(one.shape),
            "dtype": one.dtype,
            "count": one.count,
            "bytes": round(one.bytes * (scale if one.rows else 1)),
        }
        for one in kept.tensors
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def mesh_words(choice: Choice) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in choice.axes.items() if size > 1) or "of one device"
