"""Which settings of a run name local files or code, and what becomes of them: see data/places.py and user_code.py.

Data in `eval.evaluations` (core:DIR) stays as written, since its words name results; a resume may give it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.config import Config, dotted
from bessemer.data import Sampling
from bessemer.data.catalog import is_code
from bessemer.data.places import Find, found_again, full_path, relocated, relocated_root
from bessemer.evaluate.names import names_code
from bessemer.selectors import SELECTORS
from bessemer.user_code import located


def _dataset(value: list[list[Sampling]], find: Find) -> list[list[Sampling]]:
    def one(sampling: Sampling) -> Sampling:
        found = relocated(sampling, find)
        return replace(found, name=located(found.name)) if is_code(found.name) else found

    return [[one(sampling) for sampling in mixture] for mixture in value]


def _parts(value: str | list[str], find: Find) -> str | list[str]:
    """Names of registered parts stay; `module:attribute` and `file.py:attribute` are located."""
    if isinstance(value, str):
        return located(value) if ":" in value else value
    return [located(word) if ":" in word else word for word in value]


def _tokenizer(value: str, find: Find) -> str:
    return value if value == "auto" or value.startswith("train:") else find(value)


PATHS: dict[str, Callable[[Any, Find], Any]] = {
    "training/dataset": _dataset,
    "data/tokenizer": _tokenizer,
    "data/root": relocated_root,
    "eval/core_bundle": lambda value, find: find(value),
    "init": lambda value, find: find(value),
    "distill/teacher": lambda value, find: find(value),
    "plugins": lambda value, find: [located(word) for word in value],
    **dict.fromkeys(SELECTORS, _parts),
    "eval/evaluations": lambda value, find: [located(word) if names_code(word) else word for word in value],
    "grpo/rewards": lambda value, find: [replace(spec, name=_parts(spec.name, find)) for spec in value],
}
CODE = ("plugins", *SELECTORS, "eval/evaluations", "grpo/rewards")
"""Settings that name code, which is never looked for elsewhere: another file is other code."""


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
        if key not in (*CODE, *given) and config.get(key):
            as_saved, config.values[key] = (PATHS[key](config[key], find) for find in (str, found_again))
            if config[key] != as_saved:
                config.notes.append(
                    f"{dotted(key)}: what it names is gone, and found again below {Path.cwd()}"
                )
    return config
