"""Registries: names → models, objectives, optimizers, schedules, datasets, evaluations, rewards, environments,
callbacks, jobs.

The first lookup imports every module of a registry's packages, and each module registers what it defines, so adding one
is one new file. User code registers with the same decorator (`plugins=[my_file.py]` imports it), or is named directly:
`module:attribute`, `file.py:attribute`.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from bessemer.config import declared, dotted
from bessemer.errors import InputError, did_you_mean
from bessemer.user_code import import_code, load_attribute

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One registered thing. `settings`: dataclasses whose fields become settings when it is selected; `traits`: what it
    requires of its users."""

    name: str
    value: Any
    settings: tuple[type, ...] = ()
    traits: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """A table of names that fills itself from its packages on first use."""

    def __init__(self, kind: str, *packages: str):
        self.kind = kind
        self.packages = packages
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}
        self._discovered = not packages
        self._busy = False  # modules may look names up while they are imported
        self._discovering = threading.RLock()  # a lookup in another thread waits for all modules

    def register(
        self, name: str, *, aliases: tuple[str, ...] = (), settings: tuple[type, ...] = (), **traits: Any
    ) -> Callable[[T], T]:
        """Return a decorator that registers its argument. Raise InputError if the name is taken by something else."""

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
        """Return the entry of a name, or of code named directly as `module:attribute` or `file.py:attribute`."""
        if ":" in name:
            return Entry(name, load_attribute(name, self.kind))
        self._discover()
        found = self._entries.get(self._aliases.get(name, name))
        if found is None:
            hint = did_you_mean(name, list(self.names()) + list(self._aliases))
            raise InputError(
                f"unknown {self.kind} '{name}'.{hint} Known: {', '.join(self.names())}. One of your own needs the file "
                "that registers it: plugins=[FILE.py]"
            )
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
                for name in self.packages:
                    package = importlib.import_module(name)
                    for module in pkgutil.iter_modules(package.__path__):
                        importlib.import_module(f"{name}.{module.name}")
                self._discovered = True
            finally:
                self._busy = False


def _origin(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', repr(value))}"


def import_plugin(plugin: str) -> None:
    """Import user code that registers things: a module name, or the path of a .py file."""
    import_code(plugin, f"plugin '{plugin}'")


jobs = Registry("job", "bessemer.training", "bessemer.rl")
models = Registry("model family", "bessemer.models")
hf_types = Registry("model_type", "bessemer.models")
objectives = Registry("objective", "bessemer.objectives")
optimizers = Registry("optimizer", "bessemer.optim")
schedules = Registry("schedule", "bessemer.optim")
datasets = Registry("dataset", "bessemer.data.sources")
evaluations = Registry("evaluation", "bessemer.evaluate")
rewards = Registry("reward", "bessemer.rl")
environments = Registry("environment", "bessemer.rl.environments")
callbacks = Registry("callback", "bessemer.training.callbacks")


SELECTORS: dict[str, Registry] = {
    "job": jobs,
    "objective": objectives,
    "model/family": models,
    "optimization/name": optimizers,
    "optimization/schedule": schedules,
    "callbacks": callbacks,
}
"""Settings that select a part and with it the part's own settings: `optimization.name=muon` adds Muon's."""


@runtime_checkable
class NamesConfig(Protocol):
    """A class that names the dataclass of its settings, as a trainer does."""

    def config_class(self) -> type[Any]: ...


def settings_classes(entry: Entry) -> tuple[type, ...]:
    """Return the classes whose fields are settings when `entry` is selected; a model names its own."""
    if isinstance(entry.value, NamesConfig):
        return (entry.value.config_class(), *entry.settings)
    if isinstance(entry.value, type) and is_dataclass(entry.value):
        return (entry.value, *entry.settings)
    return entry.settings


def explain_unselected(key: str, selectors: Mapping[str, Registry] = SELECTORS) -> str | None:
    """Return "is a setting of optimizer 'muon'; add optimization.name=muon"; None if no part has the key."""
    for selector, table in selectors.items():
        owners = [entry.name for entry in table if key in _keys(entry)]
        if owners:
            choice = owners[0] if len(owners) == 1 else "|".join(owners)
            parts = " and ".join(f"'{name}'" for name in owners)
            return f"is a setting of {table.kind} {parts}; add {dotted(selector)}={choice}"
    return None


def _keys(entry: Entry) -> set[str]:
    return {setting.key for cls in settings_classes(entry) for setting in declared(cls).values()}
