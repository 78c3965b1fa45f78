"""Loss and gradients on eight virtual devices equal one device, for each way to split the work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.models.gpt import GPT
from bessemer.topology import TopologySettings, make_topology, shardings
from bessemer.topology.rules import unbox

SETTINGS = {"depth": 2, "width": 64, "head_dim": 16, "kv_heads": 2, "vocab_size": 100, "block_size": 16}


def batch_of(rows: int = 8, length: int = 16):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, (rows, length + 1)).astype(np.int32)
    targets = np.where(rng.uniform(size=(rows, length)) < 0.3, -1, ids[:, 1:]).astype(np.int32)
    segments = np.sort(rng.integers(1, 3, (rows, length)), axis=1).astype(np.int32)
    return {"input_ids": ids[:, :-1], "target_ids": targets, "segment_ids": segments}


def build(**settings):
    model = GPT(**{**SETTINGS, "document_mask": True, "loss_chunks": 4, **settings})
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    params = unbox(jax.jit(lambda key: model.init(key, jnp.zeros((1, 4), jnp.int32)))(jax.random.key(0)))[
        "params"
    ]
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    params = jax.tree.unflatten(
        tree, [np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    )

    def loss(params, batch):
        total, weight, metrics = model.apply({"params": params}, batch, method="loss")
        return total / weight, metrics["nll"]

    return boxed, params, jax.value_and_grad(loss, has_aux=True)


@pytest.fixture(scope="module")
def single():
    boxed, params, step = build()
    return boxed, params, jax.device_get(jax.jit(step)(params, batch_of()))


MESHES = [{"data": 8}, {"data": 1, "fsdp": 8}, {"data": 1, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("sizes", [*MESHES, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_mesh_equals_one_device(sizes, single):
    boxed, params, ((loss, nll), gradient) = single
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    topology = make_topology(TopologySettings(**sizes), devices)
    _, _, step = build()  # a new function: the ambient rules are not part of jit's cache key
    placed = jax.device_put(params, shardings(boxed, topology.mesh))
    batch = jax.device_put(batch_of(), topology.batch_sharding())
    with topology.scope():
        (got_loss, got_nll), got = jax.jit(step, out_shardings=(None, shardings(boxed, topology.mesh)))(
            placed, batch
        )
    np.testing.assert_allclose(got_loss, loss, rtol=2e-6)
    np.testing.assert_allclose(got_nll, nll, rtol=2e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


def test_the_logits_of_the_loss_stay_split_over_batch_and_vocabulary():
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    boxed, params, step = build()
    placed = jax.device_put(params, shardings(boxed, topology.mesh))
    batch = jax.device_put(batch_of(), topology.batch_sharding())
    with topology.scope():
        program = jax.jit(step).lower(placed, batch).compile().as_text()
    assert "f32[2,4,64]" in program  # 8 rows / 4, 16 positions / 4 chunks, 128 columns / 2
    assert "f32[8,4,128]" not in program and "f32[8,16,128]" not in program


def test_a_batch_that_the_mesh_does_not_divide():
    topology = make_topology(TopologySettings(data=8))
    model = GPT(**SETTINGS)
    with topology.scope():
        params = unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
        logits = jax.jit(lambda p, x: model.apply({"params": p}, x))(params, jnp.zeros((3, 5), jnp.int32))
    assert np.all(np.isfinite(logits))
