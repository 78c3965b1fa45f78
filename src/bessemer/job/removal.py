"""Deleting a run: only a run, never one at work, and never through a link."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from bessemer.config.recipes import read_yaml
from bessemer.errors import InputError
from bessemer.job.directory import RunDirectory, find_run, list_runs
from bessemer.job.lock import RunLock
from bessemer.storage.files import discard, storage

PHASES = "phases"
BESIDE = {"model-hf", "profile", "report.html", "starts", "tensorboard", PHASES}
"""What runs write besides the paths of RunDirectory."""


def removable(name: str, root: str | Path = "runs") -> RunDirectory:
    """Return the run of this name or path if it may be deleted; otherwise raise InputError with the reason."""
    run = find_run(
        name, root, trust=True
    )  # links inside are no reason to keep a run: they are never followed
    if run.path.is_symlink():
        raise InputError(
            f"{run.path} is a link to {os.readlink(run.path)}. Give the run's own path, or delete the link with rm."
        )
    if not _was_made_here(run):
        raise InputError(
            f"{run.path} is not a run directory: neither its config.yaml nor its status.json was written by a run. "
            "Nothing was deleted."
        )
    if Path.cwd().is_relative_to(run.path.resolve()):
        raise InputError(f"{run.path} contains the current directory. Change to another directory first.")
    if nested := [name for name in list_runs(run.path) if name not in written_by_runs(run)]:
        raise InputError(
            f"{run.path} contains other runs ({', '.join(nested[:5])}). Delete those by name first."
        )
    for one in (run, *(RunDirectory(run.path / PHASES / name) for name in list_runs(run.path / PHASES))):
        if _is_plain(one.lock):
            RunLock.check_free(one)
    return run


def strangers(run: RunDirectory) -> list[str]:
    """Names in the directory that no run writes: somebody's own files, which would be deleted too."""
    return sorted({entry.name for entry in run.path.iterdir()} - written_by_runs(run))


def written_by_runs(run: RunDirectory) -> set[str]:
    """Names at the top of a run directory that belong to the run."""
    properties = [name for name, value in vars(RunDirectory).items() if isinstance(value, property)]
    paths = [getattr(run, name) for name in properties]
    return BESIDE | {path.name for path in paths if isinstance(path, Path)}


def described(run: RunDirectory) -> str:
    """`stopped, step 20, ` from status.json; nothing where it cannot be read."""
    try:
        status = run.read_status() if _is_plain(run.status) else {}
    except InputError:
        return ""
    return f"{status['state']}, step {status.get('step', '?')}, " if "state" in status else ""


def dependents(run: RunDirectory) -> list[str]:
    """Names of runs beside this one that start from it or learn from it: adapters need their base model."""
    return [
        name
        for name in list_runs(run.path.parent)
        if name != run.name and any(_lies_in(value, run.path) for value in _named(run.path.parent / name))
    ]


def remove(run: RunDirectory) -> None:
    """Delete the directory while holding its lock. Links inside are removed; what they point to is not touched."""
    if not _is_plain(run.lock):
        discard(run.lock)  # a link or a pipe: locking would follow it
    with RunLock(run, status=False), storage(f"cannot delete {run.path}"):
        shutil.rmtree(run.path)


def _was_made_here(run: RunDirectory) -> bool:
    try:
        state = run.read_status().get("state") if _is_plain(run.status) else None
        return state is not None or "provenance" in _tree(run)
    except InputError:
        return False


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _tree(run: RunDirectory) -> dict[str, Any]:
    """config.yaml as written: nothing that it refers to is looked up."""
    return read_yaml(run.config, "saved configuration") if _is_plain(run.config) else {}


def _named(path: Path) -> list[Any]:
    try:
        tree = _tree(RunDirectory(path))
    except InputError:
        return []
    distill = tree.get("distill")
    return [tree.get("init"), distill.get("teacher") if isinstance(distill, dict) else None]


def _lies_in(value: Any, path: Path) -> bool:
    return isinstance(value, str) and Path(value).is_absolute() and Path(value).is_relative_to(path)
