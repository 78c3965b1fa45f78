"""Counts the programs that JAX makes, whether the compiler or its cache on disk provides them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
