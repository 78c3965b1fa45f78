"""Which checkpoints stay. Deletion renames first: half a directory is never taken for a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from bessemer.job import sync_directory
from bessemer.job.directory import step_name, step_of_name
from bessemer.job.files import discard, storage_error

_LEFTOVER = re.compile(r"step_\d{8,}\.(tmp|deleted)")
_ASIDE = re.compile(r"(step_\d{8,})\.aside")


def superfluous(
    steps: Collection[int], *, newest: int, keep_last: int, keep_every: int, protected: Collection[int]
) -> list[int]:
    """Steps to delete after `newest` was committed.

    Kept: the last `keep_last` (all, when it is 0), every multiple of `keep_every`, the protected ones (the
    best), and always `newest` itself, even where older futures of the run bear higher numbers.
    """
    if keep_last <= 0:
        return []
    kept = set(sorted(steps)[-keep_last:]) | set(protected) | {newest}
    if keep_every > 0:
        kept |= {step for step in steps if step % keep_every == 0}
    return sorted(set(steps) - kept)


def delete(root: Path, step: int) -> None:
    """Out of the list by one rename; what cannot be removed now is a leftover for `remove_leftovers`."""
    doomed = root / f"{step_name(step)}.deleted"
    discard(doomed)
    os.rename(root / step_name(step), doomed)
    sync_directory(root)
    discard(doomed)


def leftovers(root: Path) -> list[str]:
    """Names of unfinished saves and half-finished deletions."""
    return sorted(entry.name for entry in _entries(root) if _LEFTOVER.fullmatch(entry.name))


def set_aside_names(root: Path) -> list[str]:
    """Names of checkpoints that belong to another future of the run."""
    return sorted(entry.name for entry in _entries(root) if _ASIDE.fullmatch(entry.name))


def remove_leftovers(root: Path) -> list[str]:
    """Delete unfinished saves and half-finished deletions; returns their names."""
    names = leftovers(root)
    for name in names:
        discard(root / name)
    return names


def set_aside(root: Path, step: int) -> None:
    """Take a checkpoint out of the list without losing it: another future of the run will replace it."""
    target = root / f"{step_name(step)}.aside"
    discard(target)
    os.rename(root / step_name(step), target)
    sync_directory(root)


def drop_superseded(root: Path, newest: int) -> None:
    """Delete what was set aside, once the run has saved a step at least as far."""
    for entry in _entries(root):
        match = _ASIDE.fullmatch(entry.name)
        if match and (step_of_name(match.group(1)) or 0) <= newest:
            discard(entry)


def final_steps(root: Path) -> list[int]:
    """Steps of all directories with a final name, committed or not, ascending."""
    found = (step_of_name(entry.name) for entry in _entries(root) if entry.is_dir())
    return sorted(step for step in found if step is not None)


def _entries(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("cannot list the checkpoints", error) from error
