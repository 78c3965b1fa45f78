"""The kl objective against numpy float64 on the models' own logits, and its gradients against what they must be."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bessemer as bm
from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.objectives.kl import KLConfig, kl
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.registry import objectives

VOCABULARY = 30


class Bigrams(bm.LanguageModel):
    """A model that only has logits: the path of those that are not GPT."""

    @nn.compact
    def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):  # type: ignore[no-untyped-def]
        return nn.Embed(self.vocab_size, self.vocab_size)(input_ids)


def make(model: Any) -> tuple[Any, Any, Any]:
    """(apply, policy, reference): weights far enough apart that every term counts."""
    start = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    rng = np.random.default_rng(0)

    def moved() -> Any:
        return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), start)

    def apply(params, *args, method=None, rngs=None, **kwargs):  # type: ignore[no-untyped-def]
        return model.apply({"params": params}, *args, method=method, rngs=rngs, **kwargs)

    return apply, moved(), moved()


@pytest.fixture(scope="module")
def gpt() -> tuple[Any, Any, Any]:
    """The vocabulary is padded, the sequence cut into pieces that do not divide it."""
    return make(GPT(depth=1, width=32, head_dim=16, vocab_size=VOCABULARY, block_size=12, dropout=0.2, loss_chunks=5))


@pytest.fixture(scope="module")
def bigrams() -> tuple[Any, Any, Any]:
    return make(Bigrams(vocab_size=VOCABULARY, block_size=12))


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCABULARY, (4, 13)).astype(np.int32)
    targets = np.where(rng.uniform(size=(4, 12)) < 0.25, -1, ids[:, 1:])
    mask = rng.uniform(size=(4, 12)).astype(np.float32)
    return {"input_ids": ids[:, :-1], "target_ids": targets, "loss_mask": mask}


@functools.cache
def logits_of(apply: Any) -> Any:
    return jax.jit(apply)


def by_hand(parts: Any, batch: Any, settings: KLConfig, beta: float) -> dict[str, float]:
    apply, policy, reference = parts
    both = [np.asarray(logits_of(apply)(p, batch["input_ids"]), np.float64) for p in (policy, reference)]
    return from_logits(both, batch, settings, beta)


def from_logits(both: list[np.ndarray], batch: Any, settings: KLConfig, beta: float) -> dict[str, float]:
    """All sums in float64, from the logits of policy and reference."""
    targets = batch["target_ids"]
    weights = np.where(targets < 0, 0.0, batch["loss_mask"]).astype(np.float64)
    loss, nll, logs = [], [], []
    for logits in both:
        lse = np.log(np.exp(logits).sum(-1))
        logp = logits - lse[..., None]
        nll.append(-np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0])
        smooth = settings.label_smoothing
        loss.append((1 - smooth) * nll[-1] - smooth * logp.mean(-1) + settings.z_loss * lse**2)
        logs.append(logp)
    p, q = logs
    divergence = {
        "exact": (np.exp(p) * (p - q)).sum(-1),
        "reverse": (np.exp(q) * (q - p)).sum(-1),
        "nll": loss[0] - loss[1],
    }
    each = {
        "loss": loss[0] + beta * divergence[settings.estimator],
        "weight": np.ones_like(weights),
        "nll": nll[0],
        "kl": divergence["exact"],
        "kl_nll": nll[0] - nll[1],
        "kl_reverse": divergence["reverse"],
    }
    return {name: float((weights * value).sum()) for name, value in each.items()}


SMOOTH = {"label_smoothing": 0.05, "z_loss": 1e-2}


@functools.cache
def compiled(apply: Any, estimator: str) -> Any:
    """(policy, reference, batch, β) → ((loss, (weight, sums)), gradients in policy and reference), compiled once."""
    settings = KLConfig(**SMOOTH, estimator=estimator)

    def loss(policy: Any, reference: Any, batch: Any, beta: Any) -> Any:
        total, weight, sums = kl(apply, policy, batch, None, settings, reference, beta)
        return total, (weight, sums)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("estimator", ["nll", "exact", "reverse"])
@pytest.mark.parametrize("kind", ["gpt", "bigrams"])
def test_equals_numpy(kind: str, estimator: str, batch: Any, request: pytest.FixtureRequest) -> None:
    parts = request.getfixturevalue(kind)
    apply, policy, reference = parts
    (loss, (weight, sums)), _ = compiled(apply, estimator)(policy, reference, batch, 0.7)
    want = by_hand(parts, batch, KLConfig(**SMOOTH, estimator=estimator), 0.7)
    for name, value in {"loss": loss, "weight": weight, **sums}.items():
        np.testing.assert_allclose(value, want[name], rtol=2e-5, err_msg=name)
    assert ("kl_reverse" in sums) == (estimator == "reverse") and want["kl"] > 0.1


def test_nll_moves_as_more_cross_entropy_and_nothing_else(gpt: Any, batch: Any) -> None:
    """∇[loss + β·(loss − sg(loss of the reference))] = (1 + β)·∇loss, whatever the reference is."""
    apply, policy, reference = gpt
    plain = jax.jit(jax.grad(lambda p: pretrain(apply, p, batch, None, PretrainSettings(**SMOOTH))[0]))(policy)
    for against in (reference, policy):
        _, (gradient, _) = compiled(apply, "nll")(policy, against, batch, 0.4)
        for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(got, 1.4 * np.asarray(want), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("estimator", ["exact", "reverse"])
def test_gradient_against_differences(estimator: str, bigrams: Any, batch: Any) -> None:
    """Central differences of the float64 formula along a random direction."""
    apply, policy, reference = bigrams
    settings = KLConfig(**SMOOTH, estimator=estimator)
    _, (gradient, _) = compiled(apply, estimator)(policy, reference, batch, 2.0)
    (name,) = policy
    table, slope = np.asarray(policy[name]["embedding"], np.float64), np.asarray(gradient[name]["embedding"])
    direction = np.random.default_rng(3).standard_normal(table.shape)

    its = np.asarray(reference[name]["embedding"], np.float64)

    def value(step: float) -> float:
        ids = batch["input_ids"]
        return from_logits([(table + step * direction)[ids], its[ids]], batch, settings, 2.0)["loss"]

    numeric = (value(1e-5) - value(-1e-5)) / 2e-5
    np.testing.assert_allclose((slope * direction).sum(), numeric, rtol=1e-4)


@pytest.mark.parametrize("estimator", ["nll", "exact", "reverse"])
def test_nothing_flows_into_the_reference(estimator: str, gpt: Any, batch: Any) -> None:
    apply, policy, reference = gpt
    _, (_, gradient) = compiled(apply, estimator)(policy, reference, batch, 2.0)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_against_itself_there_is_no_penalty(gpt: Any, batch: Any) -> None:
    """Neither in the loss nor in its gradient, whatever the weight."""
    apply, policy, _ = gpt
    (free, _), (still, _) = compiled(apply, "exact")(policy, policy, batch, 0.0)
    (held, (_, sums)), (moved, _) = compiled(apply, "exact")(policy, policy, batch, 10.0)
    assert max(abs(float(sums["kl"])), abs(float(sums["kl_nll"]))) < 1e-5
    np.testing.assert_allclose(held, free, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(still), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_without_a_reference_it_is_pretraining_at_its_price(gpt: Any, batch: Any) -> None:
    """The first stage runs the very program of pretraining; the second has about a third more to do, and the head."""
    apply, policy, reference = gpt
    settings = KLConfig(beta=(5.0,), estimator="exact")

    def lowered(function: Any) -> Any:
        return jax.jit(jax.grad(lambda p: function(p)[0])).lower(policy)

    plain = lowered(lambda p: pretrain(apply, p, batch, None, PretrainSettings()))
    first = lowered(lambda p: kl(apply, p, batch, None, settings))
    second = lowered(lambda p: kl(apply, p, batch, None, settings, reference))
    assert first.as_text() == plain.as_text()
    costs = [program.cost_analysis()["flops"] for program in (first, second)]
    assert costs[0] < 0.9 * costs[1]


def test_dropout_is_the_policy_s_alone(gpt: Any, batch: Any) -> None:
    """Against itself, a policy with dropout differs; the reference is what it is."""
    apply, policy, _ = gpt
    settings = KLConfig(estimator="exact")
    drop = jax.jit(lambda key: kl(apply, policy, batch, key, settings, policy)[2])
    one, two = (drop(jax.random.key(n)) for n in (1, 2))
    assert float(one["kl"]) > 0 and float(one["kl"]) != float(two["kl"])


def test_no_whole_logits_are_kept() -> None:
    """Temporaries of the compiled gradient stay far below one model's (B, T, V) float32 logits."""
    model = GPT(depth=1, width=32, head_dim=16, vocab_size=8192, block_size=128, loss_chunks=16)
    apply, policy, reference = make(model)
    ids = jnp.zeros((8, 128), jnp.int32)
    rows = {"input_ids": ids, "target_ids": ids}
    settings = KLConfig(estimator="exact")
    gradient = jax.jit(jax.grad(lambda p, r: kl(apply, p, rows, None, settings, r)[0]))
    memory = gradient.lower(policy, reference).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.75 * ids.size * 8192 * 4


def test_one_weight_without_stages() -> None:
    assert objectives.get("kl") is kl and objectives.entry("kl").settings == (KLConfig,)
    assert KLConfig().beta == (0.1,) and KLConfig().estimator == "nll"
    wants = objectives.entry("kl").traits["reference"]
    assert wants(KLConfig()) and not wants(replace(KLConfig(), beta=(0.0, 0.0)))
    with pytest.raises(InputError, match="KLDivergenceTrainer"):
        kl(None, None, {}, None, KLConfig(beta=(0.0, 0.1)), reference={})  # type: ignore[arg-type]
