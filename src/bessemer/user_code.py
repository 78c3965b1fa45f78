"""Code that users name as `module:attribute` or `file.py:attribute`.

An installed module wins. Otherwise a file of that name in the working directory is loaded by its path; the directory is
never put on sys.path, so nothing in it can hide an installed module. job/trust.py decides what may be loaded at all.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from bessemer.errors import BessemerError, InputError

SCRIPT = ".py"
_by_path: dict[str, ModuleType] = {}
"""Modules loaded from a file, by its path."""


def load_attribute(word: str, what: str) -> Any:
    """Return what `module:attribute` or `file.py:attribute` names. `what` is what the word is for ("reward")."""
    name, _, attribute = word.rpartition(":")
    module = import_code(name, f"{what} '{word}'")
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise InputError(f"{what} '{word}': '{name}' has no '{attribute}'.") from None


def import_code(name: str, what: str) -> ModuleType:
    """Import a module by name, or a .py file by path. `what` begins the message of an InputError."""
    file = code_file(name)
    if file is not None:
        return _import_file(file, what)
    try:
        return importlib.import_module(name)
    except BessemerError:
        raise
    except Exception as error:  # any code of the user's
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        if not missing:
            raise InputError(f"{what}: module '{name}' cannot be imported: {type(error).__name__}: {error}.") from error
        raise InputError(
            f"{what}: there is no installed module '{name}' and no file '{_as_file(name)}' in {Path.cwd()}. Write the "
            f"path of the file, such as path/to/{_as_file(name).name}, or install the module."
        ) from error


def code_file(name: str) -> Path | None:
    """Return the file that a module name or a path stands for; None for an installed module, or if there is none."""
    if name.endswith(SCRIPT):
        return Path(name).expanduser().resolve()
    known = sys.modules.get(name)
    if known is not None and known in _by_path.values():
        return Path(str(known.__file__))
    file = Path.cwd().resolve() / _as_file(name)
    return file if file.is_file() and not _hidden_by_installed(name, file) else None


def is_known(name: str) -> bool:
    """Return whether a module of this name is installed or is a file that can be loaded. Nothing is imported."""
    return code_file(name) is not None or _spec(name.partition(".")[0]) is not None


def located(word: str) -> str:
    """Return a module or file name, with or without `:attribute`, with a file's full path in place of its name.

    The result means the same code from any directory.
    """
    name, colon, attribute = word.rpartition(":")
    if not colon or word.endswith(SCRIPT):
        name, colon, attribute = word, "", ""
    file = code_file(name)
    return word if file is None or not file.is_file() else f"{file}{colon}{attribute}"


def label(word: str) -> str:
    """Return `module:attribute` for a word that names a file by its path; any other word as it is."""
    name, _, attribute = word.rpartition(":")
    return f"{Path(name).stem}:{attribute}" if name.endswith(SCRIPT) else word


def line_of(error: BaseException) -> tuple[str | None, bool]:
    """Return "FILE line N", the last line of loaded files that ran before an error, or None; and whether the error
    arose there, or in a library that it called, rather than in Bessemer."""
    ours = str(Path(__file__).parent)
    raised_there = True
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _by_path:
            return f"{frame.filename} line {frame.lineno}", raised_there
        raised_there = raised_there and not frame.filename.startswith(ours)
    return None, False


def _as_file(name: str) -> Path:
    return Path(*name.split(".")).with_suffix(SCRIPT)


def _hidden_by_installed(name: str, file: Path) -> bool:
    """Return whether importing the module would find something other than `file`. Nothing is imported."""
    top = name.partition(".")[0]
    spec = _spec(top)
    found = None if spec is None else spec.origin
    return (spec is not None or top in sys.modules) and (found is None or Path(found).resolve() != file)


def _spec(top: str) -> Any:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        return None


def _import_file(path: Path, what: str) -> ModuleType:
    """Load a file once, under its own name unless another module has it."""
    if not path.is_file():
        raise InputError(f"{what}: there is no file '{path}'.")
    if str(path) in _by_path:
        return _by_path[str(path)]
    known = sys.modules.get(path.stem)
    if known is not None and _same_file(known, path):
        return known  # the caller has imported it
    hidden = _hidden_by_installed(path.stem, path)
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}" if hidden else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, BessemerError) or not isinstance(error, Exception):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" line {frames[-1].lineno}" if frames else ""
        raise InputError(f"{what}: '{path}'{line} cannot be imported: {type(error).__name__}: {error}.") from error
    _by_path[str(path)] = module
    return module


def _same_file(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path
