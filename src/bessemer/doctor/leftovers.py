"""Directories and files that belong to no checkpoint: how much they hold, and who removes them."""

from __future__ import annotations

from pathlib import Path

from bessemer.checkpoint import retention
from bessemer.doctor.findings import Diagnosis
from bessemer.job import RunDirectory, RunLock
from bessemer.job.files import TEMPORARY, discard
from bessemer.report.summary import disk_size
from bessemer.report.table import size


def stale_paths(run: RunDirectory) -> list[Path]:
    """Unfinished saves, half-finished deletions, and half-written files of killed processes."""
    files = [path for path in sorted(run.path.glob(".*.tmp")) if TEMPORARY.fullmatch(path.name)]
    return [*(run.checkpoints / name for name in retention.leftovers(run.checkpoints)), *files]


def examine_leftovers(run: RunDirectory, found: Diagnosis, alive: bool) -> None:
    if not run.checkpoints.is_dir():
        return
    for path in stale_paths(run):
        held = size(disk_size(path))
        if alive:
            found.add("leftovers", "note", f"{path.name} ({held}) is being written by the run.")
        else:
            found.add(
                "leftovers",
                "note",
                f"{path.name} ({held}) was left by a process that was killed and is never read.",
                "Resume removes it; so does --fix.",
            )
    for name in retention.set_aside_names(run.checkpoints):
        found.add(
            "leftovers",
            "note",
            f"{name} ({size(disk_size(run.checkpoints / name))}) belongs to another future of the run, which went on "
            "from an earlier step.",
            "It is deleted when the run has saved as far again; renaming it back restores it.",
        )


def remove_stale(run: RunDirectory) -> list[str]:
    """Delete `stale_paths`, and nothing else, while holding the run's lock; returns their names."""
    with RunLock(run, status=False):  # the run itself is not at work
        paths = stale_paths(run)
        for path in paths:
            discard(path)
        return [path.name for path in paths]
