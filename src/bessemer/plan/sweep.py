"""`bessemer plan --topology NAME --sweep`: meshes and micro-batches by the estimate, the best few by the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.plan.absent_plan import BLOCK, Planned, asked_of, changes, choices, document, estimated, tried
from bessemer.plan.compiled import Say, compile_step
from bessemer.plan.estimate import Choice, node_of
from bessemer.plan.facts import Facts
from bessemer.plan.target import Target
from bessemer.topology import AXES

COMPILED = 2
"""How many of the best are compiled."""

SHOWN = 10
SWEPT = (*(f"topology.{axis}" for axis in AXES), "training.per_device_batch_size", "architecture.remat")


@dataclass(frozen=True)
class Row:
    """One way to run it."""

    choice: Choice
    peak: float
    step: float
    bound_by: str


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
    """The fastest plans that fit, and the document of the best with the command that uses it."""
    target, compiles = asked_of(topology, compiles)
    fixed = [word for word in overrides if word.partition("=")[0] not in SWEPT]
    spare = [word for word in overrides if word not in fixed]
    if spare:
        raise InputError(f"--sweep chooses {', '.join(spare)} by itself: leave it out, or leave out --sweep.")
    base = _base(recipe, fixed, target, prices)
    rows, count = ranked(base)
    if not rows:
        raise InputError(
            f"none of {count} ways to lay this model on {target.name} fits into "
            f"{target.chip.memory_gib:g} GiB a device: use more devices, a smaller model, "
            "or a shorter architecture.block_size."
        )
    say(f"{count} ways tried by the estimate, {len(rows)} fit")
    best = _settle(recipe, fixed, rows, target, prices, compiles, quick, say, base)
    best["sweep"] = {"tried": count, "fit": len(rows), "best": [describe_row(row) for row in rows[:SHOWN]]}
    best["command"] = command(recipe, fixed, best)
    return best


def _base(recipe: Any, fixed: list[str], target: Target, prices: Path | None) -> Planned:
    """Plan for one chip of that kind; its facts answer for all of them."""
    one = replace(target, slices=1, grid=(1,) * len(target.grid))
    alone = [f"topology.{axis}={-1 if axis == 'data' else 1}" for axis in AXES]
    planned = estimated(recipe, [*fixed, *alone], one, prices)
    return replace(planned, facts=Facts(planned.facts.step, target))


def ranked(base: Planned) -> tuple[list[Row], int]:
    """Those that fit, by likely step time; blocks are recomputed only where nothing fits without. (rows, tried)."""
    count = 0
    for remat in (base.facts.remat, BLOCK):
        rows = []
        for choice in choices(base.facts, remat):
            made = tried(base.facts, choice, base.terms)
            count += 1
            if made is None or not made.fits(base.limit):
                continue
            spent = replace(base, estimate=made).time()
            rows.append(Row(choice, made.memory.peak, spent["step_seconds"], spent["bound_by"]))
        if rows:
            return sorted(rows, key=_order), count
    return [], count


def _order(row: Row) -> tuple[float, ...]:
    """Faster first; among equals (to 1%) fewer ways of splitting and larger passes."""
    axes = row.choice.axes
    return (float(f"{row.step:.2g}"), axes["context"], axes["tensor"], axes["fsdp"], -row.choice.rows)


def _settle(
    recipe: Any,
    fixed: list[str],
    rows: list[Row],
    target: Target,
    prices: Path | None,
    compiles: bool,
    quick: bool,
    say: Say,
    base: Planned,
) -> dict[str, Any]:
    """The document of the best; on a TPU the best few are compiled and the fastest that really fits is taken."""
    start = Choice(dict.fromkeys(AXES, 0), 0, base.facts.remat)
    documents = []
    for row in rows[: COMPILED if compiles else 1]:
        planned = estimated(recipe, [*fixed, *changes(start, row.choice)], target, prices)
        program = None
        if compiles:
            say(f"compiling {' '.join(changes(start, row.choice))}")
            program = compile_step(planned.facts.step, node_of(target, planned.terms), say, quick)
            say(f"compiled in {program.seconds:.0f} s" + ("" if program.memory else ": does not fit"))
        documents.append(document(recipe, planned, program) | {"settings": changes(start, row.choice)})
    fitting = [one for one in documents if one["memory"]["fits"]] or documents
    return min(fitting, key=lambda one: float(one["time"]["step_seconds"]))


def describe_row(row: Row) -> dict[str, Any]:
    return {
        "axes": dict(row.choice.axes),
        "per_device_batch_size": row.choice.rows,
        "remat": row.choice.remat[0],
        "peak": round(row.peak),
        "step_seconds": row.step,
        "bound_by": row.bound_by,
    }


def command(recipe: Any, fixed: list[str], best: dict[str, Any]) -> str:
    """What to type on that hardware."""
    name = recipe if isinstance(recipe, str) else "RECIPE"
    return " ".join(["bessemer train", name, *fixed, *best["settings"]])
