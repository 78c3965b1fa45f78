"""The configuration in force: a context variable, so that threads and tasks never see each other's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from bessemer.config.declare import declared
from bessemer.config.resolve import Config

T = TypeVar("T")

_current: ContextVar[Config | None] = ContextVar("bessemer_configuration", default=None)


@contextmanager
def configuration(config: Config) -> Iterator[Config]:
    """`with configuration(config): configure(Model)`; nests, and ends with the block even on an error."""
    token = _current.set(config)
    try:
        yield config
    finally:
        _current.reset(token)


def current() -> Config | None:
    """The configuration of the innermost `configuration` block of this thread or task."""
    return _current.get()


def configure(cls: type[T], **overrides: Any) -> T:
    """An instance of `cls` with each declared field taken from the current configuration; `overrides` win.

    Without a configuration, and for keys it does not know, the class's own defaults hold.
    """
    config = _current.get()
    arguments: dict[str, Any] = {}
    for name, setting in declared(cls).items():
        if name not in overrides and config is not None and setting.key in config:
            arguments[name] = setting.check(config[setting.key], config.provenance[setting.key])
    return cls(**arguments, **overrides)
