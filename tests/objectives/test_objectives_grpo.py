"""The GRPO family against TRL's numbers (stored), numpy in float64, and the model's own logits."""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.config import declared
from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.objectives.grpo import (
    TOKENS,
    VARIANTS,
    GrpoSettings,
    group_advantages,
    grpo,
    importance_weights,
    policy_loss,
)
from bessemer.registry import objectives

REFERENCE = Path(__file__).parent.parent / "reference" / "grpo_trl.json"
STORED = json.loads(REFERENCE.read_text())
OURS = {"grpo": "sequence", "dapo": "token", "dr_grpo": "fixed"}
GROUP, LONGEST = 4, 9


def arrays() -> dict[str, np.ndarray]:
    data = {name: np.asarray(value, np.float64) for name, value in STORED["inputs"].items()}
    advantages = np.asarray(STORED["advantages"])[:, None] * np.ones_like(data["mask"])
    return {**data, "advantages": advantages}


def settings_of(case: dict) -> GrpoSettings:
    return GrpoSettings(
        clip_eps=case["low"],
        clip_eps_high=case["high"],
        kl_coef=case["beta"],
        kl_estimator="k3",
        ratio=case["level"],
        normalization=OURS[case["loss_type"]],
        max_completion_length=LONGEST,
    )


def run(data: dict[str, np.ndarray], settings: GrpoSettings):
    """(loss, gradient, metrics as means over tokens) of one batch."""
    x = {name: jnp.asarray(value, jnp.float32) for name, value in data.items()}

    def mean(logprobs):
        loss, weight, sums = policy_loss(logprobs, x["old"], x["reference"], x["advantages"], x["mask"], settings)
        return loss / weight, sums

    (loss, sums), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(x["logprobs"])
    return loss, gradient, {name: value / sums[TOKENS] for name, value in sums.items()}


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda c: f"{c['loss_type']}-{c['level']}-{c['beta']}")
def test_loss_gradient_and_clipped_share_are_those_of_trl(case):
    loss, gradient, metrics = run(arrays(), settings_of(case))
    np.testing.assert_allclose(loss, case["loss"], rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-5, atol=1e-7)
    if case["level"] == "token":  # TRL counts sequences there, we their tokens
        np.testing.assert_allclose(metrics["clip_frac"], case["clip_frac"], rtol=1e-6)


def test_the_stored_numbers_are_what_trl_gives_now():
    pytest.importorskip("trl")
    import torch

    spec = importlib.util.spec_from_file_location("grpo_trl", REFERENCE.with_suffix(".py"))
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.inputs() == STORED["inputs"]
    advantages = torch.tensor(STORED["advantages"], dtype=torch.float64)
    for case, stored in zip(made.CASES, STORED["cases"], strict=True):
        found = made.trl_case(case, made.inputs(), advantages)
        np.testing.assert_allclose(found["loss"], stored["loss"], rtol=1e-9)


def by_hand(data: dict[str, np.ndarray], s: GrpoSettings) -> float:
    """The formula in loops, float64."""
    low, high = s.clip
    rows, total, tokens = data["mask"].shape[0], 0.0, 0.0
    per_row = []
    for i in range(rows):
        places = [t for t in range(data["mask"].shape[1]) if data["mask"][i, t]]
        logs = [data["logprobs"][i, t] - data["old"][i, t] for t in places]
        if s.ratio == "sequence":
            logs = [sum(logs) / len(logs)] * len(logs)
        losses = []
        for t, log in zip(places, logs, strict=True):
            a, ratio = data["advantages"][i, t], np.exp(log)
            d = data["logprobs"][i, t] - data["reference"][i, t]
            kl = {"squared": d * d, "k1": d, "k3": np.exp(-d) - 1 + d}[s.kl_estimator]
            inside = min(max(ratio, 1 - low), 1 + high)
            losses.append(-min(ratio * a, inside * a) + s.kl_coef * kl)
        per_row.append(sum(losses) / len(losses))
        total, tokens = total + sum(losses), tokens + len(losses)
    if s.normalization == "sequence":
        return float(np.mean(per_row))
    return total / (tokens if s.normalization == "token" else rows * s.max_completion_length)


@pytest.mark.parametrize(
    ("normalization", "estimator", "ratio"),
    [
        ("token", "squared", "token"),
        ("sequence", "k1", "token"),
        ("fixed", "k3", "token"),
        ("token", "k3", "sequence"),
        ("sequence", "squared", "sequence"),
    ],
)
def test_equals_numpy_and_its_differences(normalization, estimator, ratio):
    settings = GrpoSettings(
        normalization=normalization, kl_estimator=estimator, ratio=ratio, kl_coef=0.3, max_completion_length=7
    )
    data = arrays()
    loss, gradient, _ = run(data, settings)
    np.testing.assert_allclose(loss, by_hand(data, settings), rtol=2e-6, atol=1e-7)
    step = 1e-6
    for place in [(0, 0), (2, 0), (5, 0), (7, 0)]:
        moved = {sign: {**data, "logprobs": data["logprobs"].copy()} for sign in (-1, 1)}
        for sign, other in moved.items():
            other["logprobs"][place] += sign * step
        slope = (by_hand(moved[1], settings) - by_hand(moved[-1], settings)) / (2 * step)
        np.testing.assert_allclose(gradient[place], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalization", ["token", "sequence", "fixed"])
def test_a_bonus_is_divided_as_the_loss_is(normalization):
    """c·H of uneven micro-batches adds up to that of the batch, over the same denominator."""
    settings, data = GrpoSettings(normalization=normalization, max_completion_length=7), arrays()
    mask = data["mask"]
    bonus = np.random.default_rng(0).uniform(0, 1, mask.shape)
    names = ("logprobs", "old", "reference", "advantages", "mask")

    def sums(rows, with_bonus):
        some = [jnp.asarray(data[name][rows], jnp.float32) for name in names]
        extra = jnp.asarray(bonus[rows], jnp.float32) if with_bonus else None
        return np.array(policy_loss(*some, settings, extra)[:2], np.float64)

    parts = [slice(0, 1), slice(1, 3), slice(3, 8)]
    (loss, weight), (plain, same) = (sum(sums(rows, on) for rows in parts) for on in (True, False))
    wanted = {
        "token": (mask * bonus).sum() / mask.sum(),
        "sequence": np.mean((mask * bonus).sum(axis=1) / mask.sum(axis=1)),
        "fixed": (mask * bonus).sum() / (len(mask) * 7),
    }[normalization]
    assert weight == same
    np.testing.assert_allclose((plain - loss) / weight, wanted, rtol=1e-5)


@pytest.mark.parametrize("normalization", ["token", "sequence", "fixed"])
def test_parts_of_a_batch_add_up_to_the_batch(normalization):
    """Accumulation: sums and weights of uneven micro-batches are those of the whole."""
    settings, data = GrpoSettings(normalization=normalization), arrays()
    names = ("logprobs", "old", "reference", "advantages", "mask")

    def sums(rows):
        some = [np.asarray(data[name][rows], np.float32) for name in names]
        return jax.jit(functools.partial(policy_loss, settings=settings))(*some)

    whole, parts = sums(slice(None)), [sums(rows) for rows in (slice(0, 1), slice(1, 3), slice(3, 8))]
    for which in (0, 1):
        np.testing.assert_allclose(whole[which], sum(part[which] for part in parts), rtol=1e-6)
    for name, value in whole[2].items():
        np.testing.assert_allclose(value, sum(part[2][name] for part in parts), rtol=1e-6)


def test_a_negative_advantage_is_not_rescued_by_the_clip():
    """min, not max: where the policy has moved towards a bad completion the gradient stays."""
    one = {name: np.zeros((1, 1)) for name in ("old", "reference")} | {"mask": np.ones((1, 1))}
    settings = GrpoSettings(kl_coef=0.0)
    for logprob, advantage, moves in ((0.5, -1, True), (-0.5, -1, False), (0.5, 1, False), (-0.5, 1, True)):
        data = one | {"logprobs": np.full((1, 1), logprob), "advantages": np.full((1, 1), float(advantage))}
        _, gradient, metrics = run(data, settings)
        assert bool(gradient[0, 0] != 0) is moves
        assert metrics["clip_frac"] == (0.0 if moves else 1.0)


LETTERS, END = 3, 0


def completions(length: int) -> list[tuple[int, ...]]:
    """All completions over LETTERS tokens that stop at END, or after `length` tokens."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(length):
        grown = [one if one[-1:] == (END,) else None for one in found]
        found = [one for one in grown if one is not None] + [
            (*one, token) for one, done in zip(found, grown, strict=True) if done is None for token in range(LETTERS)
        ]
    return found


def expected_gradient(theta: np.ndarray, sampler: np.ndarray, kind: str, cap: float = 1e9) -> np.ndarray:
    """Exact E_μ of the loss's gradient. theta, sampler: logits (length, LETTERS + 1, LETTERS), after each token; μ is
    the sampler's distribution, the trainer's is softmax(theta). A reward is the number of 2s, twice it after a 1."""
    length = len(theta)
    every = completions(length)
    ids, before, real = (np.zeros((len(every), length), int) for _ in range(3))
    for row, one in enumerate(every):
        ids[row, : len(one)], real[row, : len(one)] = one, 1
        before[row, : len(one)] = [LETTERS, *one[:-1]]
    at, real = np.arange(length), real > 0
    rewards = np.array([one.count(2) * (2.0 if 1 in one else 1.0) for one in every])

    def picked(logits):
        table = jax.nn.log_softmax(jnp.asarray(logits))
        return jnp.where(real, table[at, before, ids], 0.0)

    old, drawn = np.asarray(picked(theta), np.float64), np.asarray(picked(sampler), np.float64)
    chances = np.exp(drawn.sum(axis=1, where=real))
    assert abs(chances.sum() - 1) < 1e-5
    weights, _ = importance_weights(old, np.where(real, drawn, 0), real, kind, cap)
    settings = GrpoSettings(kl_coef=0.0, normalization="fixed", max_completion_length=1)

    def loss(logits):
        advantages = jnp.asarray(rewards[:, None] * weights * np.ones(real.shape), jnp.float32)
        scaled = advantages * jnp.asarray(chances[:, None], jnp.float32)  # the mean over μ, row by row
        return policy_loss(picked(logits), jnp.asarray(old, jnp.float32), None, scaled, jnp.float32(real), settings)[0]

    return np.asarray(jax.grad(loss)(jnp.asarray(theta, jnp.float32)))


def mismatched(length: int, size: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    theta = rng.standard_normal((length, LETTERS + 1, LETTERS))
    return theta, theta + size * rng.standard_normal(theta.shape)


@pytest.mark.parametrize(("length", "kind"), [(1, "truncated"), (1, "sequence"), (3, "sequence")])
def test_importance_weights_remove_the_bias_of_another_sampler(length, kind):
    """Every completion enumerated: the expected gradient is that of an exact sampler, and without weights it is not."""
    theta, sampler = mismatched(length, 0.5)
    right = expected_gradient(theta, theta, "none")
    np.testing.assert_allclose(expected_gradient(theta, sampler, kind), right, atol=1e-5)
    assert np.linalg.norm(expected_gradient(theta, sampler, "none") - right) > 0.1 * np.linalg.norm(right)


def test_weights_of_tokens_leave_the_bias_of_the_tokens_before_and_the_cap_adds_some():
    """`truncated` on completions of several tokens: less bias than without, not 0. So does the cap."""
    theta, sampler = mismatched(3, 0.5)
    right = expected_gradient(theta, theta, "none")
    bias = {
        name: np.linalg.norm(expected_gradient(theta, sampler, *how) - right)
        for name, how in {"none": ("none",), "token": ("truncated",), "capped": ("sequence", 1.2)}.items()
    }
    assert 0.01 < bias["token"] < bias["none"] and 0.001 < bias["capped"] < bias["none"]


def test_importance_is_measured_over_real_tokens():
    old, sampled = np.log([[0.5, 0.2, 0.9], [0.1, 0.4, 0.9]]), np.log([[0.25, 0.4, 0.1], [0.1, 0.1, 0.1]])
    real = np.array([[True, True, False], [True, True, False]])
    weights, found = importance_weights(old, sampled, real, "truncated", 3.0)
    np.testing.assert_allclose(weights, [[2, 0.5, 1], [1, 3, 1]], rtol=1e-6)
    ratios = np.array([2, 0.5, 1, 4])
    assert found["ess"] == pytest.approx(ratios.sum() ** 2 / (4 * (ratios**2).sum()))
    assert found["importance_capped"] == 0.25 and found["ratio_p50"] == pytest.approx(1.5)
    weights, found = importance_weights(old, sampled, real, "sequence", 3.0)
    np.testing.assert_allclose(weights, [[1, 1, 1], [3, 3, 1]], rtol=1e-6)
    weights, found = importance_weights(old, sampled, real, "none")
    assert (weights == 1).all() and "importance_capped" not in found


def test_advantages():
    rewards = np.array([[1.0, 0, 0, 3], [2, 2, 2, 2]])
    np.testing.assert_allclose(
        group_advantages(np.asarray(STORED["inputs"]["rewards"]).reshape(-1, GROUP)).ravel(),
        STORED["advantages"],
        rtol=1e-7,  # TRL corrects the deviation in float32
    )
    np.testing.assert_array_equal(group_advantages(rewards)[1], 0)
    np.testing.assert_allclose(group_advantages(rewards, scale=False)[0], [0, -1, -1, 2])
    np.testing.assert_allclose(group_advantages(rewards, "leave_one_out", False)[0], [0, -4 / 3, -4 / 3, 8 / 3])
    np.testing.assert_allclose(group_advantages(rewards, "rollout", False), rewards - 1.5)
    np.testing.assert_array_equal(group_advantages(rewards, "none", False), rewards)
    assert np.isfinite(group_advantages(rewards[:, :1])).all()


def test_variants_are_other_defaults_of_the_same_settings():
    assert set(VARIANTS) == {"grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce"}
    for name, cls in VARIANTS.items():
        entry = objectives.entry(name)
        assert entry.value is grpo and entry.settings == (cls,)
        assert {s.key: s.type for s in declared(cls).values()} == {
            s.key: s.type for s in declared(GrpoSettings).values()
        }
        assert entry.traits["reference"](cls()) is (cls().kl_coef > 0)
    assert VARIANTS["dapo"]().clip == (0.2, 0.28) and VARIANTS["grpo"]().clip == (0.2, 0.2)
    assert VARIANTS["reinforce"]().clip == (float("inf"), float("inf"))
    assert entry.traits["reference"](VARIANTS["dapo"](offline="reference"))


@pytest.fixture(scope="module")
def parts():
    model = GPT(
        depth=2, width=32, head_dim=16, vocab_size=30, block_size=12, loss_chunks=3, precision="float32", dropout=0.3
    )
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params)
    ids = rng.integers(0, 30, (4, 13)).astype(np.int32)
    mask = np.zeros((4, 12), np.float32)
    for row, (first, end) in enumerate([(3, 12), (2, 5), (7, 8), (1, 11)]):
        mask[row, first:end] = 1
    targets = np.where(mask > 0, ids[:, 1:], -1)
    advantages = np.array([1.0, -1, 0.5, -0.2], np.float32)[:, None] * np.ones_like(mask)
    batch = {"input_ids": ids[:, :-1], "target_ids": targets, "loss_mask": mask, "advantages": advantages}

    def apply(params, *args, method=None, rngs=None, **kwargs):
        return model.apply({"params": params}, *args, method=method, rngs=rngs, **kwargs)

    return apply, params, batch


def held(apply, settings):
    """(params, batch, reference) -> the objective."""
    return jax.jit(lambda p, b, against: grpo(apply, p, b, None, settings, reference=against))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_a_model_the_policy_is_the_one_that_sampled(parts, temperature):
    """Log-probabilities and entropy are of softmax(logits / T), without dropout; KL to other weights is seen."""
    apply, params, batch = parts
    logits = np.asarray(jax.jit(apply)(params, batch["input_ids"]), np.float64) / temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(logp, np.maximum(batch["target_ids"], 0)[..., None], -1)[..., 0]
    entropy = -(np.exp(logp) * logp).sum(-1)
    settings = GrpoSettings(temperature=temperature, kl_coef=0.0)
    rows = {**batch, "old_logprobs": (picked * batch["loss_mask"]).astype(np.float32)}
    loss, weight, sums = jax.jit(lambda p, b: grpo(apply, p, b, jax.random.key(1), settings))(params, rows)
    np.testing.assert_allclose(loss, -(batch["advantages"] * batch["loss_mask"]).sum(), rtol=1e-5)  # ρ = 1
    assert weight == batch["loss_mask"].sum() and sums["clip_frac"] == 0 and "kl" not in sums
    np.testing.assert_allclose(sums["entropy"], (entropy * batch["loss_mask"]).sum(), rtol=1e-5)
    other = jax.tree.map(lambda x: x * 1.05, params)
    _, _, moved = held(apply, replace(settings, kl_coef=0.1))(params, rows, other)
    assert moved["kl"] > 0


def test_without_stored_logprobs_the_ratio_is_to_the_reference(parts):
    apply, params, batch = parts
    settings = GrpoSettings(offline="reference", kl_coef=0.0)
    loss, _, sums = held(apply, settings)(params, batch, params)
    np.testing.assert_allclose(loss, -(batch["advantages"] * batch["loss_mask"]).sum(), rtol=1e-5)
    assert sums["kl"] == 0
    with pytest.raises(InputError, match=r"grpo\.offline"):
        held(apply, settings)(params, batch, None)
    with pytest.raises(InputError, match="GRPOTrainer"):
        grpo(apply, params, {k: v for k, v in batch.items() if k != "advantages"}, None, settings)
