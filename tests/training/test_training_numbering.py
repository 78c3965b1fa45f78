"""No off-by-one between rows, batches and checkpoints: every loss is computed again, outside the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.feed import device_batch
from bessemer.training.persistence.checkpoints import saved_tree

STEPS = 4


def loss_of(logits: Any, batch: dict[str, np.ndarray]) -> float:
    """Σ w·(−log p) / Σ w, in float64."""
    logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    taken = np.take_along_axis(logprobs, np.maximum(batch["target_ids"], 0)[..., None], -1)[..., 0]
    weights = batch["loss_mask"].astype(np.float64)
    return float(-(taken * weights).sum() / weights.sum())


def test_row_n_is_batch_n_under_the_weights_of_checkpoint_n_minus_1(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoint n holds n updates, the label n stands beside the loss of the n-th batch, and there is no step
    beyond the last."""
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
    settings = {
        **tiny,
        "training.steps": STEPS,
        "training.validation": False,
        "architecture.precision": "float32",
        "model.depth": 1,
        "optimization.name": "adamw",
        "optimization.lr": 0.01,
        "logging.checkpoint_interval": 1,
    }
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    # a copy: the step donates its state
    weights = {0: jax.tree.map(np.array, trainer.state.params)}
    trainer.run()
    manager = trainer.checkpoint_manager
    assert manager.committed() == list(range(1, STEPS + 1))
    abstract = saved_tree(trainer.functions.abstract_state)
    for step in manager.committed():
        saved = manager.restore(step, abstract)
        assert int(saved["step"]) == int(saved["data_step"]) == step
        weights[step] = saved["params"]
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    norms = {row["step"]: row["grad_norm"] for row in rows if "grad_norm" in row}
    assert list(losses) == list(range(1, STEPS + 1))
    forward = jax.jit(lambda params, ids: trainer.model.apply({"params": params}, ids))

    def mean(params: Any, batch: dict[str, Any]) -> Any:
        logprobs = jax.nn.log_softmax(trainer.model.apply({"params": params}, batch["input_ids"]))
        taken = jnp.take_along_axis(logprobs, jnp.maximum(batch["target_ids"], 0)[..., None], -1)[..., 0]
        return -(taken * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

    norm_of = jax.jit(lambda params, batch: optax.tree.norm(jax.grad(mean)(params, batch)))
    for step, logged in losses.items():
        batch = trainer.data.plan.batch(step - 1)
        before, later = (loss_of(forward(weights[number], batch["input_ids"]), batch) for number in (step - 1, step))
        assert logged == pytest.approx(before, rel=1e-5)
        assert abs(logged - later) > 1e-3 * logged, "else an update more or less would not be seen"
        now, next_ = (float(norm_of(weights[number], batch)) for number in (step - 1, step))
        assert norms[step] == pytest.approx(now, rel=1e-4) and abs(now - next_) > 1e-3 * now


@pytest.mark.parametrize("axes", [{"data": 4, "tensor": 2}, {"fsdp": 8}], ids=str)
def test_the_devices_of_a_process_read_each_row_once(axes: dict[str, int]) -> None:
    """Micro-batches of 8 rows, two of them: the parts that are read are disjoint, replicas share them."""
    from bessemer.topology import TopologySettings

    topology = make_topology(TopologySettings(**{"data": 1, **axes}))
    table = np.arange(16 * 3, dtype=np.int32).reshape(16, 3)
    read: list[tuple[int, int]] = []

    def rows(first: int, end: int) -> dict[str, np.ndarray]:
        read.append((first, end))
        return {"x": table[first:end]}

    sharding = jax.sharding.NamedSharding(topology.mesh, jax.sharding.PartitionSpec(None, ("data", "fsdp"), None))
    batch = device_batch(rows, {"x": ((3,), table.dtype)}, 8, 2, sharding)
    assert sorted(row for first, end in read for row in range(first, end)) == list(range(16))
    assert len(read) == 2 * axes.get("data", 1) * axes.get("fsdp", 1)
    np.testing.assert_array_equal(np.asarray(batch["x"]).reshape(16, 3), table)
