"""metrics.jsonl: readable, every step once, none missing, and how far it is ahead of the checkpoint."""

from __future__ import annotations

import collections
import itertools
from typing import Any

from bessemer.doctor.findings import Diagnosis
from bessemer.errors import StorageError
from bessemer.job import RunDirectory
from bessemer.report import MetricsFile
from bessemer.report.summary import is_number

Row = dict[str, Any]


def examine_metrics(run: RunDirectory, found: Diagnosis, interval: int | None) -> None:
    """`interval` is the configured distance of rows, when it is known."""
    file = MetricsFile(run.metrics)
    try:
        rows = file.rows()
    except StorageError as error:
        found.add("metrics", "error", str(error))
        return
    for note in file.notes:
        found.add("metrics", "note", note)
    if not rows:
        found.add("metrics", "note", "metrics.jsonl has no rows yet.")
        return
    steps = [int(row["step"]) for row in rows if is_number(row.get("step"))]
    doubled = doubled_steps(rows)
    if doubled:
        found.add("metrics", "warning", f"metrics.jsonl has rows twice, of {_steps(doubled)}.")
    if any(later < earlier for earlier, later in itertools.pairwise(steps)):
        found.add("metrics", "warning", "the steps in metrics.jsonl do not ascend.")
    trained = sorted({int(row["step"]) for row in rows if "loss" in row and is_number(row.get("step"))})
    gaps = missing_spans(trained, interval, found.step)
    if gaps:
        spans = ", ".join(f"{first} and {last}" for first, last in gaps[:3])
        found.add(
            "metrics", "warning", f"rows are missing between the steps {spans}{' …' if gaps[3:] else ''}."
        )
    if not doubled and not gaps:
        found.add("metrics", "ok", f"{len(rows)} rows up to step {max(steps, default=0)}.")
    beyond = [step for step in steps if found.step is not None and step > found.step]
    if beyond:
        found.add(
            "metrics",
            "note",
            f"{len(beyond)} rows are beyond step {found.step}.",
            "Resume removes them and writes them again.",
        )


def doubled_steps(rows: list[Row]) -> list[int]:
    """Steps of which a number is given twice. A training row and a validation row of one step have none in common."""
    seen = collections.Counter(
        (int(row["step"]), name)
        for row in rows
        if is_number(row.get("step"))
        for name in ("loss", "val_loss")
        if name in row
    )
    return sorted({step for (step, _), count in seen.items() if count > 1})


def missing_spans(steps: list[int], interval: int | None, saved: int | None) -> list[tuple[int, int]]:
    """(a, b): neighbouring rows further apart than the interval and than is usual in the file.

    The interval may have been changed by a resume, so the usual distance counts too. The checkpoint at `saved`
    was taken after its rows were written.
    """
    apart = collections.Counter(later - earlier for earlier, later in itertools.pairwise(steps))
    usual = max(interval or 1, apart.most_common(1)[0][0] if apart else 1)
    marks = [0, *steps]
    spans = [(a, b) for a, b in itertools.pairwise(marks) if b - a > usual]
    if saved is not None and saved - marks[-1] > usual:
        spans.append((marks[-1], saved))
    return spans


def _steps(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
    return f"step {shown}" if len(steps) == 1 else f"the steps {shown}"
