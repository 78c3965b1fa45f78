"""Arithmetic: generated sums, differences and products of small numbers, answered in words."""

from __future__ import annotations

import random
from typing import Any

from bessemer.evaluate.bundle import evaluate_task
from bessemer.evaluate.generative import GENERATIVE
from bessemer.evaluate.tasks import Task
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations

PROBLEMS, SEED = 300, 1337


@evaluations.register("arithmetic")
def arithmetic(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Return the accuracy on the same 300 problems each time."""
    task = Task("arithmetic", GENERATIVE, problems(), max_tokens=32)
    return evaluate_task(loaded, task, limit=limit, batch_size=batch_size)


def problems(count: int = PROBLEMS) -> list[dict[str, str]]:
    rng = random.Random(SEED)
    made = []
    for number in range(count):
        a, b, sign = rng.randint(2, 99), rng.randint(2, 99), "+-*"[number % 3]
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        made.append({"question": f"What is {a} {sign} {b}?", "answer": str(value)})
    return made
