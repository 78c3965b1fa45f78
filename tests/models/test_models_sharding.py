"""What a mesh must not do to the loss, and a batch that it does not divide. Equality: tests/mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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
    params = unbox(jax.jit(lambda key: model.init(key, jnp.zeros((1, 4), jnp.int32)))(jax.random.key(0)))["params"]
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    params = jax.tree.unflatten(
        tree, [np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    )

    def loss(params, batch):
        total, weight, metrics = model.apply({"params": params}, batch, method="loss")
        return total / weight, metrics["nll"]

    return boxed, params, jax.value_and_grad(loss, has_aux=True)


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
