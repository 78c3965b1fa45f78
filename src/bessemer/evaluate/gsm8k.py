"""GSM8K: grade-school word problems, answered in words with the calculator; `gsm8k:FILE` is the test set."""

from __future__ import annotations

from typing import Any

from bessemer.errors import InputError
from bessemer.evaluate.bundle import evaluate_task, read_rows
from bessemer.evaluate.generative import GENERATIVE
from bessemer.evaluate.tasks import Task
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations


@evaluations.register("gsm8k")
def gsm8k(
    loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None, source: str | None = None
) -> dict[str, Any]:
    """Return the accuracy on rows of `question` and `answer` (the number after ####), JSON lines or gzip."""
    if source is None:
        raise InputError("GSM8K needs its test set: write gsm8k:FILE, with rows of question and answer.")
    task = Task("gsm8k", GENERATIVE, read_rows(source), where=source)
    return evaluate_task(loaded, task, limit=limit, batch_size=batch_size)
