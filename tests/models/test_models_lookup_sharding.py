"""Lookup layers on eight virtual devices equal one device: each device sorts and reads for its own tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.models.gpt import GPT
from bessemer.models.lookup import Allocation
from bessemer.topology import TopologySettings, make_topology, shardings
from bessemer.topology.rules import unbox

VOCAB = 100
SETTINGS = {"depth": 1, "width": 32, "head_dim": 16, "vocab_size": VOCAB, "block_size": 16, "loss_chunks": 4}
K = np.where(np.arange(VOCAB) % 10 == 0, 20, 1)


def batch_of():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB // 2, (8, 17)).astype(np.int32)  # half of the tokens are absent
    return {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}


def build(path: str):
    model = GPT(**SETTINGS, lookup_after_layers=[0], lookup_path=path, allocation=Allocation.of(K))
    model.check()
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape).astype(np.float32), unbox(boxed))

    def loss(params, batch):
        total, weight, _ = model.apply({"params": params}, batch, method="loss")
        return total / weight

    return boxed, params, jax.value_and_grad(loss)


@pytest.fixture(scope="module")
def single():
    _, params, step = build("gather")
    return jax.device_get(jax.jit(step)(params, batch_of()))


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}], ids=str
)
def test_mesh_equals_one_device(sizes, single):
    topology = make_topology(TopologySettings(**sizes))
    boxed, params, step = build("sorted")
    places = shardings(boxed, topology.mesh)
    with topology.scope():
        loss, gradient = jax.jit(step, out_shardings=(None, places))(
            jax.device_put(params, places), jax.device_put(batch_of(), topology.batch_sharding())
        )
    np.testing.assert_allclose(loss, single[0], rtol=2e-6)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(single[1]), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4, err_msg=jax.tree_util.keystr(path))
    absent = np.repeat(~np.isin(np.arange(VOCAB), batch_of()["input_ids"]), K)
    for name in ("lookup_keys", "lookup_values"):
        assert not np.any(np.asarray(gradient["lookups_0"][name])[absent])
