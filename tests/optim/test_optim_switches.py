"""Switches of the optimizers against plain references: cautious decay, and which units NorMuon evens out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.optim.test_optim_muon import normal, reference_orthogonalize
from tests.optim.test_optim_sharding import build_mesh
from tests.training.stops import StopAt
from tests.training.test_training_resume import assert_same, one_device

from bessemer.errors import Stopped
from bessemer.optim import build_optimizer, mesh_spread, state_shardings
from bessemer.optim.muon import MuonSettings, muon
from bessemer.optim.schedules import ConstantSettings, constant
from bessemer.optim.standard import AdafactorSettings, AdamWSettings, LionSettings, SgdSettings
from bessemer.registry import optimizers
from bessemer.training import launch

SETTINGS = {"adamw": AdamWSettings, "lion": LionSettings, "sgd": SgdSettings, "adafactor": AdafactorSettings}
FLAT = constant(ConstantSettings(), 10)
SHAPES = {"square": (12, 12), "wide": (12, 30), "tall": (30, 12)}


def some_params() -> dict[str, Any]:
    shapes = {"embedding": (12, 4), "query": (4, 4), "scale": (4,)}
    return {name: jnp.asarray(normal(i, *shape), jnp.float32) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("name", SETTINGS)
def test_cautious_decay_touches_only_what_the_update_shrinks(name: str) -> None:
    """p -= lr·(u + wd·p·[u·p ≥ 0]) on matrices, the plain update elsewhere."""
    params, make = some_params(), optimizers.get(name)
    variants = {}
    for decay, cautious in ((0.0, "none"), (0.5, "none"), (0.5, "matrices")):
        tx = make(SETTINGS[name](lr=0.1, weight_decay=decay, cautious=cautious), FLAT, 10)
        state = tx.init(params)
        for step in range(2):
            grads = jax.tree.map(lambda p, step=step: jnp.sin(7 * p + step), params)
            updates, state = tx.update(grads, state, params, step=jnp.int32(step))
        variants[decay, cautious] = jax.device_get(updates)
    bare, plain, cautious = variants.values()
    p, u = np.asarray(params["query"]), -bare["query"] / 0.1
    np.testing.assert_allclose(plain["query"], bare["query"] - 0.1 * 0.5 * p, atol=1e-6)
    np.testing.assert_allclose(cautious["query"], bare["query"] - 0.1 * 0.5 * p * (u * p >= 0), atol=1e-6)
    assert 0 < (u * p >= 0).sum() < p.size
    for other in ("embedding", "scale"):
        np.testing.assert_array_equal(cautious[other], bare[other])


def reference(p: np.ndarray, g: np.ndarray, v: Any, normalize: str, cautious: str) -> tuple[np.ndarray, Any]:
    """One float64 step at momentum 0, rate .1, decay .7, β2 .9. g: (fan_in, fan_out)."""
    u = reference_orthogonalize(g)
    if normalize != "none":
        axis = 0 if normalize == "output" or p.shape[1] >= p.shape[0] else 1
        v = 0.9 * v + 0.1 * (u**2).mean(axis, keepdims=True)
        scaled = u / np.sqrt(v)
        u = scaled * np.linalg.norm(u) / np.linalg.norm(scaled)
    decay = 0.7 * p if cautious == "none" else 0.7 * p * (u * p >= 0)
    return p - 0.1 * (np.sqrt(max(1.0, p.shape[1] / p.shape[0])) * u + decay), v


@pytest.mark.parametrize("normalize", ["longer", "output", "none"])
@pytest.mark.parametrize("cautious", ["none", "matrices"])
def test_muon_matches_the_float64_reference(normalize: str, cautious: str) -> None:
    settings = MuonSettings(matrix_lr=0.1, weight_decay=0.7, momentum=0.0, momentum_steps=0)
    settings = dataclasses.replace(settings, muon_normalize=normalize, cautious=cautious)
    tx = muon(settings, FLAT, 10**9, lambda path: "matrix", compute_dtype=jnp.dtype(jnp.float32))
    exact = {name: normal(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), exact)
    state, seconds = tx.init(params), dict.fromkeys(SHAPES, 0.0)
    for step in range(2):
        grads = {name: normal(10 * step + i + 5, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
        given = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
        updates, state = tx.update(given, state, params, step=jnp.int32(step))
        params = jax.tree.map(jnp.add, params, updates)
        for name in SHAPES:
            exact[name], seconds[name] = reference(exact[name], grads[name], seconds[name], normalize, cautious)
            np.testing.assert_allclose(params[name], exact[name], atol=2e-5, err_msg=f"{name} at step {step}")


def test_the_adamw_groups_of_muon_are_cautious_on_request() -> None:
    params = {"head": jnp.asarray(normal(0, 6, 8), jnp.float32)}
    found = {}
    for cautious in ("matrices", "all"):
        settings = MuonSettings(preset="july2026", cautious=cautious)
        tx = muon(settings, FLAT, 10, lambda path: "head")
        updates, _ = tx.update(jax.tree.map(jnp.cos, params), tx.init(params), params, step=jnp.int32(0))
        found[cautious] = np.asarray(updates["head"])
    p, difference = np.asarray(params["head"]), found["all"] - found["matrices"]
    grown = np.cos(p) * p < 0  # where the update moves away from 0
    np.testing.assert_allclose(difference, np.where(grown, 0.008 * 0.01 * p, 0), atol=1e-8)
    assert 0 < grown.sum() < p.size


# -- on a mesh and over a stop -----------------------------------------------------------------------------------

CHANGED = {"optimization.cautious": "all", "optimization.muon_normalize": "output", "optimization.preset": "july2026"}


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["output", "none"])
def test_a_mesh_makes_the_same_update(normalize: str) -> None:
    params = {"up": normal(0, 16, 64), "down": normal(1, 64, 16), "embedding": normal(2, 24, 16)}
    settings = MuonSettings(muon_normalize=normalize, cautious="all", preset="july2026")

    def updates(mesh: jax.sharding.Mesh) -> Any:
        where, replicated = NamedSharding(mesh, P("fsdp", "tensor")), NamedSharding(mesh, P())
        placed = jax.device_put(jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params), where)
        places = jax.tree.map(lambda p: where, params)
        tx = build_optimizer("muon", lambda cls: settings if cls is MuonSettings else cls(), 10).tx
        assert mesh_spread(mesh) is None or mesh.size > 1
        state = jax.jit(tx.init, out_shardings=state_shardings(tx, placed, places, replicated))(placed)
        step = jax.jit(lambda g, s, p: tx.update(g, s, p, step=jnp.int32(5)))
        return jax.device_get(step(jax.tree.map(jnp.cos, placed), state, placed)[0])

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), updates(build_mesh(1, 1)), updates(build_mesh(2, 4))
    )


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(tiny: dict[str, object], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())
    settings = {**tiny, **CHANGED}
    whole = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path)
    whole.run()
    part = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(5)])
    with pytest.raises(Stopped):
        part.run()
    again = launch.reopen(tmp_path / "part")
    again.run()
    assert_same(again, whole)
