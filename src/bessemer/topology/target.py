"""The platform a program is made for, which is not the one it is made on when planning for absent hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_TARGET: ContextVar[str | None] = ContextVar("bessemer_target_platform", default=None)


def target_platform() -> str:
    """cpu, gpu or tpu: of the mesh whose scope this is, else JAX's default backend. Kernels are chosen by it."""
    return _TARGET.get() or jax.default_backend()


@contextmanager
def targeting(platform: str) -> Iterator[None]:
    token = _TARGET.set(platform)
    try:
        yield
    finally:
        _TARGET.reset(token)
