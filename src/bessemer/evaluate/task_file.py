"""Tasks from files: JSON lines, plain or gzip.

A task of its own has a header as its first line, and is then named by its path:

    {"task": "capitals", "kind": "multiple_choice", "fewshot": 2, "delimiter": " ", "random_baseline": 0.25}
    {"query": "The capital of France is", "choices": ["Rome", "Paris", "Oslo", "Bonn"], "gold": 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.data.readers import Raw, read_file_rows
from bessemer.data.sources import file_of
from bessemer.errors import InputError
from bessemer.evaluate.tasks import Task, run_task
from bessemer.generate import LoadedModel

SUFFIXES = (".jsonl", ".jsonl.gz")
HEADER = {
    "task": str,
    "kind": str,
    "fewshot": int,
    "delimiter": str,
    "separator": str,
    "random_baseline": (int, float),
    "max_tokens": int,
}
RENAMED = {"task": "name", "random_baseline": "baseline"}


def is_task_file(name: str) -> bool:
    return name.endswith(SUFFIXES)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """One object a line; empty lines are passed over, anything else is an error with its line."""
    rows = []
    for row in read_file_rows(file_of(Path(path))):
        if not isinstance(row, Raw):
            raise InputError(f"{row}.")
        if not isinstance(row.value, dict):
            raise InputError(f"{row.where()} is not a JSON object.")
        rows.append(row.value)
    return rows


def read_task(path: str | Path) -> Task:
    """The task that a file with a header describes."""
    path = Path(path)
    rows = read_rows(path)
    if not rows or "kind" not in rows[0]:
        raise InputError(
            f"{path} does not begin with a header, so it does not say how its examples are asked. Put one in its "
            'first line: {"task": "NAME", "kind": "multiple_choice"}.'
        )
    header = rows[0]
    for name, value in header.items():
        if name not in HEADER:
            raise InputError(f"{path}: unknown word '{name}' in the header. Known: {', '.join(HEADER)}.")
        if not isinstance(value, HEADER[name]):  # type: ignore[arg-type]
            raise InputError(f"{path}: '{name}' in the header is {value!r}.")
    return Task(examples=rows[1:], where=str(path), **task_options({"task": stem(path), **header}))


def task_options(header: Mapping[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(name, name): value for name, value in header.items()}


def stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def evaluate_task(
    loaded: LoadedModel, task: Task, *, limit: int | None = None, batch_size: int | None = None
) -> dict[str, Any]:
    """One task as an evaluation of its own."""
    found = run_task(loaded, task, limit=limit, batch_size=batch_size)
    return {"metric": "accuracy", "value": found["accuracy"], "kind": task.kind, **found}
