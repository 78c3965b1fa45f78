"""Every error a user can cause or meet, each with the exit code of the command line.

One paragraph each: what happened, where, and what to do. Anything else that escapes is a bug (exit 1).
"""

from __future__ import annotations


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
