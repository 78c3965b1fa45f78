"""`bessemer plan --topology NAME`: what a recipe will take on hardware that is not here, as one document."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.config import dotted
from bessemer.errors import InputError, to_install
from bessemer.kernels.attention import flash_scratch
from bessemer.plan.collectives import Collective, describe
from bessemer.plan.compiled import COMPILERS, Compiled, Say, compile_step, has_compiler, require_libtpu
from bessemer.plan.document import plan_flops, plan_horizon, plan_model, plan_pipeline
from bessemer.plan.estimate import (
    Choice,
    Estimate,
    Facts,
    PlannedStep,
    Terms,
    estimate,
    node_of,
    run_cost,
    run_time,
    step_time,
    terms_of,
)
from bessemer.plan.trainer import MICRO, Target, parse_target, planned_trainer
from bessemer.topology import AXES, placement
from bessemer.training.launch import Overrides
from bessemer.training.setup.microbatch import SPARE, candidates

BLOCK = ("block",)
MOST_TENSOR = 8  # tensor parallelism beyond this sends more than it computes on every chip of the table
COMPILED = 2  # how many of a sweep's best plans are compiled
SHOWN = 10
SWEPT = (*(f"topology.{axis}" for axis in AXES), dotted(MICRO), "architecture.remat")


@dataclass
class Planned:
    """A planned run with its estimate, before anything is compiled."""

    facts: Facts
    estimate: Estimate
    terms: Terms
    epochs: float | None
    requested_rows: int  # the micro-batch of the recipe, -1 for an open one
    lines: list[str]  # printed by setup

    @property
    def target(self) -> Target:
        return self.facts.target

    @property
    def limit(self) -> float:
        """Return the memory of a device in bytes."""
        return self.target.chip.memory_gib * 2**30

    def time(self, found: tuple[Collective, ...] | None = None) -> dict[str, Any]:
        """Return the run's time, with the estimate's collectives or those that a compiler planned."""
        plan, made = self.facts.step.plan, self.estimate
        step = step_time(self.target, self.terms, made, made.collectives if found is None else found)
        per_token = plan.model.flops_per_token_causal
        return run_time(step, plan.data.steps, plan.tokens, per_token, self.target, self.facts.precision)


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
    """Return everything that is known without the hardware. The step is compiled unless `compiles` is False, or the
    hardware is GPUs and their compiler is not installed."""
    target, compiles, notes = asked_of(topology, compiles)
    planned = estimated(recipe, overrides, target, prices)
    choice = planned.estimate.choice
    mesh = " × ".join(f"{axis} {size}" for axis, size in choice.axes.items() if size > 1) or "of one device"
    what = f"the step for {target.name}, mesh {mesh}, {choice.rows} sequence(s) per device"
    return document(recipe, planned, compiled(planned, what, say, quick) if compiles else None, notes)


def asked_of(topology: str, compiles: bool) -> tuple[Target, bool, tuple[str, ...]]:
    """Return the target of --topology, whether its step is compiled, and notes. Without the compiler a TPU's plan is an
    error; a GPU's is analytic, and a note says so."""
    target = parse_target(topology)
    if compiles and target.platform == "tpu":
        require_libtpu(target.name)
    if compiles and not has_compiler(target.platform):
        return target, False, (f"memory and collectives are estimates; to compile the step: {to_install('gpu-plan')}",)
    if compiles and target.platform == "gpu":  # JAX looks for plugins when a device is first asked for
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    return target, compiles, ()


def compiled(planned: Planned, what: str, say: Say, quick: bool) -> Compiled:
    """Compile the planned step, with lines before and after."""
    say(f"compiling {what}")
    program = compile_step(planned.facts.step, node_of(planned.target, planned.terms), say, quick)
    say(f"compiled in {program.seconds:.0f} s" + ("" if program.memory else ": does not fit"))
    return program


def estimated(recipe: Any, overrides: Overrides, target: Target, prices: Path | None = None) -> Planned:
    """Plan for the target; a micro-batch that the caller did not set becomes the largest that fits."""
    terms = terms_of(target.chip.name, prices)
    trainer = planned_trainer(recipe, overrides, compiles=False, target=target)
    facts = Facts(PlannedStep(trainer.plan, trainer.hooks, trainer.functions), target)
    axes = {axis: int(trainer.topology.mesh.shape[axis]) for axis in AXES}
    rows = trainer.config[MICRO]
    first = estimate(facts, Choice(axes, rows, facts.remat), terms)
    planned = Planned(facts, first, terms, trainer.epochs, trainer.requested_rows, trainer.lines)
    if not first.fits(planned.limit) and not trainer.config.asked(MICRO):
        _lower(planned, rows)
    return planned


def _lower(planned: Planned, rows: int) -> None:
    """Take the largest micro-batch that fits, if one does."""
    facts, choice = planned.facts, planned.estimate.choice
    for size in (n for n in candidates(facts.batch, choice.parallel) if n < rows):
        made = tried(facts, Choice(choice.axes, size, choice.remat), planned.terms)
        if made is not None and made.fits(planned.limit):
            room = f"{SPARE:.0%} of a {planned.target.chip.name}"
            requested = "" if planned.requested_rows == -1 else f", in place of {planned.requested_rows}"
            why = f"the largest that fits into {room} by the estimate{requested}"
            facts.step = _with_micro_batch(facts.step, made, why)
            planned.estimate = made
            return


def _with_micro_batch(step: PlannedStep, made: Estimate, why: str) -> PlannedStep:
    """Return the step with the micro-batch of `made`, in its configuration and its functions."""
    context, rows = step.plan.context, made.choice.rows
    context.notes.derive(dotted(MICRO), rows, why)
    context = replace(context, config=context.config.replace({MICRO: rows}, why))
    functions = step.functions._replace(accumulate_steps=made.accumulate, micro=rows * made.choice.parallel)
    return replace(step, plan=replace(step.plan, context=context), functions=functions)


def document(recipe: Any, planned: Planned, program: Compiled | None, notes: Sequence[str] = ()) -> dict[str, Any]:
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
        "pipeline": plan_pipeline(plan),
        "method": "analytic" if program is None else "compiled",
        "compiler": None if program is None else COMPILERS[planned.target.platform],
        "compile_seconds": None if program is None else round(program.seconds, 1),
        "memory": memory_of(planned, program),
        "collectives": describe(found),
        "bytes_sent_per_step": round(sum(one.sent for one in found)),
        "kept_tensors": kept_rows(planned),
        "time": spent,
        "cost": run_cost(spent["seconds"], planned.target, planned.terms),
        "placement": placement(state.params, placed.params),
        "notes": [
            *notes,
            *(program.notes if program else ()),
            *documents_note(planned),
            *context.config.notes,
            *planned.lines,
        ],
    }


def documents_note(planned: Planned) -> list[str]:
    """Return what a document takes where the most documents per row are unknown, as they are without the data."""
    facts, axes = planned.facts, planned.estimate.choice.axes
    shape = facts.shape
    split = any(size > 1 for size in axes.values())
    if shape is None or split or not facts.masked_by_documents or facts.step.model.max_documents:
        return []
    sums = 4 * shape.depth * shape.heads * facts.block
    size = (flash_scratch(1, facts.block, shape.heads, shape.head_dim) + sums) / 2**20
    return [
        f"the data decides how many documents a row holds, and each takes {size:.0f} MiB in cuDNN's attention: one per "
        "row is counted, N with architecture.max_documents=N"
    ]


def memory_of(planned: Planned, program: Compiled | None) -> dict[str, Any]:
    """Return the bytes of one device (a compiler's where there are some), whether they fit, and what to change."""
    made = planned.estimate
    parts: dict[str, Any] = {name: round(value) for name, value in asdict(made.memory).items()}
    limit, estimated_peak = planned.limit, made.memory.peak
    if program is None:
        fits = made.fits(limit)
    elif program.memory is not None:
        memory = program.memory
        kept = parts["parameters"] + parts["optimizer"] + parts["frozen"] + parts["other"]
        parts |= {"gradients": None, "activations": None, "workspace": None, "temporaries": memory.temporaries}
        peak = max(memory.total + parts["attention"], kept + parts["rollout"])
        parts |= {"batch": max(0, memory.arguments - kept), "peak": peak}
        fits = peak <= (limit if planned.target.platform == "tpu" else SPARE * limit)
    else:
        limit = program.limit or limit
        parts |= {"peak": None if program.needed is None else round(program.needed)}
        parts |= {"compiler": program.message}
        fits = False
    parts |= {"limit": round(limit), "fits": fits, "estimated_peak": round(estimated_peak)}
    if parts["peak"]:  # a compiler may need more than the estimate
        limit *= min(1.0, parts["estimated_peak"] / parts["peak"])
    parts["remedies"] = [] if fits else remedies(planned.facts, made.choice, planned.terms, limit)
    return parts


def kept_rows(planned: Planned) -> list[dict[str, Any]]:
    """Return what a micro-batch keeps for its backward pass, largest first, before tensor and context split it."""
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


# --- other meshes, micro-batches and remat for the same model on the same chips ---
def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def tried(facts: Facts, choice: Choice, terms: Terms) -> Estimate | None:
    """Return the estimate, or None if the mesh does not divide the model or the batch."""
    try:
        return estimate(facts, choice, terms)
    except InputError:
        return None


def remedies(facts: Facts, choice: Choice, terms: Terms, limit: float) -> list[dict[str, Any]]:
    """Return the smallest change of each kind that fits: micro-batch, fsdp, remat, then two of them."""
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
    """Return the settings that turn one choice into another."""
    words = [f"topology.{axis}={after.axes[axis]}" for axis in AXES if after.axes[axis] != before.axes[axis]]
    if after.rows != before.rows:
        words.append(f"{dotted(MICRO)}={after.rows}")
    if after.remat != before.remat:
        words.append(f"architecture.remat={after.remat[0]}")
    return words


def choices(facts: Facts, remat: tuple[str, ...]) -> Iterator[Choice]:
    """Yield every mesh of the target's devices that can hold the batch, with every micro-batch. Context is tried only
    if the rows do not suffice for all devices, since splitting sequences sends keys and values; experts and stages stay
    at 1."""
    devices = facts.target.devices
    heads = facts.shape.heads if facts.shape else 1
    for tensor in (size for size in divisors(heads) if size <= MOST_TENSOR and devices % size == 0):
        rest = devices // tensor
        for context in divisors(rest) if facts.batch % rest else (1,):
            parallel = rest // context
            if facts.batch % parallel or facts.block % context:
                continue
            for fsdp in divisors(parallel):
                split = {"fsdp": fsdp, "tensor": tensor, "context": context}
                axes = dict.fromkeys(AXES, 1) | {"data": parallel // fsdp} | split
                for rows in candidates(facts.batch, parallel):
                    yield Choice(axes, rows, remat)


# --- --sweep: meshes and micro-batches by the estimate, the best few by the compiler ---
def make_sweep(
    recipe: Any,
    overrides: Sequence[str],
    *,
    topology: str,
    compiles: bool = True,
    quick: bool = False,
    prices: Path | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Return the document of the fastest plan that fits, with the ranking and the command that uses it.

    The best few by the estimate are compiled, and the fastest that really fits is taken.
    """
    target, compiles, notes = asked_of(topology, compiles)
    fixed = [word for word in overrides if word.partition("=")[0] not in SWEPT]
    spare = [word for word in overrides if word not in fixed]
    if spare:
        raise InputError(f"--sweep chooses {', '.join(spare)} by itself: leave it out, or leave out --sweep.")
    one_chip = replace(target, slices=1, grid=(1,) * len(target.grid))
    alone = [f"topology.{axis}={-1 if axis == 'data' else 1}" for axis in AXES]
    base = estimated(recipe, [*fixed, *alone], one_chip, prices)
    base = replace(base, facts=Facts(base.facts.step, target))  # the facts of one chip answer for all meshes
    rows, count = ranked(base)
    if not rows:
        raise InputError(
            f"none of {count} ways to lay this model on {target.name} fits into "
            f"{target.chip.memory_gib:g} GiB per device: use more devices, a smaller model, "
            "or a shorter architecture.block_size."
        )
    say(f"{count} ways tried by the estimate, {len(rows)} fit")
    start = Choice(dict.fromkeys(AXES, 0), 0, base.facts.remat)
    documents = []
    for choice, _ in rows[: COMPILED if compiles else 1]:
        words = changes(start, choice)
        planned = estimated(recipe, [*fixed, *words], target, prices)
        program = compiled(planned, " ".join(words), say, quick) if compiles else None
        documents.append(document(recipe, planned, program, notes) | {"settings": words})
    fitting = [one for one in documents if one["memory"]["fits"]] or documents
    best = min(fitting, key=lambda one: float(one["time"]["step_seconds"]))
    best["sweep"] = {"tried": count, "fit": len(rows), "best": [row for _, row in rows[:SHOWN]]}
    name = recipe if isinstance(recipe, str) else "RECIPE"
    best["command"] = " ".join(["bessemer train", name, *fixed, *best["settings"]])
    return best


def ranked(base: Planned) -> tuple[list[tuple[Choice, dict[str, Any]]], int]:
    """Return the choices that fit with their rows, by likely step time, and how many were tried. Blocks are recomputed
    only if nothing fits without."""
    count = 0
    for remat in (base.facts.remat, BLOCK):
        rows = []
        for choice in choices(base.facts, remat):
            made = tried(base.facts, choice, base.terms)
            count += 1
            if made is not None and made.fits(base.limit):
                spent = replace(base, estimate=made).time()
                row = {
                    "axes": dict(choice.axes),
                    "per_device_batch_size": choice.rows,
                    "remat": choice.remat[0],
                    "peak": round(made.memory.peak),
                    "step_seconds": spent["step_seconds"],
                    "bound_by": spent["bound_by"],
                }
                rows.append((choice, row))
        if rows:
            return sorted(rows, key=lambda row: _order(*row)), count
    return [], count


def _order(choice: Choice, row: dict[str, Any]) -> tuple[float, ...]:
    """Return the sort key: faster first; among equals (to 1%) fewer ways of splitting and larger passes."""
    axes = choice.axes
    return (float(f"{row['step_seconds']:.2g}"), axes["context"], axes["tensor"], axes["fsdp"], -choice.rows)
