"""Many runs at a glance: the list of a directory, and a comparison of a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.console import NOTHING, compact, duration, number, size, table, with_error
from bessemer.job import RunDirectory
from bessemer.job.directory import list_runs
from bessemer.job.lock import STALE_SECONDS
from bessemer.report.summary import (
    REFUSED,
    Row,
    Summary,
    disk_size,
    headline,
    held_out_remarks,
    percent,
    show,
    summarise,
)


def run_rows(root: str | Path) -> list[Row]:
    """One row a run under `root`, the most recently active first."""
    rows = []
    for name in list_runs(root):
        summary = summarise(RunDirectory(Path(root) / name))
        rows.append(
            {
                "name": name,
                "path": str(summary.run.path),
                "state": summary.state,
                "step": summary.step,
                "steps": summary.total_steps,
                "loss": summary.last("loss_smooth"),
                "val_bpb": summary.last("val_bpb"),
                "result": found._asdict() if (found := headline(summary.last)) else None,
                "tok_per_s": summary.typical("time/tok_per_s"),
                "age_seconds": summary.age,
                "size_bytes": disk_size(summary.run.path),
                **({"problem": summary.problems[0]} if summary.state == REFUSED else {}),
            }
        )
    return sorted(rows, key=lambda row: (row["age_seconds"] is None, row["age_seconds"] or 0.0))


def runs_table(rows: Sequence[Row], width: int | None = None) -> str:
    """The rows as text; `age` is the time since the run's last sign of life."""
    cells = [
        (
            row["name"],
            row["state"],
            _progress(row["step"], row["steps"]),
            number(row["loss"], 3),
            _result(row["result"]),
            compact(row["tok_per_s"]),
            duration(row["age_seconds"]),
            size(row["size_bytes"]),
        )
        for row in rows
    ]
    return table(("name", "state", "step", "loss", "result", "tok/s", "age", "size"), cells, width)


def remarks(rows: Sequence[Row]) -> list[str]:
    """Lines below the table, where a state alone would leave the reader with a question."""
    crashed = [row["name"] for row in rows if row["state"] == "crashed"]
    silent = [
        row for row in rows if row["state"] == "running" and (row["age_seconds"] or 0.0) > STALE_SECONDS
    ]
    lines = [f"{row['name']} is not read: {row['problem']}" for row in rows if "problem" in row]
    if crashed:
        lines.append(
            f"crashed (resume continues): {', '.join(crashed)}. The status says running, but no process holds the lock."
        )
    lines += [
        f"{row['name']} has been silent for {duration(row['age_seconds'])}, though its process still holds the lock."
        for row in silent
    ]
    return lines


def labels_of(summaries: Sequence[Summary]) -> list[str]:
    """Names of the runs; whole paths when two have the same name."""
    names = [summary.run.name for summary in summaries]
    return names if len(set(names)) == len(names) else [str(summary.run.path) for summary in summaries]


def comparison(summaries: Sequence[Summary]) -> str:
    """Final numbers, and the settings in which the runs differ, one column a run."""
    labels = labels_of(summaries)
    rows = [(title, *(cell(summary) for summary in summaries)) for title, cell in _NUMBERS]
    lines = [table(("", *labels), rows), *held_out_remarks(summaries, labels), ""]
    different = differing_settings(summaries)
    if not different:
        return "\n".join([*lines, "The settings are the same."])
    shared = {key: row for key, row in different.items() if all(known for known, _ in row)}
    if shared:
        cells = [(key, *(show(value) for _, value in row)) for key, row in shared.items()]
        lines += [table(("setting that differs", *labels), cells), ""]
    for column, label in enumerate(
        labels
    ):  # of another objective, optimizer or model: no difference in one setting
        own = [
            f"{key}={show(row[column][1])}"
            for key, row in different.items()
            if key not in shared and row[column][0]
        ]
        lines += [f"Not in all of them, but in {label}: {', '.join(own)}."] if own else []
    return "\n".join(lines).rstrip()


def differing_settings(summaries: Sequence[Summary]) -> dict[str, list[tuple[bool, Any]]]:
    """Key → (known, value) of each run, where they are not all the same."""
    keys = dict.fromkeys(key for summary in summaries for key in summary.config)
    rows = {key: [(key in summary.config, summary.config.get(key)) for summary in summaries] for key in keys}
    return {key: row for key, row in rows.items() if any(entry != row[0] for entry in row)}


def _result(found: Mapping[str, Any] | None) -> str:
    """The number a run is judged by, with its unit: 1.3142 bpb, 96.1% pref. acc."""
    if found is None:
        return NOTHING
    share = str(found["metric"]).endswith("pref_acc")
    return f"{percent(found['value']) if share else number(found['value'])} {found['unit']}"


def _progress(step: int | None, steps: int | None) -> str:
    if step is None:
        return NOTHING
    return f"{step}/{steps}" if steps is not None else str(step)


def _least_bpb(summary: Summary) -> str:
    best = summary.best("val_bpb")
    return NOTHING if best is None else number(best[0])


def _parameters(summary: Summary) -> str:
    groups = summary.facts.get("parameters")
    return compact(groups.get("total")) if isinstance(groups, dict) else NOTHING


_NUMBERS = (
    ("state", lambda s: s.state),
    ("step", lambda s: _progress(s.step, s.total_steps)),
    ("training loss, smoothed", lambda s: number(s.last("loss_smooth"))),
    ("validation loss", lambda s: number(s.last("val_loss"))),
    ("bits per byte", lambda s: with_error(s.last("val_bpb"), s.last("val_bpb_se"))),
    ("lowest bits per byte", _least_bpb),
    ("parameters", _parameters),
    ("tokens", lambda s: compact(s.last("tokens"))),
    ("FLOPs", lambda s: compact(s.last("total_training_flops"))),
    ("tokens per second", lambda s: compact(s.typical("time/tok_per_s"))),
    ("training time", lambda s: duration(s.training_seconds)),
)
