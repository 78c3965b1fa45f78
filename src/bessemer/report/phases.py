"""The report of a job of phases: what each phase was and reached, how all were judged, and where their reports are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.config.bounded import read_json
from bessemer.config.recipes import saved_tree
from bessemer.console import markdown_table
from bessemer.job import RunDirectory, atomic_write
from bessemer.report.summary import MISSING, Summary, clock, count, decimal, summarise

FOLDER = "phases"


def has_phases(run: RunDirectory) -> bool:
    return (run.path / FOLDER).is_dir()


def phases_of(run: RunDirectory) -> list[str]:
    """Names of the phases that were begun, in order: each starts after the one before has ended."""
    folders = [path for path in (run.path / FOLDER).iterdir() if (path / "config.yaml").is_file()]
    named = list(saved_tree(run.config).get("phases") or {}) if run.config.is_file() else []
    return [name for name in named if run.path / FOLDER / name in folders]


def write_phases_report(run: RunDirectory) -> Path:
    """(Re)write RUN/report.md of a job of phases."""
    summary = summarise(run)
    listed = phases_of(run)
    found = [summarise(RunDirectory(run.path / FOLDER / name)) for name in listed]
    lines = [
        f"# {run.name}",
        "",
        f"State: {summary.state}{f' ({message})' if (message := summary.status.get('message')) else ''}.",
        "",
        "## Phases",
        "",
        *markdown_table(
            ("phase", "state", "steps", "tokens", "training time", "validation loss", "report"),
            [_row(phase) for phase in found],
        ),
        "",
        *_judged(run, listed),
    ]
    atomic_write(run.report, "\n".join(lines).rstrip() + "\n")
    return run.report


def _row(phase: Summary) -> tuple[str, ...]:
    name = phase.run.name
    return (
        name,
        phase.state,
        count(phase.step),
        count(phase.last("tokens")),
        clock(phase.training_seconds),
        decimal(phase.last("val_loss")),
        f"[{name}]({FOLDER}/{name}/report.md)",
    )


def _judged(run: RunDirectory, names: list[str]) -> list[str]:
    """A row an evaluation, a column a phase."""
    values: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        for result in _results(run.eval / f"{name}.json"):
            values.setdefault((str(result.get("task")), str(result.get("metric"))), {})[name] = result.get(
                "value"
            )
    if not values:
        return []
    rows = [
        (task, metric, *(decimal(by_phase[name]) if name in by_phase else MISSING for name in names))
        for (task, metric), by_phase in values.items()
    ]
    return ["## Evaluations", "", *markdown_table(("task", "metric", *names), rows)]


def _results(path: Path) -> list[dict[str, Any]]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
