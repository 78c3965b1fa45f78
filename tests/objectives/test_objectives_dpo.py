"""DPO and its family: against TRL's own numbers, against numpy float64, and over packed rows against answers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.tiny_run import random_params, tiny_model, tiny_tokenizer

from bessemer.data import DatasetStyle, make_rows
from bessemer.errors import InputError
from bessemer.objectives.preference import LOSSES, REFERENCE_FREE, SMOOTHED, Answers, DpoSettings, answer_logps, dpo
from bessemer.registry import objectives

REFERENCE = Path(__file__).parent.parent / "reference" / "preference_trl.json"
TRL = json.loads(REFERENCE.read_text())


def answers_of(logps: Any, reference: Any, tokens: Any, real: Any = None) -> Answers:
    """From (2, pairs) arrays: one row of pairs."""
    put = [None if x is None else jnp.asarray(np.asarray(x, np.float32).T[None]) for x in (logps, reference, tokens)]
    pairs = put[0].shape[1]
    return Answers(put[0], put[1], put[2], jnp.ones((1, pairs)) if real is None else jnp.asarray(real)[None])


@pytest.mark.parametrize("name", LOSSES)
def test_equals_trl(name: str) -> None:
    want, known = TRL["losses"][name], TRL["settings"]
    smoothing = known["label_smoothing"].get(name, 0.0)
    settings = DpoSettings(name, beta=known["beta"], gamma=known["gamma"], label_smoothing=smoothing)
    policy, reference, tokens = (np.sum(TRL[key], -1) for key in ("policy", "reference", "mask"))
    given = answers_of(policy, None if name in REFERENCE_FREE else reference, tokens)

    def loss(logps: jax.Array) -> jax.Array:
        return LOSSES[name](given._replace(logps=logps), settings).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(given.logps)
    np.testing.assert_allclose(value, want["loss"], rtol=2e-6)
    np.testing.assert_allclose(gradient[0].T, want["gradient"], rtol=2e-5, atol=1e-8)


def test_the_script_still_gives_the_stored_numbers() -> None:
    pytest.importorskip("trl")
    from tests.reference import preference_trl

    made = preference_trl.values()
    for name, want in TRL["losses"].items():
        np.testing.assert_allclose(made["losses"][name]["loss"], want["loss"], rtol=1e-7)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def by_hand(name: str, w: np.ndarray, lose: np.ndarray, nw: np.ndarray, nl: np.ndarray, s: DpoSettings) -> np.ndarray:
    """Each formula once more, in float64: w, lose are log-ratios (log π without a reference), nw, nl token counts."""
    b, e = s.beta, s.label_smoothing
    smooth = lambda x: -(1 - e) * np.log(sigmoid(x)) - e * np.log(sigmoid(-x))  # noqa: E731
    if name in ("sigmoid", "cpo"):
        return smooth(b * (w - lose))
    if name == "robust":
        x = b * (w - lose)
        return ((1 - e) * -np.log(sigmoid(x)) - e * -np.log(sigmoid(-x))) / (1 - 2 * e)
    if name == "hinge":
        return np.maximum(0, 1 - b * (w - lose))
    if name == "ipo":
        return (w / nw - lose / nl - 1 / (2 * b)) ** 2
    if name == "simpo":
        return smooth(b * (w / nw - lose / nl) - s.gamma)
    if name == "kto":
        z = max(0.0, float(np.mean([w, lose])))
        return (1 - sigmoid(b * (w - z))) / 2 + (1 - sigmoid(b * (z - lose))) / 2
    if name == "apo_zero":
        return 1 - sigmoid(b * w) + sigmoid(b * lose)
    if name == "apo_down":
        return sigmoid(b * w) + 1 - sigmoid(b * (w - lose))
    odds = [np.exp(m) / (1 - np.exp(m)) for m in (w / nw, lose / nl)]
    return -b * np.log(sigmoid(np.log(odds[0] / odds[1])))


@pytest.mark.parametrize(("name", "shift"), [*((name, 0.0) for name in LOSSES), ("kto", 4.0)])
def test_equals_numpy(name: str, shift: float) -> None:
    """`shift` raises the policy over the reference, so that KTO's z is above 0."""
    rng = np.random.default_rng(3)
    logps, reference = -rng.uniform(1, 30, (2, 2, 7))
    logps = np.minimum(logps + shift, -0.5)
    tokens = rng.integers(1, 9, (2, 7))
    settings = DpoSettings(name, beta=0.4, gamma=0.7, label_smoothing=0.2 * (name in SMOOTHED))
    ratios = logps if name in REFERENCE_FREE else logps - reference
    found = LOSSES[name](answers_of(logps, None if name in REFERENCE_FREE else reference, tokens), settings)
    want = by_hand(name, ratios[0], ratios[1], tokens[0], tokens[1], settings)
    np.testing.assert_allclose(found[0], want, rtol=2e-5, atol=1e-6)


ROWS = [
    {"prompt": f"Where is cat {n}?", "chosen": "On the mat." * (1 + n % 3), "rejected": "Under it!" * (1 + n % 2)}
    for n in range(7)
]


@pytest.fixture(scope="module")
def parts() -> Any:
    """A model whose documents do not see each other, two sets of weights, and all pairs packed into rows."""
    model = tiny_model().clone(document_mask=True, block_size=128, depth=1)
    rows = make_rows(ROWS, DatasetStyle.CONTRASTIVE, 128, tokenizer=tiny_tokenizer())

    @jax.jit
    def logprobs(params: Any, batch: Any) -> jax.Array:
        return model.apply({"params": params}, batch, method="token_logprobs")

    def apply(params: Any, batch: Any, deterministic: bool = True, method: str = "", rngs: Any = None) -> jax.Array:
        assert method == "token_logprobs"
        return logprobs(params, batch)

    batch = {name: jnp.asarray(values) for name, values in rows.get(np.arange(len(rows))).items()}
    return apply, random_params(model, 1), random_params(model, 2), batch


def alone(apply: Any, params: Any) -> np.ndarray:
    """(2, pairs) log p of each answer in a row of its own, and nothing else in it."""
    tokenizer, found = tiny_tokenizer(), []
    for side in ("chosen", "rejected"):
        documents = []
        for row in ROWS:
            prompt = [tokenizer.bos_id, tokenizer.specials["<|user_start|>"], *tokenizer.encode(row["prompt"])]
            prompt += [tokenizer.specials["<|user_end|>"], tokenizer.specials["<|assistant_start|>"]]
            answer = [*tokenizer.encode(row[side]), tokenizer.specials["<|assistant_end|>"]]
            mask = [0] * len(prompt) + [1] * len(answer)
            documents.append({"input_ids": prompt + answer, "loss_mask": mask})
        rows = make_rows(documents, DatasetStyle.PADDED, 128, tokenizer=tokenizer)
        batch = rows.get(np.arange(len(rows)))
        logps = np.asarray(apply(params, batch, method="token_logprobs"), np.float64)
        found.append((logps * batch["loss_mask"]).sum(-1))
    return np.array(found)


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "kto", "orpo"])
def test_packed_rows_give_the_loss_of_the_answers_alone(parts: Any, name: str) -> None:
    """Prompt, padding and neighbors count for nothing, and the mean is over pairs, not tokens or rows."""
    apply, params, reference, batch = parts
    settings = DpoSettings(name, beta=0.05, reference="live", sft_alpha=0.5)
    loss, weight, metrics = dpo(apply, params, batch, None, settings, reference=reference)
    policy, against = alone(apply, params), alone(apply, reference)
    tokens = np.array(
        [[len(tiny_tokenizer().encode(row[side])) + 1 for row in ROWS] for side in ("chosen", "rejected")]
    )
    ratios = policy if name in REFERENCE_FREE else policy - against
    rows = [numbers[numbers >= 0] for numbers in np.asarray(batch["pair_ids"])]
    pieces = [by_hand(name, *ratios[:, row], *tokens[:, row], settings) for row in rows]  # KTO's z is a row's own
    want = np.concatenate(pieces).sum() - 0.5 * (policy[0] / tokens[0]).sum()
    assert weight == len(ROWS)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics["logps/rejected"], policy[1].sum(), rtol=1e-5)
    if name == "sigmoid":
        margins = 0.05 * (ratios[0] - ratios[1])
        np.testing.assert_allclose(metrics["margin"], margins.sum(), rtol=1e-4)
        assert metrics["pref_acc"] == (margins > 0).sum()


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "kto", "orpo"])
def test_parts_of_a_batch_sum_to_the_whole(bigrams: Any, name: str) -> None:
    """Accumulation and devices cut between rows: what is optimized must not change."""
    apply, params, reference, batch = bigrams
    settings = DpoSettings(name, reference="live")
    whole = dpo(apply, params, batch, None, settings, reference=reference)
    count = len(batch["pair_ids"])
    assert count > 1
    pieces = [
        dpo(apply, params, {k: v[i : i + 1] for k, v in batch.items()}, None, settings, reference=reference)
        for i in range(count)
    ]
    np.testing.assert_allclose(sum(p[0] for p in pieces), whole[0], rtol=1e-5)
    assert sum(p[1] for p in pieces) == whole[1] == len(ROWS)


@pytest.fixture(scope="module")
def bigrams(parts: Any) -> Any:
    """The same rows for a model that is one table, so that gradients cost nothing: p(next | token)."""
    rng = np.random.default_rng(5)
    policy, reference = (jnp.asarray(rng.standard_normal((300, 300)), jnp.float32) for _ in range(2))

    def apply(table: Any, batch: Any, deterministic: bool = True, method: str = "", rngs: Any = None) -> jax.Array:
        targets = batch["target_ids"]
        logps = jax.nn.log_softmax(table)[batch["input_ids"], jnp.maximum(targets, 0)]
        return jnp.where(targets < 0, 0.0, logps)

    return apply, policy, reference, parts[3]


def test_cached_reference_is_the_live_one_and_has_no_gradient(bigrams: Any) -> None:
    apply, policy, reference, batch = bigrams
    cached = {**batch, "reference_logps": answer_logps(apply, reference, batch)}
    live = DpoSettings(reference="live")

    def loss(policy: Any, against: Any) -> jax.Array:
        return dpo(apply, policy, batch, None, live, reference=against)[0]

    gradient, against = jax.grad(loss, argnums=(0, 1))(policy, reference)
    assert np.any(gradient) and not np.any(against)
    from_cache = jax.grad(lambda policy: dpo(apply, policy, cached, None, DpoSettings())[0])(policy)
    np.testing.assert_array_equal(gradient, from_cache)


@pytest.mark.parametrize("name", ["sigmoid", "orpo"])
def test_gradient_is_that_of_the_loss(bigrams: Any, name: str) -> None:
    """Along a random direction, against central differences."""
    apply, policy, reference, batch = bigrams
    settings = DpoSettings(name, reference="live", sft_alpha=0.3)
    loss = jax.jit(lambda table: dpo(apply, table, batch, None, settings, reference=reference)[0])
    direction = jnp.asarray(np.random.default_rng(0).standard_normal(policy.shape), jnp.float32)
    slope = (float(loss(policy + 1e-2 * direction)) - float(loss(policy - 1e-2 * direction))) / 2e-2
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(policy), direction), slope, rtol=1e-2)


def test_who_needs_a_reference() -> None:
    traits = objectives.entry("dpo").traits
    for loss in LOSSES:
        live, cached = (DpoSettings(loss, reference=kind) for kind in ("live", "cached"))
        compares = loss not in ("simpo", "orpo", "cpo")
        assert traits["reference"](live) == traits["reference_logps"](cached) == compares
        assert not traits["reference"](cached) and not traits["reference_logps"](live)


def test_settings_that_contradict_are_refused() -> None:
    for wrong in ({"beta": 0.0}, {"loss": "ipo", "label_smoothing": 0.1}, {"loss": "robust", "label_smoothing": 0.5}):
        with pytest.raises(InputError, match="dpo"):
            DpoSettings(**wrong)


def test_rows_without_pairs_say_so(parts: Any) -> None:
    apply, params, _, batch = parts
    plain = {name: value for name, value in batch.items() if name != "pair_ids"}
    with pytest.raises(InputError, match="CONTRASTIVE"):
        dpo(apply, params, plain, None, DpoSettings())
