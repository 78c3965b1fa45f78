"""Which setting to change: other meshes, micro-batches and remat for the same model on the same chips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bessemer.config import dotted
from bessemer.errors import InputError
from bessemer.plan.absent import MICRO
from bessemer.plan.estimate import Choice, Estimate, estimate
from bessemer.plan.facts import Facts
from bessemer.plan.prices import Terms
from bessemer.topology import AXES
from bessemer.training.microbatch import candidates

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
