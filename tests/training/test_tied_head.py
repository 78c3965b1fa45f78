"""A head tied to the embedding at first: the gradient is that of one table, and untying changes nothing by itself."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.models.llama import Llama
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.optim import build_optimizer
from bessemer.topology import TopologySettings, make_topology, shardings, unbox
from bessemer.training.setup.model import make_apply
from bessemer.training.state import StepRules, create_state
from bessemer.training.step import train_step
from bessemer.training.tied_head import EMBEDDING_SIZE, HEAD_SIZE, untying_step

UNTIED_FROM = 2
MODEL = GPT(depth=2, width=32, head_dim=16, vocab_size=97, block_size=16, precision="float32")


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 97, (4, 17), dtype=np.int32)
    return {"input_ids": tokens[:, :-1], "target_ids": np.where(rng.random((4, 16)) < 0.2, -1, tokens[:, 1:])}


@functools.cache
def start() -> Any:
    params = unbox(MODEL.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32), params)
    tx = build_optimizer(optax.sgd(1.0), lambda cls: cls(), 10).tx
    loss_fn = functools.partial(pretrain, settings=PretrainSettings())
    rules = StepRules(max_grad_norm=0, untied_from=UNTIED_FROM)
    return params, create_state(make_apply(MODEL), loss_fn, params, tx, rules)


def rescaled(head: Any) -> np.ndarray:
    rows = np.asarray(head, np.float64).T
    return EMBEDDING_SIZE * rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True))


@functools.cache
def stepped(parts: int, count: int = 3) -> list[Any]:
    step = jax.jit(functools.partial(train_step, accumulate_steps=parts))
    rows = {name: jnp.asarray(x).reshape(parts, 4 // parts, 16) for name, x in batch().items()}
    states, metas = [start()[1]], []
    for _ in range(count):
        state, _, meta = step(states[-1], rows, jax.random.key(1))
        states.append(state)
        metas.append(meta)
    return [states, metas]


def test_the_head_starts_as_the_embedding() -> None:
    drawn, state = start()
    np.testing.assert_allclose(state.params["head"], HEAD_SIZE / 0.8 * drawn["embedding"].T, rtol=1e-6)
    np.testing.assert_allclose(state.params["embedding"], rescaled(state.params["head"]), rtol=1e-5)
    assert int(state.tied) == 1


def test_the_gradient_is_that_of_one_table() -> None:
    """Against a function whose only table is the head. The head moves by it, and the embedding after the head."""
    states, metas = stepped(1)
    before, after = states[0].params, states[1].params

    def loss(head: Any) -> Any:
        embedding = EMBEDDING_SIZE * head.T / jnp.sqrt(jnp.mean(head.T**2, axis=-1, keepdims=True))
        whole = {**before, "head": head, "embedding": embedding}
        total, weight, _ = MODEL.apply({"params": whole}, batch(), method="loss")
        return total / weight

    gradient = np.asarray(jax.jit(jax.grad(loss))(before["head"]))
    moved = np.asarray(before["head"] - after["head"])
    np.testing.assert_allclose(moved, gradient, atol=2e-5 * np.abs(gradient).max())
    np.testing.assert_allclose(after["embedding"], rescaled(after["head"]), rtol=1e-5)
    others = [np.sum(np.square(before[name] - after[name])) for name in ("smear_gate", "smear_scale", "rho", "xi")]
    blocks = [
        np.sum(np.square(a - b))
        for a, b in zip(
            *map(
                jax.tree.leaves,
                ([before[n] for n in ("blocks_0", "blocks_1")], [after[n] for n in ("blocks_0", "blocks_1")]),
            ),
            strict=True,
        )
    ]
    norm = np.sqrt(np.sum(np.square(gradient)) + sum(others) + sum(blocks))
    assert float(metas[0]["grad_norm"]) == pytest.approx(norm, rel=1e-4)


def test_untied_tables_go_their_own_ways() -> None:
    states, _ = stepped(1)
    assert [int(state.tied) for state in states] == [1, 1, 0, 0]
    np.testing.assert_allclose(states[2].params["embedding"], rescaled(states[2].params["head"]), rtol=1e-5)
    off = np.abs(states[3].params["embedding"] - rescaled(states[3].params["head"]))
    assert off.max() > 1e-3


def test_micro_batches_are_the_big_batch() -> None:
    for a, b in zip(jax.tree.leaves(stepped(2)[0][-1].params), jax.tree.leaves(stepped(1)[0][-1].params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1e-3, float(np.abs(b).max())))


@pytest.mark.slow
def test_a_mesh_is_one_device() -> None:
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    boxed = jax.eval_shape(MODEL.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    state = start()[1]
    placed = jax.tree.map(lambda _: topology.replicated, state)
    placed = placed.replace(params=shardings(boxed, topology.mesh, topology.rest_rules))
    rows = {name: jnp.asarray(x)[None] for name, x in batch().items()}
    with topology.scope():
        out = (placed, topology.replicated, topology.replicated)
        step = jax.jit(functools.partial(train_step, accumulate_steps=1), out_shardings=out)
        state = jax.device_put(state, placed)
        rows = jax.device_put(rows, topology.batch_sharding(1))
        for _ in range(3):
            state, _, _ = step(state, rows, jax.random.key(1))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(stepped(1)[0][-1].params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1e-3, float(np.abs(b).max())))


def test_a_share_is_a_step_and_what_cannot_be_tied_is_refused() -> None:
    assert untying_step(0, 100, MODEL, False, False) == 0
    assert untying_step(0.66, 100, MODEL, True, True) == 66 and untying_step(1e-9, 100, MODEL, True, True) == 1
    with pytest.raises(InputError, match="starts from"):
        untying_step(0.5, 100, MODEL, False, True)
    with pytest.raises(InputError, match="to be trained"):
        untying_step(0.5, 100, MODEL, True, False)
    with pytest.raises(InputError, match="Llama"):
        untying_step(0.5, 100, Llama(depth=2, width=32, head_dim=16, vocab_size=97), True, True)
