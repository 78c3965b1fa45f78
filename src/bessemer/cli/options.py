"""`--step`: which checkpoint, by its number or by the name of the stage it ended."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from bessemer.config import Schema, recipe_names
from bessemer.config.aliases import VALUE, answer
from bessemer.errors import InputError


class Step(click.ParamType):
    """512, or stage-1 of a run that has stages."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int | str:
        if isinstance(value, int) or re.fullmatch(r"stage-\d+", value):
            return value
        if not re.fullmatch(r"\d+", value):
            self.fail(f"'{value}' is neither a step nor the end of a stage such as stage-1.", param, context)
        return int(value)


STEP = Step()


# Flags that are not ours: answered with the setting that does the same.


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


# On a CPU, give XLA's temporaries back to XLA instead of to the kernel.
#
# XLA allocates and frees its temporary buffers every step; glibc maps and unmaps them each time, and the page
# faults of the fresh pages took a fifth of the quickstart's time (13.3k → 16.2k tokens/s on two cores). glibc
# reads these settings only when a process starts, so the command line starts itself once more, in the same
# process.


SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


def keep_memory() -> None:
    """Start this process again with the settings, unless it has them, has an accelerator, or is not glibc."""
    if any(name in os.environ for name in SETTINGS) or not sys.platform.startswith("linux"):
        return
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or any(glob.glob(path) for path in ACCELERATORS):
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **SETTINGS})


# A run goes on when whoever read its output has gone: the end of a pipe, a terminal that was closed.
#
# What it would have said there is in log.txt; the run directory has everything else.


GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)


def outlive_readers() -> None:
    """From now on stdout and stderr lead nowhere once nobody reads them. One that was closed before, None, stays."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, Lasting(stream))


class Lasting:
    """A text stream whose reader may go."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is in buffers goes there too
            os.close(nowhere)
            if self is not sys.stderr:
                with contextlib.suppress(OSError):
                    print(
                        "note: nobody reads the output any more; the run goes on, its log.txt has every line",
                        file=sys.stderr,
                    )
