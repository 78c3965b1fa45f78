"""Local paths that a run's settings name, from whatever directory they are read again.

When a run starts, a relative name becomes the full path of what it means there, and so stands in config.yaml. When a
saved path is gone because the whole folder was moved, its longest tail below the current directory is taken.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable
from pathlib import Path

from bessemer.data.mixture import Sampling
from bessemer.data.store import is_store
from bessemer.job.remote import is_remote
from bessemer.registry import datasets

Find = Callable[[str], str]


def full_path(name: str) -> str:
    """The full path of what is here under that name; any other word (s3://…, ~/x, a registered name) as it is."""
    if Path(name).is_absolute() or not is_there(name):
        return name
    here = str(Path.cwd())
    if Path(name).exists():
        return str(Path(here, name))
    return name if ":" in here else str(Path(glob.escape(here), name))  # a colon means code: module:attribute


def found_again(name: str) -> str:
    """A full path that is gone, as the longest tail of it that is below the current directory; else as it is."""
    parts = Path(name).parts
    if not Path(name).is_absolute() or is_there(name):
        return name
    tails = (str(Path(*parts[start:])) for start in range(1, len(parts)))
    return full_path(next(filter(is_there, tails), name))


def is_there(name: str) -> bool:
    """Whether a file, a directory, or at least one match of a pattern is there; nothing is no name."""
    if not name.strip():
        return False
    return Path(name).exists() or (glob.has_magic(name) and any(glob.iglob(name, recursive=True)))


def relocated(sampling: Sampling, find: Find) -> Sampling:
    """The sampling with its name as `find` finds it. A registered name stays one, unless a store is called so."""
    whole = sampling.name + sampling.suffix
    if sampling.name in datasets and not is_store(Path(whole)):
        return sampling
    found = find(whole)
    if found == whole:
        return sampling
    return dataclasses.replace(sampling, name=found.removesuffix(sampling.suffix))


def relocated_root(root: str, find: Find) -> str:
    """data.root as `find` finds it: a full path even of what is not there, as it is made then; an address is refused
    elsewhere. A directory that holds no stores is another one."""
    if is_remote(root):
        return root
    whole = str(Path(root).expanduser().absolute())
    found = find(whole)
    return found if (Path(found) / "stores").is_dir() else whole
