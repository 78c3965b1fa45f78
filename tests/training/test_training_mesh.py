"""Promise 2 and 7: a mesh changes where things are computed, not what: loss, gradients, parameters, optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bessemer.topology import TopologySettings, make_topology
from bessemer.training import launch
from bessemer.training.feed import device_batch
from bessemer.training.trainer import BaseTrainer

MESHES = {
    "data 8": {"data": 8},
    "fsdp 8": {"data": 1, "fsdp": 8},
    "tensor 2": {"data": 1, "tensor": 2},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def build(tiny: dict[str, object], root: Path, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> BaseTrainer:
    """The quickstart in a small shape: optimizer, rates, epsilon and initialization are the recipe's."""
    count = int(np.prod(list(mesh.values())))
    topology = make_topology(TopologySettings(**mesh), devices=jax.devices()[:count])
    monkeypatch.setattr(launch, "make_topology", lambda settings: topology)
    settings = {**tiny, "training.per_device_batch_size": -1}
    return launch.build_trainer("quickstart", settings, name="-".join(mesh) + str(count), root=root)


def three_steps(trainer: BaseTrainer) -> dict[str, Any]:
    """Loss and gradient norm of each step, and the state after the last."""
    seen = []
    with trainer.topology.scope():
        batches = trainer.prefetcher(0)
        for step in range(3):
            trainer.state, loss, meta = trainer.functions.train_step(trainer.state, batches.get(step), trainer.key)
            seen.append((float(loss), float(meta["grad_norm"]), float(meta["target_tokens"])))
        batches.close()
    state = trainer.state
    leaves = {"params": state.params, "opt_state": state.opt_state}
    return {"seen": seen, **{name: [np.asarray(x) for x in jax.tree.leaves(tree)] for name, tree in leaves.items()}}


@pytest.fixture(scope="module")
def reference(tiny: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        return three_steps(build(tiny, tmp_path_factory.mktemp("one"), {"data": 1}, patch))


FAST = ("2x2x2", "tensor 2")  # every axis; the others run with the slow tests


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MESHES])
def test_mesh_equals_one_device(
    name: str, tiny: dict[str, object], reference: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = three_steps(build(tiny, tmp_path, MESHES[name], monkeypatch))
    np.testing.assert_allclose(result["seen"], reference["seen"], rtol=2e-5)
    for part in ("params", "opt_state"):
        for a, b in zip(result[part], reference[part], strict=True):
            scale = max(float(np.abs(b).max()), 1e-6)
            difference = (a - b).astype(np.float64) / scale
            assert np.abs(difference).max() < 1e-3  # measured: 1.1e-4
            assert b.size < 100 or abs(difference.mean()) < 1e-4


def test_parameters_and_optimizer_state_are_sharded(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(tiny, tmp_path, MESHES["fsdp 8"], monkeypatch)
    state = trainer.state
    for tree in (state.params, state.opt_state):
        for leaf in jax.tree.leaves(tree):
            if leaf.ndim == 2 and min(leaf.shape) >= 8:
                assert leaf.addressable_shards[0].data.size * 8 == leaf.size


def test_every_mesh_gets_the_same_rows(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Global row s·micro + b of batch(step) is at [s, b], whatever the sharding."""
    trainer = build(tiny, tmp_path, MESHES["2x2x2"], monkeypatch)
    whole = trainer.data.plan.batch(3)
    batch = device_batch(
        lambda first, end: trainer.data.plan.batch(3, slice(first, end)),
        trainer.data.fields,
        4,
        2,
        trainer.topology.batch_sharding(1),
    )
    for name, array in batch.items():
        np.testing.assert_array_equal(np.asarray(array).reshape(whole[name].shape), whole[name])


@pytest.mark.parametrize(("mesh", "expected"), [({"data": 1}, 8), ({"data": 2}, 4), ({"data": 4, "fsdp": 2}, 1)])
def test_a_micro_batch_of_the_recipe_gives_way_to_the_mesh(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], expected: int
) -> None:
    """Every shipped recipe starts on any number of GPUs that divides its batch; quickstart says 16, 8 are given."""
    settings = {key: value for key, value in tiny.items() if key != "training.per_device_batch_size"}
    count = int(np.prod(list(mesh.values())))
    topology = make_topology(TopologySettings(**mesh), devices=jax.devices()[:count])
    monkeypatch.setattr(launch, "make_topology", lambda settings: topology)
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    assert trainer.config["training/per_device_batch_size"] == expected
    assert trainer.functions.accumulate_steps * trainer.functions.micro == 8
    assert "in place of 16" in trainer.derived["training.per_device_batch_size"]["reason"]
