"""Counts the programs that JAX makes, whether the compiler or its cache on disk provides them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[float]]:
    """Yield a list that gets one entry per program, the seconds it took."""
    found: list[float] = []

    def note(event: str, seconds: float, **_: Any) -> None:
        if event == EVENT:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@contextlib.contextmanager
def cache_at(path: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Use JAX's cache on disk in `path`; yield lists that get an entry per program asked of it and found there."""
    from jax._src import compilation_cache

    asked: list[str] = []
    found: list[str] = []
    lists = {"/jax/compilation_cache/compile_requests_use_cache": asked, "/jax/compilation_cache/cache_hits": found}

    def note(event: str, **_: Any) -> None:
        if event in lists:
            lists[event].append(event)

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    jax.clear_caches()
    jax.monitoring.register_event_listener(note)
    try:
        yield asked, found
    finally:
        jax.monitoring.unregister_event_listener(note)
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
