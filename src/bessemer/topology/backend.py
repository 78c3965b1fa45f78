"""For which kind of device a program is traced: JAX's own, unless a plan says otherwise.

Dtypes, tiles and kernels are chosen by this. A plan for hardware that is not here traces the very program that would
run there, on a machine whose own backend is a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_planned: ContextVar[str | None] = ContextVar("planned_backend", default=None)


def backend() -> str:
    """cpu, gpu or tpu."""
    return _planned.get() or jax.default_backend()


@contextmanager
def planned_for(platform: str) -> Iterator[None]:
    """Trace as for `platform`. What is traced can be compiled for such devices, but not run here."""
    token = _planned.set(platform)
    try:
        yield
    finally:
        _planned.reset(token)
