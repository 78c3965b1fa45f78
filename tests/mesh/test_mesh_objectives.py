"""Objectives that look at a frozen reference, on a mesh: value and gradients of one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from tests.mesh.harness import LENGTH, QUICKLY, ROWS, batch_of, build, difference, mesh_of

from bessemer.objectives.kl import KLConfig, kl
from bessemer.objectives.preference import DpoSettings, dpo
from bessemer.topology import shardings

MESH = {"fsdp": 2, "tensor": 2, "context": 2}


def pairs_of() -> dict[str, np.ndarray]:
    """Two answers in every row: one pair, and a place for another that is empty."""
    batch = batch_of()
    segments = np.repeat(np.array([[1, 2]]), LENGTH // 2, axis=1).repeat(ROWS, axis=0).astype(np.int32)
    ids = np.stack([np.arange(ROWS), np.full(ROWS, -1)], axis=1).astype(np.int32)
    return {**batch, "segment_ids": segments, "pair_ids": ids}


CASES: dict[str, tuple[Any, Any, Any]] = {
    "kl exact": (kl, KLConfig(beta=(0.5,), estimator="exact"), batch_of),
    "kl reverse": (kl, KLConfig(beta=(0.5,), estimator="reverse"), batch_of),
    "dpo": (dpo, DpoSettings("sigmoid", beta=0.1, reference="live"), pairs_of),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("kl exact", marks=pytest.mark.slow),
        pytest.param("kl reverse", marks=pytest.mark.long),
        pytest.param("dpo", marks=pytest.mark.slow),
    ],
)
def test_an_objective_with_a_reference_is_that_of_one_device(name: str) -> None:
    objective, settings, rows = CASES[name]
    tiny = build("gpt", kv_heads=4)
    rng = np.random.default_rng(2)
    frozen = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), tiny.params)

    def apply(params: Any, *args: Any, method: str, rngs: Any = None) -> Any:
        return tiny.model.apply({"params": params}, *args, method=method, rngs=rngs)

    def make() -> Any:  # a new function each: the ambient rules are not part of jit's cache key
        def value(params: Any, reference: Any, batch: Any) -> Any:
            total, weight, metrics = objective(apply, params, batch, None, settings, reference)
            return total / weight, metrics

        return jax.value_and_grad(value, has_aux=True)

    one = jax.device_get(jax.jit(make(), compiler_options=QUICKLY)(tiny.params, frozen, rows()))
    topology = mesh_of(MESH)
    places = shardings(tiny.boxed, topology.mesh)
    with topology.scope():
        placed = [jax.device_put(tree, places) for tree in (tiny.params, frozen)]
        batch = jax.device_put(rows(), topology.batch_sharding())
        many = jax.device_get(jax.jit(make(), compiler_options=QUICKLY)(*placed, batch))
    off = difference(many, one)
    print(off)  # measured: 1.1e-5 and 2.6e-8
    assert off.largest < 1e-4 and off.mean < 2e-7, off
