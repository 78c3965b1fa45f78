"""Arithmetic answered in words, with the calculator: `gsm8k:FILE` (grade-school problems) and `arithmetic` (generated
sums, differences and products of small numbers)."""

from __future__ import annotations

import random
from typing import Any

from bessemer.errors import InputError
from bessemer.evaluate.scoring import GENERATIVE
from bessemer.evaluate.tasks import Task, evaluate_task, read_rows
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations

PROBLEMS, SEED = 300, 1337


@evaluations.register("gsm8k")
def gsm8k(
    loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None, source: str | None = None
) -> dict[str, Any]:
    """Return the accuracy on rows of `question` and `answer` (the number after ####), JSON lines or gzip."""
    if source is None:
        raise InputError("GSM8K needs its test set: write gsm8k:FILE, with rows of question and answer.")
    task = Task("gsm8k", GENERATIVE, read_rows(source), where=source)
    return evaluate_task(loaded, task, limit=limit, batch_size=batch_size)


@evaluations.register("arithmetic")
def arithmetic(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Return the accuracy on the same 300 problems each time."""
    task = Task("arithmetic", GENERATIVE, problems(), max_tokens=32)
    return evaluate_task(loaded, task, limit=limit, batch_size=batch_size)


def problems(count: int = PROBLEMS) -> list[dict[str, str]]:
    """Return generated problems, the same ones each time."""
    rng = random.Random(SEED)
    made = []
    for number in range(count):
        a, b, sign = rng.randint(2, 99), rng.randint(2, 99), "+-*"[number % 3]
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        made.append({"question": f"What is {a} {sign} {b}?", "answer": str(value)})
    return made
