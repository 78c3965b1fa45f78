"""The distillation loss against torch's numbers and against float64, live and stored, and its gradient."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.reference import distill_torch

from bessemer.losses.cross_entropy import Projection
from bessemer.losses.distillation import TopTokens, distillation_loss, top_tokens
from bessemer.topology import TopologySettings, make_topology

STORED = json.loads(Path(distill_torch.__file__).with_suffix(".json").read_text())
B, T, D, V, PADDED, CAP = 2, 5, 6, 13, 16, 4.0


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("case", STORED, ids=lambda case: f"{case['alpha']}-{case['temperature']}")
def test_it_is_torchs_number(case: dict) -> None:
    z, y, targets, weights = distill_torch.tensors()
    vocab = z.shape[-1]

    def loss(z: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        against = Projection(jnp.asarray(y, jnp.float32), None, vocab)
        settings = {"alpha": case["alpha"], "temperature": case["temperature"], "chunks": 2}
        total, kl, nll = distillation_loss(Projection(z, None, vocab), against, targets, weights, **settings)
        return total, (kl, nll)

    (total, (kl, nll)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(z, jnp.float32))
    np.testing.assert_allclose((total, kl, nll), (case["loss"], case["kl"], case["nll"]), rtol=1e-6)
    np.testing.assert_allclose(gradient, case["gradient"], atol=2e-6)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_stored_numbers_are_those_of_the_torch_at_hand() -> None:
    for stored, now in zip(STORED, distill_torch.compute(), strict=True):
        assert stored.keys() == now.keys()
        for name in stored:
            np.testing.assert_allclose(stored[name], now[name], rtol=1e-8, atol=1e-9)


@pytest.fixture(scope="module")
def example() -> dict[str, np.ndarray]:
    """Two models of other widths, each with a padded head, and a few targets; float64."""
    random = np.random.default_rng(5)
    return {
        "hidden": random.standard_normal((B, T, D)),
        "head": 2 * random.standard_normal((D, PADDED)),
        "teacher_hidden": random.standard_normal((B, T, 2 * D)),
        "teacher_head": random.standard_normal((2 * D, PADDED)),
        "targets": np.where(random.random((B, T)) < 0.2, -1, random.integers(0, V, (B, T))),
        "weights": random.random((B, T)),
    }


def student_of(x: dict, hidden: np.ndarray | None = None) -> np.ndarray:
    return CAP * np.tanh((x["hidden"] if hidden is None else hidden) @ x["head"] / CAP)[..., :V]


def teacher_of(x: dict) -> np.ndarray:
    return (x["teacher_hidden"] @ x["teacher_head"])[..., :V]


def divergence(p: np.ndarray, q: np.ndarray, k: int, tail: str) -> np.ndarray:
    """By the definition, with the k most likely tokens of p kept."""
    order = np.argsort(-p, axis=-1)
    kept, rest = order[..., :k], order[..., k:]
    pk, qk = (np.take_along_axis(x, kept, -1) for x in (p, q))
    if tail == "renormalize":
        pk = pk / pk.sum(-1, keepdims=True)
    total = (pk * (np.log(pk) - np.log(qk))).sum(-1)
    if tail == "bucket" and k < V:
        pr, qr = (np.take_along_axis(x, rest, -1).sum(-1) for x in (p, q))
        total += pr * (np.log(pr) - np.log(qr))
    return total


def expected(x: dict, z: np.ndarray, k: int, tail: str, alpha: float, t: float) -> float:
    w = np.where(x["targets"] < 0, 0, x["weights"])
    kl = divergence(softmax(teacher_of(x) / t), softmax(z / t), k, tail)
    target = np.maximum(x["targets"], 0)[..., None]
    nll = -np.log(np.take_along_axis(softmax(z), target, -1))[..., 0]
    return float((w * (alpha * t * t * kl + (1 - alpha) * nll)).sum())


@pytest.mark.parametrize(("k", "tail"), [(0, "bucket"), (V, "bucket"), (4, "bucket"), (4, "renormalize")])
def test_live_and_stored_are_their_formulas_and_so_are_the_gradients(example: dict, k: int, tail: str) -> None:
    x = {name: jnp.asarray(value, jnp.float32 if value.dtype == float else None) for name, value in example.items()}
    teacher = Projection(x["teacher_hidden"], x["teacher_head"], V)

    @jax.jit
    def value_and_gradient(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        against = top_tokens(teacher, k, 2.0, chunks=2) if k else teacher

        def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
            student = Projection(hidden, head, V, CAP)
            how = {"alpha": 0.7, "temperature": 2.0, "renormalize": tail == "renormalize", "chunks": 3}
            return distillation_loss(student, against, x["targets"], x["weights"], **how)[0]

        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    value, (dhidden, dhead) = value_and_gradient(x["hidden"], x["head"])
    wanted = {"k": k or V, "tail": tail, "alpha": 0.7, "t": 2.0}
    assert float(value) == pytest.approx(expected(example, student_of(example), **wanted), rel=1e-5)
    random = np.random.default_rng(0)
    for name, gradient in (("hidden", dhidden), ("head", dhead)):
        direction, step = random.standard_normal(example[name].shape), 1e-5
        ends = [example | {name: example[name] + sign * step * direction} for sign in (1, -1)]
        slope = np.subtract(*(expected(end, student_of(end), **wanted) for end in ends)) / (2 * step)
        assert float(np.sum(np.asarray(gradient, np.float64) * direction)) == pytest.approx(slope, rel=2e-4)


def test_a_bucket_is_a_lower_bound_and_agreement_is_zero(example: dict) -> None:
    y = jnp.asarray(teacher_of(example), jnp.float32)
    teacher, other = Projection(y, None, V), Projection(y[::-1], None, V)
    ones = jnp.ones((B, T))

    def kl(student: Projection, against: Projection | TopTokens) -> jax.Array:
        return distillation_loss(student, against, ones.astype(int), ones, alpha=1, temperature=1)[1]

    @jax.jit
    def all_of_them() -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        bounds = [kl(other, top_tokens(teacher, k, 1.0)) for k in (1, 4, V)]
        return kl(other, teacher), bounds, [kl(teacher, teacher), kl(teacher, top_tokens(teacher, 3, 1.0))]

    exact, bounds, agreeing = all_of_them()
    assert bounds[0] < bounds[1] < exact and float(bounds[2]) == pytest.approx(float(exact), rel=1e-5)
    np.testing.assert_allclose(agreeing, 0, atol=1e-5)


def test_what_is_stored_are_the_most_likely_tokens(example: dict) -> None:
    y = teacher_of(example)
    found = top_tokens(Projection(jnp.asarray(y, jnp.float32), None, V), 4, 3.0, chunks=2)
    order = np.argsort(-y, axis=-1)[..., :4]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_allclose(found.logprobs, np.log(np.take_along_axis(softmax(y / 3), order, -1)), rtol=1e-5)


@pytest.mark.slow
def test_a_mesh_gives_the_same_loss_and_gradient() -> None:
    """data 2 × fsdp 2 × tensor 2: rows and vocabulary are split, live and stored."""
    random = np.random.default_rng(1)
    hidden, other = random.standard_normal((2, 8, 6, 16)).astype(np.float32)
    head, table = random.standard_normal((2, 16, 64)).astype(np.float32)
    targets = random.integers(0, 60, (8, 6))

    def both(hidden: jax.Array, head: jax.Array, other: jax.Array, table: jax.Array) -> Any:
        def loss(hidden: jax.Array, head: jax.Array, k: int) -> jax.Array:
            teacher = Projection(other, table, 60)
            against = top_tokens(teacher, k, 2.0) if k else teacher
            how = {"alpha": 0.5, "temperature": 2.0, "chunks": 2}
            return distillation_loss(Projection(hidden, head, 60), against, targets, jnp.ones((8, 6)), **how)[0]

        return [jax.value_and_grad(loss, argnums=(0, 1))(hidden, head, k) for k in (0, 5)]

    alone = jax.jit(both)(hidden, head, other, table)
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2), devices=jax.devices()[:8])
    rows = PartitionSpec(("data", "fsdp"))
    matrix = PartitionSpec("fsdp", "tensor")
    with topology.scope():
        placed = [
            jax.device_put(x, NamedSharding(topology.mesh, spec))
            for x, spec in ((hidden, rows), (head, matrix), (other, rows), (table, matrix))
        ]
        spread = jax.jit(both)(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), spread, alone)
