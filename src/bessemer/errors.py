"""Every error a user can cause or meet, each with the exit code of the command line.

One paragraph each: what happened, where, and what to do. Anything else that escapes is a bug (exit 1).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path


class BessemerError(Exception):
    """Base of all expected errors; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(BessemerError):
    """Bad input, setting or file: nothing was written or lost."""

    exit_code = 2


class TrainingError(BessemerError):
    """Training itself failed: non-finite values, out of memory."""

    exit_code = 3


class StorageError(BessemerError):
    """Disk, checkpoint or a lost peer."""

    exit_code = 4


class Stopped(BessemerError):
    """Stopped by a signal or the time limit with a checkpoint; `resume` continues."""

    exit_code = 75


def nearest(word: str, known: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """The known word a misspelt one most likely meant, or None."""
    import difflib

    matches = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def to_install(extra: str) -> str:
    """The command that installs an extra of ours for the Python that runs this, whatever else is on the path."""
    return f"{_python()} -m pip install 'bessemer[{extra}]'"


_COMMAND = re.compile(
    r"(^ +|: |`)bessemer(?= [a-z])", re.MULTILINE
)  # on a line of its own, after a colon, in backticks


def runnable(text: str) -> str:
    """A text in which our commands are written as this shell finds them: after `make train` alone, `bessemer` is not on
    its path, and `bessemer resume RUN` is `.venv/bin/bessemer resume RUN`."""
    if shutil.which("bessemer"):
        return text
    program = Path(sys.argv[0])
    known = (
        _short(program) if program.name == "bessemer" and program.is_file() else f"{_python()} -m bessemer"
    )
    return _COMMAND.sub(lambda found: found[1] + known, text)


def _python() -> str:
    found = shutil.which("python")
    same = found is not None and os.path.samefile(Path(found).parent, Path(sys.executable).parent)
    return "python" if same else _short(Path(sys.executable))


def _short(program: Path) -> str:
    """Relative where it lies below the current directory, and as a shell reads it."""
    try:
        path = program.absolute().relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere, or the current directory is gone
        path = program
    return shlex.quote(str(path))
