"""Draws by JAX's own kernel: only where one device holds all, and the same numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bessemer.topology.mesh import SETTING, quick_draws


@pytest.mark.parametrize("devices", [1, 2])
def test_the_kernel_is_for_one_device_and_for_what_is_lowered_inside(devices: int) -> None:
    before = getattr(jax.config, SETTING)
    with pytest.raises(RuntimeError), quick_draws(Mesh(np.array(jax.devices()[:devices]), ("data",))):
        assert getattr(jax.config, SETTING) == (devices == 1)
        raise RuntimeError
    assert getattr(jax.config, SETTING) == before


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_draws_the_same_bits() -> None:
    def drawn(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.random.uniform(key, (96, 33)), jax.random.normal(jax.random.fold_in(key, 7), (4, 5))

    key, mesh = jax.random.key(3), Mesh(np.array(jax.devices()[:1]), ("data",))
    plain = jax.jit(drawn).lower(key)
    with quick_draws(mesh):
        quick = jax.jit(drawn).lower(key)
    assert "threefry" in quick.as_text().split("custom_call", 1)[1]
    for a, b in zip(plain.compile()(key), quick.compile()(key), strict=True):
        assert np.array_equal(a, b)
