"""Find, list and delete runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from bessemer.config.aliases import on_hub
from bessemer.config.recipes import read_yaml
from bessemer.errors import InputError, did_you_mean
from bessemer.job.directory import RunDirectory, RunLock
from bessemer.job.trust import check_links
from bessemer.storage.files import discard, storage

PHASES = "phases"
BESIDE = {
    "logs": "Output of each process of `bessemer launch local`.",
    "model-hf": "The final weights in the layout of transformers, with `save_pretrained`.",
    "profile": "A profile of JAX, with `callbacks=[profiler]`.",
    "report.html": "The report in one file, by `bessemer report --html`.",
    "starts": "The addresses that the processes of `bessemer launch local` agreed on, per start.",
    "tensorboard": "Events of TensorBoard, with `logging.tensorboard=true`.",
    PHASES: "The run of each phase, where the job has phases (`demo`).",
}
"""What runs write besides the paths of RunDirectory."""


def find_run(name_or_path: str | Path, runs_root: str | Path = "runs", *, trust: bool = False) -> RunDirectory:
    """Return the run at a path, or of a name under `runs_root`; otherwise raise InputError with what is there.

    A run that holds links out of its directory, or pipes and devices, is refused (job/trust.py) unless it is trusted.
    """
    text = str(name_or_path)
    root = Path(runs_root)
    candidates = [Path(text)] if os.sep in text else [root / text, Path(text)]
    for candidate in candidates:
        run = RunDirectory(candidate)
        if candidate.is_dir() and (run.exists() or run.model.is_dir()):
            if not trust:
                check_links(run.path, run=run)
            return run
    if (folder := next((path for path in candidates if (path / "config.json").is_file()), None)) is not None:
        raise InputError(
            f"{folder} holds a model's weights and is not a run. Of a Hugging Face folder `bessemer import {folder} "
            f"{root / folder.name}` makes one; to train from it, start a new run with init={folder}"
        )
    names = list_runs(root)
    hint = did_you_mean(Path(text).name, names)
    known = f" Runs there: {', '.join(names[:10])}{' …' if len(names) > 10 else ''}." if names else ""
    if hub := on_hub(text):
        hint = (
            f" A model of the Hugging Face hub is named {hub} where a run starts from it (init); to use it as it is, "
            f"make it a run with: bessemer import {hub} {root / Path(text).name}."
        )
    tried = " and ".join(str(candidate) for candidate in candidates)
    raise InputError(f"no run '{text}' (looked at {tried}).{hint}{known} `--runs DIR` says where runs are.")


def list_runs(runs_root: str | Path = "runs") -> list[str]:
    """Return the names of the runs under a directory, sorted."""
    root = Path(runs_root)
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and RunDirectory(entry).exists())


# Deletion: only of a run, never of one that is running, and never through a link.


def removable(name: str, root: str | Path = "runs") -> RunDirectory:
    """Return the run of this name or path if it may be deleted; otherwise raise InputError with the reason."""
    run = find_run(name, root, trust=True)  # links inside do not prevent deletion: they are never followed
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
        raise InputError(f"{run.path} contains other runs ({', '.join(nested[:5])}). Delete those by name first.")
    for one in (run, *(RunDirectory(run.path / PHASES / name) for name in list_runs(run.path / PHASES))):
        if _is_plain(one.lock):
            RunLock.check_free(one)
    return run


def strangers(run: RunDirectory) -> list[str]:
    """Names in the directory that no run writes: somebody's own files, which would be deleted too."""
    return sorted({entry.name for entry in run.path.iterdir()} - written_by_runs(run))


def written_by_runs(run: RunDirectory) -> set[str]:
    """Names at the top of a run directory that belong to the run."""
    return run.names().union(BESIDE)


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
