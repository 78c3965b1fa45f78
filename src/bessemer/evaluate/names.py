"""Which evaluation a word names: a registered one (`bpb`), one with its data (`core:DIR`), a task file (`my.jsonl`), or
a function of the user's (`file.py:function`, `module:function`).

The trait `by_source` of an evaluation says that its data is part of what a result is called.
Code is loaded for words that the user typed, or of a run that job/trust.py has admitted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bessemer.errors import InputError, nearest
from bessemer.evaluate.task_file import SUFFIXES, evaluate_task, is_task_file, read_task
from bessemer.registry import evaluations
from bessemer.user_code import is_known, load_attribute
from bessemer.user_code import label as code_label

LISTS = "harness:"


class Chosen(NamedTuple):
    """`run(loaded, limit=, batch_size=)` gives plain values with `metric` and `value`."""

    label: str
    run: Callable[..., dict[str, Any]]


def split_tasks(text: str) -> list[str]:
    """Words between commas; those after `harness:` that are none of ours are its tasks: harness:piqa,copa,bpb."""
    words: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        ours = is_file(word) or ".py:" in word or word.partition(":")[0] in evaluations
        if words and words[-1].startswith(LISTS) and not ours:
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


def check_tasks(tasks: Sequence[str]) -> list[str]:
    """The names without repetition; an unknown one lists what there is."""
    names = [name.strip() for name in tasks if name.strip()]
    if not names:
        raise InputError(f"no task is named. Known: {known()}.")
    for name in names:
        if is_file(name):
            if not Path(name).is_file():
                raise InputError(f"there is no task file '{name}'.")
            continue
        if names_code(name) and is_known(name.rpartition(":")[0]):
            _own_evaluation(name)
            continue
        word, colon, source = name.partition(":")
        if word not in evaluations:
            close = nearest(word, evaluations.names())
            hint = f" Did you mean '{close}'?" if close else ""
            raise InputError(f"unknown evaluation '{name}'.{hint} Known: {known()}.")
        if colon and (not source or "source" not in inspect.signature(evaluations.get(word)).parameters):
            reason = "takes nothing" if source else "has nothing"
            raise InputError(f"'{name}': {word} {reason} after the colon.")
    return list(dict.fromkeys(names))


def is_file(name: str) -> bool:
    """pets.jsonl is one, gsm8k:test.jsonl is an evaluation with its data."""
    return is_task_file(name) and name.partition(":")[0] not in evaluations


def names_code(name: str) -> bool:
    """my_eval.py:score is a function, gsm8k:test.jsonl an evaluation with its data."""
    return ":" in name and not is_file(name) and name.partition(":")[0] not in evaluations


def _own_evaluation(name: str) -> Callable[..., dict[str, Any]]:
    """The user's function; what cannot be called as an evaluation is refused before anything is measured."""
    function = load_attribute(name, evaluations.kind)
    try:
        inspect.signature(function).bind(None, limit=None, batch_size=None)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"'{name}' is not an evaluation, which is a function (loaded, *, limit=None, batch_size=None): {error}. "
            f"Known: {known()}."
        ) from error
    return function


def known() -> str:
    return f"{', '.join(evaluations.names())}, task files ({' or '.join(SUFFIXES)}), and file.py:function"


def choose(name: str) -> Chosen:
    """What a checked name stands for."""
    if is_file(name):
        task = read_task(name)

        def run(loaded: Any, **options: Any) -> dict[str, Any]:
            return evaluate_task(loaded, task, **options)

        return Chosen(task.name, run)
    if names_code(name):
        return Chosen(code_label(name), _own_evaluation(name))
    word, colon, source = name.partition(":")
    entry = evaluations.entry(word)
    label = name if entry.traits.get("by_source") else word
    return Chosen(label, partial(entry.value, source=source) if colon else entry.value)
