"""Code that users name as `module:attribute` or `file.py:attribute`.

An installed module wins. Otherwise a file of that name in the working directory is loaded by its path; the directory is
never put on sys.path, so nothing in it can hide an installed module. job/trust.py decides what may be loaded at all.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from bessemer.errors import BessemerError, InputError

SCRIPT = ".py"
_by_path: dict[str, ModuleType] = {}
"""Modules loaded from a file, by its path."""
_importing: ContextVar[str] = ContextVar("bessemer_importing", default="")
"""The file or module that is being imported in this thread."""
GUARD = "if __name__ == '__main__':"


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
        with _import_of(name):
            return importlib.import_module(name)
    except BessemerError:
        raise
    except Exception as error:  # any code of the user's
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        if not missing:
            line, _ = line_of(error)
            raise InputError(
                f"{what}: module '{name}' cannot be imported: {type(error).__name__}: {error}"
                f"{f' ({line})' if line else ''}."
            ) from error
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


def refuse_while_importing() -> None:
    """Raise InputError if a file is just being imported for the parts it defines: it would start a run each time."""
    place = _importing.get()
    if not place:
        return
    frames = [frame for frame in traceback.extract_stack() if frame.filename == place]
    line = f"line {frames[-1].lineno} of {place}" if frames else f"the module {place}"
    raise InputError(
        f"{line} starts a run while the file is imported for the parts that it defines, which every run and every "
        f"resume does. Put what starts it under: {GUARD}"
    )


def unguarded_line(file: Path) -> int | None:
    """Return the line of the main program `file` that is running now, if it is not below `if __name__ == …`."""
    frames = [frame for frame in traceback.extract_stack() if frame.name == "<module>"]
    running = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file and frame.lineno]
    try:
        parts = ast.parse(file.read_bytes()).body if running else []
    except (OSError, SyntaxError, ValueError):
        return None
    for part in parts:
        if part.lineno <= running[-1] <= (part.end_lineno or part.lineno):
            guarded = isinstance(part, ast.If) and "__name__" in ast.unparse(part.test)
            return None if guarded else running[-1]
    return None


def line_of(error: BaseException) -> tuple[str | None, bool]:
    """Return "FILE line N", the last line of the user's own files that ran before an error, or None; and whether the
    error arose there, or in a library that it called, rather than in Bessemer."""
    ours = str(Path(__file__).parent)
    raised_there = True
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _by_path or _is_own(frame.filename):
            return f"{frame.filename} line {frame.lineno}", raised_there
        raised_there = raised_there and not frame.filename.startswith(ours)
    return None, False


def _is_own(filename: str) -> bool:
    """Return whether a file is neither Bessemer's nor of Python or an installed package."""
    installed = {str(Path(__file__).parent), sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    outside = not any(Path(filename).is_relative_to(place) for place in installed)
    return outside and "site-packages" not in filename and Path(filename).is_file()


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
        with _import_of(str(path)):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, BessemerError) or not isinstance(error, Exception):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" line {frames[-1].lineno}" if frames else ""
        deepest, _ = line_of(error)
        elsewhere = f" ({deepest})" if deepest and not deepest.startswith(f"{path} line") else ""
        raise InputError(
            f"{what}: '{path}'{line} cannot be imported: {type(error).__name__}: {error}{elsewhere}."
            f"{_about_sibling(path, error)}"
        ) from error
    _by_path[str(path)] = module
    return module


@contextlib.contextmanager
def _import_of(place: str) -> Iterator[None]:
    token = _importing.set(place)
    try:
        yield
    finally:
        _importing.reset(token)


def _about_sibling(path: Path, error: Exception) -> str:
    """Return how to make a file or package beside `path` importable, if that is what the import of `path` lacks."""
    if isinstance(error, ImportError) and "relative import" in str(error):
        return " A file that is loaded by its path is in no package: write `import helper`, not `from . import helper`."
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    beside = path.parent / error.name.partition(".")[0]
    path_of = f"put its directory on Python's path: PYTHONPATH={shlex.quote(str(path.parent))}"
    if (file := beside.with_suffix(SCRIPT)).is_file():
        return (
            f" {file.name} is beside it, but that directory is not searched. Import it first, as a plugin of its own: "
            f"plugins=[{_from_here(file)},{_from_here(path)}]; or {path_of}"
        )
    return (
        f" {beside.name} is a package beside it, but that directory is not searched: {path_of}"
        if beside.is_dir()
        else ""
    )


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _same_file(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path
