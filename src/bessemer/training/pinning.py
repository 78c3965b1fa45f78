"""Which settings of a run name local files, and what becomes of them: see data/places.py.

`eval.evaluations` stays as written, since its words name results; a resume may give it anew, as all of `eval.*`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bessemer.config import Config, dotted
from bessemer.data.places import Find, found_again, full_path, relocated, relocated_root


def _tokenizer(value: str, find: Find) -> str:
    return value if value == "auto" or value.startswith("train:") else find(value)


PATHS: dict[str, Callable[[Any, Find], Any]] = {
    "training/dataset": lambda value, find: [[relocated(one, find) for one in mixture] for mixture in value],
    "data/tokenizer": _tokenizer,
    "data/root": relocated_root,
    "eval/core_bundle": lambda value, find: find(value),
    "init": lambda value, find: find(value),
    "distill/teacher": lambda value, find: find(value),
    "plugins": lambda value, find: [find(word) if word.endswith(".py") else word for word in value],
}


def pinned(config: Config) -> Config:
    """The configuration of a new run, with full paths. Each origin stays: the values are the caller's."""
    for key in PATHS:
        if config.get(key):
            config.values[key] = PATHS[key](config[key], full_path)
    return config


def refound(config: Config, given: Collection[str] = ()) -> Config:
    """A saved configuration, with paths that are gone found again, each with a note; those `given` now are meant as
    they are, and code is never looked for."""
    for key in PATHS:
        if key != "plugins" and key not in given and config.get(key):
            as_saved, config.values[key] = (PATHS[key](config[key], find) for find in (str, found_again))
            if config[key] != as_saved:
                config.notes.append(
                    f"{dotted(key)}: what it names is gone, and found again below {Path.cwd()}"
                )
    return config
