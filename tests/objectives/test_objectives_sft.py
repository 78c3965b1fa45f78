"""The sft objective: numpy in float64, torch's numbers, one denominator, documents apart, noise only in training."""

from __future__ import annotations

import importlib.util
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.reference import sft_torch as reference
from tests.tiny_run import random_params

import bessemer as bm
from bessemer.data import ArrayStore, DatasetStyle, make_rows
from bessemer.errors import InputError
from bessemer.kernels import ops
from bessemer.models.gpt import GPT
from bessemer.objectives.sft import SftSettings, sft
from bessemer.registry import objectives
from bessemer.training.setup.model import make_apply

PLAIN, NOISY = SftSettings(), SftSettings(neftune_alpha=5.0)
VOCAB, BLOCK = 30, 12


class Table(bm.LanguageModel):
    """Its logits are its parameters."""

    @nn.compact
    def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):
        shape = (*input_ids.shape, self.vocab_size)
        return self.param("logits", nn.initializers.zeros, shape)


def of_logits(logits: np.ndarray, batch: dict[str, np.ndarray]):
    """(mean loss, gradient in the logits) by the objective."""
    apply = make_apply(Table(vocab_size=logits.shape[-1], block_size=logits.shape[1]))

    def mean(params):
        loss, weight, metrics = sft(apply, params, batch, None, PLAIN)
        assert metrics.keys() == {"nll"}
        return loss / weight

    loss, gradient = jax.jit(jax.value_and_grad(mean))({"logits": jnp.asarray(logits)})
    return float(loss), np.asarray(gradient["logits"])


@pytest.mark.parametrize("ignored", [-1, -100])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_numpy_in_float64(ignored: int, masked: bool) -> None:
    logits, targets = reference.tensors()
    rng = np.random.default_rng(3)
    weights = (targets >= 0) * (rng.uniform(size=targets.shape) if masked else 1.0)
    exact = logits.astype(np.float64)
    p = np.exp(exact) / np.exp(exact).sum(-1, keepdims=True)
    one_hot = np.eye(11)[np.maximum(targets, 0)]
    want = -(weights * np.log((p * one_hot).sum(-1))).sum() / weights.sum()
    want_gradient = weights[..., None] * (p - one_hot) / weights.sum()
    batch = {"input_ids": np.zeros(targets.shape, np.int32), "target_ids": np.where(targets < 0, ignored, targets)}
    if masked:
        batch["loss_mask"] = weights.astype(np.float32)
    loss, gradient = of_logits(logits, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, want_gradient, atol=1e-7)


def test_equals_torch_with_ignore_index() -> None:
    """Stored numbers; computed anew where torch is installed."""
    logits, targets = reference.tensors()
    stored = json.loads(reference.FILE.read_text())
    found = [stored, reference.numbers()] if importlib.util.find_spec("torch") else [stored]
    loss, gradient = of_logits(logits, {"input_ids": np.zeros((3, 7), np.int32), "target_ids": targets})
    for numbers in found:
        np.testing.assert_allclose(loss, numbers["sum"] / numbers["count"], rtol=1e-6)
        np.testing.assert_allclose(gradient, numbers["gradient"], atol=2e-8)


def packed(change: int = 0) -> dict[str, np.ndarray]:
    """Two conversations in each of three rows; `change` is added to every token of the first conversation."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, VOCAB - 9, 7) for _ in range(6)]
    masks = [np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 0, 0, 0, 1])] * 3
    documents[0] = documents[0] + change
    store = ArrayStore.of(documents, [m.astype(np.uint8) for m in masks], {"vocab_size": VOCAB, "pad_id": 0})
    rows = make_rows(store, DatasetStyle.PACKED, BLOCK, allow_short=True)
    return rows.get(np.arange(len(rows)))


@pytest.fixture(scope="module")
def parts():
    sizes = {"depth": 1, "width": 32, "head_dim": 16, "vocab_size": VOCAB, "block_size": BLOCK}
    model = GPT(**sizes, document_mask=True)
    return make_apply(model), make_apply(GPT(**sizes)), random_params(model)


def test_a_conversation_does_not_touch_the_loss_of_its_neighbor(parts) -> None:
    """With the document mask, that is, which is on for this objective; without it there is a leak to be seen."""
    apart, together, params = parts
    before, after = packed(), packed(change=5)
    here = before["segment_ids"] == 1
    changed = (before["input_ids"] != after["input_ids"]).any(axis=1)
    assert changed.sum() == 1 and len(changed) == 3
    neighbor = (~here & (before["target_ids"] >= 0)) & changed[:, None]
    assert neighbor.sum() > 0

    def losses(apply, batch):
        run = jax.jit(lambda rows: apply(params, rows, method="token_logprobs"))
        return [-np.asarray(run(rows)) for rows in batch]

    old, new = losses(apart, (before, after))
    assert (old[neighbor] == new[neighbor]).all() and (old != new)[changed].any()
    old, new = losses(together, (before, after))
    assert (old[neighbor] != new[neighbor]).all()
    traits = objectives.entry("sft").traits
    assert traits["document_mask"] is True and traits["style"] is DatasetStyle.PACKED


def test_the_mask_hides_the_prompt_from_the_loss_and_not_from_the_model(parts) -> None:
    """Another prompt, the same answer: other losses. And token 0 is a token, though padding has the same id."""
    apply, _, params = parts
    batch = packed()
    first = np.flatnonzero(batch["loss_mask"][0])[0]
    prompt, answer = slice(0, int(first)), batch["loss_mask"][0] > 0
    assert first > 0
    run = jax.jit(lambda rows: apply(params, rows, method="token_logprobs"))
    old = np.asarray(run(batch))[0][answer]
    other = {**batch, "input_ids": batch["input_ids"].copy()}
    other["input_ids"][0, prompt] = 0
    new = np.asarray(run(other))[0][answer]
    segment = batch["segment_ids"][0][answer]
    assert (old != new)[segment == segment[0]].all()
    documents = [np.array([1, 0, 0, 2, 0]), np.array([3, 0, 4])]
    store = ArrayStore.of(documents, None, {"vocab_size": VOCAB, "pad_id": 0})
    zeros = make_rows(store, DatasetStyle.PACKED, BLOCK, allow_short=True).get(np.arange(1))
    targets = zeros["target_ids"][zeros["target_ids"] >= 0]
    assert sorted(targets) == [0, 0, 0, 0, 2, 4] and zeros["loss_mask"].sum() == 6


def test_pieces_with_uneven_masks_are_the_big_batch(parts) -> None:
    """Sums of losses, weights and gradients over micro-batches: one division at the end is that of the whole."""
    apply, _, params = parts
    batch = packed()
    batch["target_ids"][0, :10] = -100  # one supervised token against ten

    def sums(params, rows):
        loss, weight, _ = sft(apply, params, rows, jax.random.key(0), PLAIN)
        return loss, weight

    run = jax.jit(jax.value_and_grad(sums, has_aux=True))
    (loss, weight), gradient = run(params, batch)
    pieces = [
        run(params, {name: array[i : i + 1] for name, array in batch.items()}) for i in range(len(batch["target_ids"]))
    ]
    weights = [float(piece[0][1]) for piece in pieces]
    assert sum(weights) == float(weight) == (batch["target_ids"] >= 0).sum() and len(set(weights)) > 1
    np.testing.assert_allclose(sum(piece[0][0] for piece in pieces), loss, rtol=1e-6)
    added = jax.tree.map(lambda *leaves: sum(leaves), *(piece[1] for piece in pieces))
    for a, b in zip(jax.tree.leaves(added), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_noise_on_embeddings_only_while_training(parts) -> None:
    apply, _, params = parts
    batch = packed()

    one, two = jax.random.key(1), jax.random.key(2)
    noisy = jax.jit(lambda key: sft(apply, params, batch, key, NOISY)[0])
    plain = jax.jit(lambda key: sft(apply, params, batch, key, PLAIN)[0])
    quiet = float(jax.jit(lambda: sft(apply, params, batch, None, NOISY)[0])())
    assert quiet == pytest.approx(float(plain(one)), rel=1e-6)
    assert len({float(noisy(one)), float(noisy(two)), quiet}) == 3 and float(noisy(one)) == float(noisy(one))
    text = str(jax.make_jaxpr(lambda p: sft(apply, p, batch, one, PLAIN)[0])(params))
    assert "random_bits" not in text and "threefry" not in text, "noise that is off costs nothing"
    with pytest.raises(InputError, match="cannot add noise"):
        table = Table(vocab_size=VOCAB, block_size=BLOCK)
        logits = {"logits": jnp.zeros((3, BLOCK, VOCAB))}
        sft(make_apply(table), logits, batch, one, NOISY)


def test_size_of_the_noise() -> None:
    """Uniform in ±α/√(T·D), so its standard deviation is α/√(3·T·D)."""
    x = jnp.zeros((64, 32, 16))
    noise = np.asarray(ops.add_noise(x, 5.0, jax.random.split(jax.random.key(0), len(x))))
    bound = 5.0 / np.sqrt(32 * 16)
    assert np.abs(noise).max() <= bound and np.abs(noise).max() > 0.99 * bound
    assert noise.std() == pytest.approx(bound / np.sqrt(3), rel=0.02) and abs(noise.mean()) < 0.01 * bound
