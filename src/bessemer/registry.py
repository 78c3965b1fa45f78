"""Names to things: models, objectives, optimizers, schedules, datasets, evaluations, rewards, callbacks, jobs.

A registry discovers its folder: the first lookup imports every module of `package`, and each module registers
what it defines. So adding one is one new file and no edit elsewhere. Code outside the package registers with the
same decorator (`plugins=[my_file.py]` imports it), or is named directly as `module:attribute`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bessemer.errors import InputError, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One registered thing. `settings` are the dataclasses whose fields become settings when it is selected; `traits`
    say what it asks of whoever uses it."""

    name: str
    value: Any
    settings: tuple[type, ...] = ()
    traits: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """A named table that fills itself from `package` on first use."""

    def __init__(self, kind: str, package: str | None = None):
        self.kind = kind
        self.package = package
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}
        self._discovered = package is None
        self._busy = False  # the modules of the folder may ask while they are being imported
        self._discovering = threading.RLock()  # a lookup in another thread waits for the whole folder

    def register(
        self, name: str, *, aliases: tuple[str, ...] = (), settings: tuple[type, ...] = (), **traits: Any
    ) -> Callable[[T], T]:
        """Decorator. A second, different thing under a taken name is an error."""

        def add(value: T) -> T:
            for word in (name, *aliases):
                taken = self._entries.get(self._aliases.get(word, word))
                if taken is not None and _origin(taken.value) != _origin(value):
                    raise InputError(
                        f"{self.kind} '{word}' is registered twice: by {_origin(taken.value)} and by "
                        f"{_origin(value)}. Rename one of them."
                    )
            self._entries[name] = Entry(name, value, settings, traits)
            self._aliases.update(dict.fromkeys(aliases, name))
            return value

        return add

    def entry(self, name: str) -> Entry:
        """Look a name up; `module:attribute` names code directly. Unknown names say what exists."""
        if ":" in name:
            return Entry(name, load_attribute(name, self.kind))
        self._discover()
        found = self._entries.get(self._aliases.get(name, name))
        if found is None:
            close = nearest(name, list(self.names()) + list(self._aliases))
            hint = f" Did you mean '{close}'?" if close else ""
            raise InputError(f"unknown {self.kind} '{name}'.{hint} Known: {', '.join(self.names())}.")
        return found

    def get(self, name: str) -> Any:
        return self.entry(name).value

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        self._discover()
        return name in self._entries or name in self._aliases

    def __iter__(self) -> Iterator[Entry]:
        self._discover()
        return iter([self._entries[name] for name in sorted(self._entries)])

    def _discover(self) -> None:
        if self._discovered:
            return
        with self._discovering:
            if self._discovered or self._busy:
                return
            self._busy = True
            try:
                assert self.package is not None
                package = importlib.import_module(self.package)
                for module in pkgutil.iter_modules(package.__path__):
                    importlib.import_module(f"{self.package}.{module.name}")
                self._discovered = True
            finally:
                self._busy = False


def _origin(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', repr(value))}"


def load_attribute(path: str, kind: str) -> Any:
    """Import `module:attribute`; both a missing module and a missing attribute are input errors."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{kind} '{path}': cannot import module '{module_name}' ({error}).") from error
    if not hasattr(module, attribute):
        raise InputError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'.")
    return getattr(module, attribute)


def import_plugin(plugin: str) -> None:
    """Import user code that registers things: a module name, or the path of a .py file."""
    if not plugin.endswith(".py"):
        try:
            importlib.import_module(plugin)
        except ImportError as error:
            raise InputError(f"plugin '{plugin}' cannot be imported: {error}.") from error
        return
    path = Path(plugin).resolve()
    if not path.is_file():
        raise InputError(f"plugin file '{plugin}' does not exist.")
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError) as error:
        del sys.modules[name]
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" line {where[-1].lineno}" if where else ""
        raise InputError(
            f"plugin '{plugin}'{line} cannot be imported: {type(error).__name__}: {error}."
        ) from error


jobs = Registry("job", "bessemer.training")
models = Registry("model family", "bessemer.models")
objectives = Registry("objective", "bessemer.objectives")
optimizers = Registry("optimizer", "bessemer.optim")
schedules = Registry("schedule", "bessemer.optim")
datasets = Registry("dataset", "bessemer.data")
evaluations = Registry("evaluation", "bessemer.evaluate")
rewards = Registry("reward", "bessemer.objectives")
callbacks = Registry("callback", "bessemer.training.callbacks")
