"""A model of one's own needs only `__call__`: what the base adds agrees with GPT's own loss."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bessemer as bm
from bessemer.losses.cross_entropy import Projection, cross_entropy
from bessemer.losses.token_scores import token_logprobs

VOCAB, WIDTH = 13, 6


class Tiny(bm.LanguageModel):
    width: int = WIDTH

    @nn.compact
    def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):
        x = nn.Embed(self.vocab_size, self.width, name="embed")(input_ids)
        return nn.Dense(self.vocab_size, use_bias=False, name="head")(
            x + self.param("bias", nn.initializers.ones, (6,))
        )


@pytest.fixture(scope="module")
def made():
    model = Tiny(vocab_size=VOCAB, block_size=8)
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, VOCAB, (2, 8)), rng.integers(-1, VOCAB, (2, 8))
    batch = {"input_ids": ids, "target_ids": targets, "loss_mask": rng.random((2, 8), np.float32)}
    return model, model.init(jax.random.key(0), ids), jax.tree.map(jnp.asarray, batch)


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_those_of_the_shared_formula(made):
    model, variables, batch = made
    params = variables["params"]

    def own(p):
        return model.apply({"params": p}, batch, 0.1, 0.01, method="loss")[0]

    def shared(p):
        hidden = p["embed"]["embedding"][batch["input_ids"]] + p["bias"]
        options = {"vocab_size": VOCAB, "label_smoothing": 0.1, "z_loss": 0.01}
        return cross_entropy(hidden, p["head"]["kernel"], batch["target_ids"], batch["loss_mask"], **options)[0]

    (value, grads), (expected, expected_grads) = (jax.value_and_grad(own)(params), jax.value_and_grad(shared)(params))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, expected_grads)


def test_the_weight_counts_targets_and_the_log_probabilities_make_the_nll(made):
    model, variables, batch = made
    _, weight, metrics = model.apply(variables, batch, method="loss")
    logprobs = model.apply(variables, batch, method="token_logprobs")
    weights = np.where(batch["target_ids"] < 0, 0, batch["loss_mask"])
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["nll"], -(logprobs * weights).sum(), rtol=1e-5)
    hidden = variables["params"]["embed"]["embedding"][batch["input_ids"]] + variables["params"]["bias"]
    head = variables["params"]["head"]["kernel"]
    expected = token_logprobs(Projection(hidden, head, VOCAB), batch["target_ids"])
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-6)


def test_counts_and_flops(made):
    model = made[0]
    table = VOCAB * WIDTH
    assert model.count_parameters() == {
        "matrix": table,
        "embedding": table,
        "scalar": WIDTH,
        "total": 2 * table + WIDTH,
        "scaling": table,
    }
    assert model.flops_per_token(8, causal=True) == 6 * table


def test_a_model_without_call_says_what_is_missing():
    class Empty(bm.LanguageModel):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define __call__"):
        Empty(vocab_size=3).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
