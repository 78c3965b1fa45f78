"""Flags that are not ours: answered with the setting that does the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from bessemer.config import Schema, recipe_names
from bessemer.config.aliases import VALUE, answer
from bessemer.errors import InputError


def refuse_flags(words: Sequence[str], schema: Callable[[list[str]], Schema] | None = None) -> None:
    """Raise InputError on the first flag in `words`, naming the setting to write instead where there is one.

    `schema` returns the settings of the run that the other words describe; without it the answer cannot depend on
    the selected optimizer or objective.
    """
    for number, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            continue
        name, equals, value = word.partition("=")
        rest = list(words[:number]) + list(words[number + 1 :])
        if not equals and number + 1 < len(words) and _is_value(words[number + 1]):
            value = rest.pop(number)
        raise InputError(_about(name, value or VALUE, rest, schema))


def _about(name: str, value: str, rest: list[str], schema: Callable[[list[str]], Schema] | None) -> str:
    plain = [word for word in rest if not word.startswith("-")]
    run = None
    if schema is not None:
        with contextlib.suppress(InputError):  # another word is wrong too: one mistake at a time
            run = schema(plain)
    key = name.lstrip("-").replace("-", "_")
    if run is not None and key in run:
        return f"'{name}' is a setting, and settings have no dashes: write {key}={value}."
    instead = run.instead(name, value) if run is not None else answer(name, value)
    if instead is None:
        return f"unknown flag '{name}'. Settings are written key=value, without dashes; see --help."
    return f"'{name}' is not a Bessemer flag: {instead}."


def _is_value(word: str) -> bool:
    """True for the word after `--depth` in `--depth 12 quickstart`."""
    if word.startswith("-"):
        return word[1:2].isdigit()
    return "=" not in word and word not in recipe_names() and not word.endswith((".yaml", ".yml"))
