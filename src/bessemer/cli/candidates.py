"""What shell completion offers: recipes, settings and their values, names of runs. Nothing here imports jax.

The settings are those of `settings.json`, which `make reference` writes from their declarations.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from bessemer.config import recipe_names
from bessemer.errors import BessemerError

Items = list[CompletionItem]

FILES, NOTHING = "file", "none"
"""Types of an item that the scripts of `completion.py` know besides "plain"."""

RUNS_OR_RECIPES = ("init", "distill.teacher")
"""Settings whose value is a run, a model folder or recipe:NAME."""


class Known(NamedTuple):
    """A setting as completion sees it. `values`: its choices, if it has any; `text`: any text, such as a file."""

    help: str
    values: list[str]
    text: bool
    many: bool


@functools.cache
def known_settings() -> dict[str, Known]:
    """Return dotted name → setting, of every part of the package."""
    text = resources.files("bessemer.cli").joinpath("settings.json").read_text(encoding="utf-8")
    return {name: Known(**facts) for name, facts in json.loads(text).items()}


def complete_words(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions of a word of `[RECIPE] [key=value ...]`: recipes, sections, settings, values."""
    return [*_recipes(incomplete), *complete_settings(context, parameter, incomplete)]


def complete_settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions of `section.key=value`; without a dot, of the sections."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return _values(key, value, _root(context))
    settings = known_settings()
    found = [_item(f"{name}=", one.help) for name, one in settings.items() if name.startswith(key)]
    if "." in key:
        return found
    sections: dict[str, list[str]] = {}
    for name in settings:
        section, dot, rest = name.partition(".")
        if dot and section.startswith(key):
            sections.setdefault(section, []).append(rest)
    top = [item for item in found if "." not in item.value]
    return [*top, *(_item(f"{name}.", _summary(names)) for name, names in sections.items())]


def complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions of a run: its name below --runs, or its path; else files."""
    root = _root(context)
    names = [*_runs(root, ""), *_runs(root, f"{root.rstrip('/')}/" if "/" in incomplete else "")]
    found = [_item(name, "") for name in dict.fromkeys(names) if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type=FILES)]


def _recipes(incomplete: str) -> Iterator[CompletionItem]:
    if "=" in incomplete:
        return
    yield from (_item(name, "recipe") for name in recipe_names() if name.startswith(incomplete))
    if "/" in incomplete or incomplete.startswith("."):
        yield CompletionItem(incomplete, type=FILES)


def _values(key: str, value: str, root: str) -> Items:
    setting = known_settings().get(key)
    if setting is None:
        return [CompletionItem("", type=NOTHING)]
    choices: Iterable[str] = setting.values
    if key in RUNS_OR_RECIPES:
        choices = [*_runs(root, f"{root.rstrip('/')}/"), *(f"recipe:{name}" for name in recipe_names())]
    head = ""
    if setting.many and "[" in value:  # callbacks=[goal,early → the last one
        last = max(value.rfind("["), value.rfind(",")) + 1
        head, value = value[:last], value[last:]
    found = [_item(f"{key}={head}{choice}", setting.help) for choice in choices if choice.startswith(value)]
    if found:
        return found
    return [CompletionItem(f"{key}={value}", type=FILES if setting.text else NOTHING)]


def _root(context: click.Context) -> str:
    return str(context.params.get("root") or "runs")


def _runs(root: str, prefix: str) -> list[str]:
    """Return the names of the runs below `root`, each after `prefix`; [] if they cannot be listed."""
    from bessemer.job.directory import check_run_name
    from bessemer.job.runs import list_runs

    def nameable(name: str) -> bool:
        try:
            return bool(check_run_name(name))
        except BessemerError:
            return False

    try:
        return [f"{prefix}{name}" for name in list_runs(root) if nameable(name)]
    except (BessemerError, OSError, ValueError):
        return []


def _item(value: str, help: str) -> CompletionItem:
    return CompletionItem(value, help=re.sub(r"\s+", " ", help) or None)


def _summary(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", … ({len(names)})" if len(names) > 4 else "")
