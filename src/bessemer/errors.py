"""Every expected error, each with the exit code of the command line. Any other exception is a bug (exit 1).

A message is one paragraph: what happened, where, and what to do.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any


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


def error_of_exit_code(code: int) -> type[BessemerError]:
    """Return the class whose exit code is `code`, without its subclasses; StorageError if there is none."""
    known = {kind.exit_code: kind for kind in (InputError, TrainingError, StorageError, Stopped)}
    return known.get(code, StorageError)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with `?` for characters that control a terminal: a foreign run may contain any."""
    return _CONTROL.sub("?", text)


def nearest(word: str, known: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """Return the known word that a misspelled one most likely meant, or None."""
    import difflib

    matches = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return " Did you mean 'x'?" with the known word nearest to a misspelled one, or an empty text."""
    close = nearest(word, known)
    return f" Did you mean '{close}'?" if close else ""


def to_install(extra: str) -> str:
    """Return the command that installs an extra for this Python, from where Bessemer itself was installed.

    If that is a folder it names the folder: on an index `bessemer` may be somebody else's package.
    """
    import importlib.util

    pip = f"{this_python()} -m pip install"
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):
        pip = f"uv pip install --python {_short(Path(sys.executable))}"
    return f"{pip} {_requirement(extra)}"


def _requirement(extra: str) -> str:
    """Return pip's argument, by how Bessemer was installed (direct_url.json of PEP 610)."""
    import importlib.metadata
    import json
    from urllib.parse import unquote, urlparse

    distribution: Any = None
    origin: dict[str, Any] = {}
    try:
        distribution = importlib.metadata.distribution("bessemer")
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pass  # not installed: run from its sources
    clone = Path(__file__).resolve().parents[2]
    url = str(origin.get("url", ""))
    if distribution is None:
        url = clone.as_uri() if (clone / "pyproject.toml").is_file() else ""
    elif not url:
        return f"'bessemer[{extra}]'"  # from an index, by its name
    if not url.startswith("file:"):
        vcs = origin.get("vcs_info", {})
        at = f"{vcs['vcs']}+{url}@{vcs.get('commit_id', 'HEAD')}" if "vcs" in vcs else url
        return shlex.quote(f"bessemer[{extra}] @ {at}")
    folder = Path(unquote(urlparse(url).path))
    if not folder.exists():  # a deleted clone or temporary wheel: install the extra's requirements
        return " ".join(shlex.quote(name) for name in _parts(distribution, extra)) or f"'bessemer[{extra}]'"
    editable = "-e " if distribution is None or origin.get("dir_info", {}).get("editable") else ""
    place = "." if folder.resolve() == Path.cwd() else _unquoted(folder)
    return f"{editable}{shlex.quote(f'{place}[{extra}]')}"


def _parts(distribution: Any, extra: str) -> list[str]:
    """Return the requirements of an extra from the installed metadata."""
    wanted = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    lines = (distribution.requires or []) if distribution is not None else []
    return [line.partition(";")[0].strip() for line in lines if wanted.search(line)]


# a command on its own line, after a colon, or in backticks
_COMMAND = re.compile(r"(^ +|: |`)bessemer(?= [a-z])", re.MULTILINE)


def runnable(text: str) -> str:
    """Return the text with our commands as this shell finds them, such as `.venv/bin/bessemer resume RUN`."""
    if shutil.which("bessemer"):
        return text
    program = Path(sys.argv[0])
    known = _short(program) if program.name == "bessemer" and program.is_file() else f"{this_python()} -m bessemer"
    return _COMMAND.sub(lambda found: found[1] + known, text)


def this_python() -> str:
    """Return the word that starts this Python in a shell."""
    found = shutil.which("python")
    same = found is not None and os.path.samefile(Path(found).parent, Path(sys.executable).parent)
    return "python" if same else _short(Path(sys.executable))


def _short(program: Path) -> str:
    """Return a path relative to the current directory if it is below, quoted for a shell."""
    return shlex.quote(_unquoted(program))


def _unquoted(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the current directory was deleted
        return str(path)
