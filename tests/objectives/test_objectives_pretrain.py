"""The pretrain objective against numpy float64 on the model's own logits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.losses.cross_entropy import PROGRESS
from bessemer.models.gpt import GPT
from bessemer.models.protocol import LanguageModel
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.registry import objectives
from bessemer.training.setup.model import make_apply


@pytest.fixture(scope="module")
def parts():
    model = GPT(depth=2, width=32, head_dim=16, vocab_size=30, block_size=12, dropout=0.2, loss_chunks=3)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params)
    ids = rng.integers(0, 30, (4, 13)).astype(np.int32)
    targets = np.where(rng.uniform(size=(4, 12)) < 0.25, -1, ids[:, 1:])
    batch = {"input_ids": ids[:, :-1], "target_ids": targets}

    def apply(params, *args, method=None, rngs=None, **kwargs):
        return model.apply({"params": params}, *args, method=method, rngs=rngs, **kwargs)

    return apply, params, batch


def by_hand(apply, params, batch, epsilon, zeta):
    logits = np.asarray(apply(params, batch["input_ids"]), np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    logp = logits - lse[..., None]
    targets = batch["target_ids"]
    weights = np.where(targets < 0, 0.0, batch.get("loss_mask", np.ones(targets.shape)))
    nll = -np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = (1 - epsilon) * nll - epsilon * logp.mean(-1) + zeta * lse**2
    return (weights * loss).sum(), weights.sum(), (weights * nll).sum()


@pytest.mark.parametrize(("epsilon", "zeta"), [(0.0, 0.0), (0.1, 0.0), (0.05, 1e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_numpy(parts, epsilon, zeta, masked):
    apply, params, batch = parts
    if masked:
        batch = {**batch, "loss_mask": np.random.default_rng(2).uniform(size=(4, 12)).astype(np.float32)}
    loss, weight, metrics = pretrain(apply, params, batch, None, PretrainSettings(epsilon, zeta))
    want = by_hand(apply, params, batch, epsilon, zeta)
    np.testing.assert_allclose((loss, weight, metrics["nll"]), want, rtol=2e-6)


def test_further_tokens_equal_numpy_and_stay_in_their_document(parts):
    apply, params, batch = parts
    still = GPT(depth=2, width=32, head_dim=16, vocab_size=30, block_size=12, loss_chunks=3)
    apply = make_apply(still)  # without dropout, whose draws a comparison would have to repeat
    segments = np.asarray([[1] * 12, [1] * 5 + [2] * 7, [1] * 3 + [2] * 3 + [3] * 4 + [0] * 2, [1] * 11 + [2]])
    mask = np.random.default_rng(2).uniform(size=(4, 12)).astype(np.float32)
    batch = {**batch, "segment_ids": segments, "loss_mask": mask, PROGRESS: jnp.asarray(0.25)}
    settings = PretrainSettings(0.05, 1e-2, mtp=(0.6, 0.2), mtp_decay=0.5)  # half of the decay is over
    loss, weight, metrics = pretrain(apply, params, batch, jax.random.key(0), settings)
    plain, want_weight, _ = by_hand(apply, params, batch, 0.05, 1e-2)
    logits = np.asarray(apply(params, batch["input_ids"]), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = np.zeros(2)
    for n in (1, 2):
        for row in range(4):
            for t in range(12 - n):
                targets = batch["target_ids"][row, t : t + n + 1]
                if segments[row, t] == segments[row, t + n] and (targets >= 0).all():
                    nll[n - 1] -= mask[row, t + n] * logp[row, t, targets[-1]]
    np.testing.assert_allclose(float(weight), want_weight, rtol=1e-6)
    np.testing.assert_allclose(float(loss), plain + 0.3 * nll[0] + 0.1 * nll[1], rtol=1e-5)
    np.testing.assert_allclose(float(metrics["further_nll"]), nll.mean(), rtol=1e-5)
    over = pretrain(apply, params, {**batch, PROGRESS: jnp.asarray(0.5)}, jax.random.key(0), settings)[0]
    judged = pretrain(apply, params, batch, None, settings)
    np.testing.assert_allclose([float(over), float(judged[0])], plain, rtol=1e-5)
    assert "further_nll" not in judged[2]
    with pytest.raises(InputError, match="mtp_decay"):
        PretrainSettings(mtp_decay=0.5)


def test_further_tokens_of_a_model_of_ones_own(parts):
    _, params, batch = parts
    model = GPT(depth=2, width=32, head_dim=16, vocab_size=30, block_size=12)

    class Own(LanguageModel):
        vocab_size: int = 30
        block_size: int = 12

        def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):
            return model.apply({"params": params}, input_ids)

    further = jnp.asarray([0.5, 0.25])
    want = model.apply({"params": params}, batch, further=further, method="loss")
    found = Own().apply({}, batch, further=further, method="loss")
    np.testing.assert_allclose([found[0], found[2]["further_nll"]], [want[0], want[2]["further_nll"]], rtol=1e-5)


def test_sums_over_pieces_of_a_batch_are_the_sum_of_the_batch(parts):
    apply, params, batch = parts
    settings = PretrainSettings()
    whole = pretrain(apply, params, batch, None, settings)
    pieces = [
        pretrain(apply, params, {k: v[rows] for k, v in batch.items()}, None, settings)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    np.testing.assert_allclose(sum(p[0] for p in pieces), whole[0], rtol=1e-6)
    np.testing.assert_allclose(sum(p[1] for p in pieces), whole[1], rtol=1e-6)


def test_a_key_turns_dropout_on(parts):
    apply, params, batch = parts
    settings = PretrainSettings()
    still = pretrain(apply, params, batch, None, settings)[0]
    one, two = (pretrain(apply, params, batch, jax.random.key(s), settings)[0] for s in (1, 2))
    assert len({float(still), float(one), float(two)}) == 3


def test_registered_under_both_names():
    assert objectives.get("pretrain") is pretrain and objectives.get("seq") is pretrain
    assert objectives.entry("seq").settings == (PretrainSettings,)
