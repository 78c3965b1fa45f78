"""Tables of runs: the list of a directory, and a comparison of a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.console import NOTHING, compact, duration, number, show, size, table, with_error
from bessemer.job import RunDirectory
from bessemer.job.directory import STALE_SECONDS
from bessemer.job.runs import list_runs
from bessemer.report.summary import (
    REFUSED,
    Row,
    Summary,
    disk_size,
    headline,
    held_out_remarks,
    summarize,
    training_seconds,
)


def run_rows(root: str | Path) -> list[Row]:
    """Return one row per run under `root`, the most recently active first."""
    rows = []
    for name in list_runs(root):
        summary = summarize(RunDirectory(Path(root) / name))
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
    """Return the rows as text; `age` is the time since the last heartbeat."""
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
    """Return lines that explain unusual states, for below the table."""
    lines = [f"{row['name']} was not read: {row['problem']}" for row in rows if "problem" in row]
    if crashed := ", ".join(row["name"] for row in rows if row["state"] == "crashed"):
        lines.append(f"crashed (resume continues): {crashed}. The status says running, but no process holds the lock.")
    for row in rows:
        if row["state"] == "running" and (age := row["age_seconds"] or 0.0) > STALE_SECONDS:
            lines.append(f"{row['name']} has had no heartbeat for {duration(age)}, though its process holds the lock.")
    return lines


def labels_of(summaries: Sequence[Summary]) -> list[str]:
    """Return the names of the runs; whole paths if two have the same name."""
    names = [summary.run.name for summary in summaries]
    return names if len(set(names)) == len(names) else [str(summary.run.path) for summary in summaries]


def comparison(summaries: Sequence[Summary]) -> str:
    """Return tables of final numbers and of settings that differ, one column per run."""
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
    partial = {key: row for key, row in different.items() if key not in shared}  # another objective, optimizer or model
    for column, label in enumerate(labels):
        own = [f"{key}={show(row[column][1])}" for key, row in partial.items() if row[column][0]]
        lines += [f"Only in some runs, {label} among them: {', '.join(own)}."] if own else []
    return "\n".join(lines).rstrip()


def differing_settings(summaries: Sequence[Summary]) -> dict[str, list[tuple[bool, Any]]]:
    """Return key → (known, value) of each run, for settings that are not the same in all."""
    keys = dict.fromkeys(key for summary in summaries for key in summary.config)
    rows = {key: [(key in summary.config, summary.config.get(key)) for summary in summaries] for key in keys}
    return {key: row for key, row in rows.items() if any(entry != row[0] for entry in row)}


def _result(found: Mapping[str, Any] | None) -> str:
    """Return a headline with its unit: 1.3142 bpb, 96.1% pref. acc."""
    if found is None:
        return NOTHING
    share = str(found["metric"]).endswith("pref_acc")
    return f"{format(found['value'], '.1%') if share else number(found['value'])} {found['unit']}"


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
    ("training time", lambda s: duration(training_seconds(s.rows))),
)
