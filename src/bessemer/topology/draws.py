"""Random numbers that compile quickly: on one GPU their bits come from JAX's own kernel.

Otherwise each draw is a program of a hundred instructions: the 54 of a model of depth 12 took 24 s to compile on an
H200, with the kernel .8 s. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import Mesh

SETTING = "jax_threefry_gpu_kernel_lowering"


@contextmanager
def quick_draws(mesh: Mesh) -> Iterator[None]:
    """What is lowered inside draws by the kernel, if one device holds all: of several, each would draw everything."""
    before = getattr(jax.config, SETTING)
    jax.config.update(SETTING, mesh.size == 1)  # no other platform has the kernel, so none heeds this
    try:
        yield
    finally:
        jax.config.update(SETTING, before)
