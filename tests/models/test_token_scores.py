"""Likelihood and argmax of targets: tiles of logits give what the whole logits give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.losses.cross_entropy import Projection
from bessemer.losses.token_scores import policy_scores, token_logprobs, token_scores


@pytest.mark.parametrize("chunks", [1, 3])
def test_tiles_against_whole_logits_in_float64(chunks):
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 7, 8)).astype(np.float32)
    head = rng.standard_normal((8, 24)).astype(np.float32)  # 24 columns for 20 tokens: the rest is padding
    head[:, 5] = head[:, 3]  # two tokens that are always equally likely
    logits = 15 * np.tanh(hidden.astype(np.float64) @ head[:, :20] / 15)
    targets = logits.argmax(-1)
    targets[0, :4] = [5, 3, -1, 19]
    logprobs, greedy = jax.jit(lambda h, w, t: token_scores(Projection(h, w, 20, 15.0, chunks), t))(
        jnp.array(hidden), jnp.array(head), jnp.array(targets)
    )
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(expected, np.maximum(targets, 0)[..., None], -1)[..., 0]
    assert np.allclose(logprobs, np.where(targets < 0, 0, picked), atol=1e-5)
    assert greedy.tolist() == ((targets < 0) | (logits.argmax(-1) == targets)).tolist()
    assert not greedy[0, 0], "of equal tokens the first is the likeliest"


ROWS, LENGTH, WIDTH, VOCAB, REAL = 4, 24, 8, 40, 37


def case(targets_per_row: int = 7):
    """Hidden states, head and targets: a run of targets in each row, as a completion after its prompt has."""
    rng = np.random.default_rng(1)
    targets = np.full((ROWS, LENGTH), -1)
    for row in range(ROWS):
        start = rng.integers(0, LENGTH - targets_per_row + 1)
        targets[row, start : start + targets_per_row] = rng.integers(0, REAL, targets_per_row)
    hidden = rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
    return hidden, rng.standard_normal((WIDTH, VOCAB)).astype(np.float32), jnp.asarray(targets, jnp.int32)


def plain_scores(hidden, head, targets, softcap, temperature):
    """From whole logits, for autodiff to differentiate."""
    z = jnp.einsum("btd,dv->btv", hidden, head)[..., :REAL]
    z = (softcap * jnp.tanh(z / softcap) if softcap else z) / temperature
    scores = jax.nn.log_softmax(z)
    picked = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
    return jnp.where(targets < 0, 0.0, picked), jnp.where(targets < 0, 0.0, entropy)


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_policy_scores_and_their_gradients_are_those_of_whole_logits(kernels, temperature, softcap):
    hidden, head, targets = case()
    g = jnp.asarray(np.random.default_rng(2).standard_normal(targets.shape), jnp.float32)  # of either sign

    def ours(hidden, head):
        found = policy_scores(Projection(hidden, head, REAL, softcap, 5, None, kernels), targets, temperature)
        return jnp.sum(g * found[0]), found

    def wanted(hidden, head):
        found = plain_scores(hidden, head, targets, softcap, temperature)
        return jnp.sum(g * found[0]), found

    made, expected = (jax.grad(f, argnums=(0, 1), has_aux=True)(hidden, head) for f in (ours, wanted))
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert not np.any(made[0][1][:, REAL:]), "columns that only pad learn nothing"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("whole", [False, True], ids=["tiles", "logits"])
def test_the_entropy_has_a_gradient_where_it_is_asked_for(whole, temperature, softcap):
    """Beside that of the log-probabilities, from tiles of logits, and from whole logits of a padded vocabulary."""
    hidden, head, targets = case()
    g, e = np.random.default_rng(3).standard_normal((2, *targets.shape)).astype(np.float32)

    def ours(hidden, head, asked=True):
        logits = jnp.einsum("btd,dv->btv", hidden, head) if whole else None
        projection = Projection(hidden if logits is None else logits, None if whole else head, REAL, softcap, 5)
        found = policy_scores(projection, targets, temperature, asked)
        return jnp.sum(g * found[0] + e * found[1])

    def wanted(hidden, head):
        found = plain_scores(hidden, head, targets, softcap, temperature)
        return jnp.sum(g * found[0] + e * found[1])

    made, expected = (jax.grad(f, argnums=(0, 1))(hidden, head) for f in (ours, wanted))
    for a, b in zip(made, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=5e-5)
    without = jax.grad(lambda *x: ours(*x, asked=False), argnums=(0, 1))(hidden, head)
    assert np.abs(np.asarray(made[0]) - np.asarray(without[0])).max() > 1e-3
    frozen = jax.grad(ours)(hidden, head)  # of the hidden states alone
    np.testing.assert_allclose(frozen, made[0], atol=1e-6)


def test_positions_without_a_target_cost_no_tile():
    """8 tiles cover all positions; targets fill 2 of them, and 0 in a batch without any."""
    hidden, head, targets = case(6)
    program = jax.jit(jax.grad(lambda h: jnp.sum(token_logprobs(Projection(h, head, REAL, 0.0, 8), targets))))
    text = program.lower(hidden).as_text()
    assert f"{ROWS * LENGTH}x{VOCAB}xf32" not in text, "the full logits are never held"
    assert "while" in text
    # NaN in hidden states that no target needs: a tile that is not made cannot spread it
    spoiled = np.array(hidden)
    spoiled[np.asarray(targets) < 0] = np.nan
    order = np.argsort(np.asarray(targets).reshape(-1) < 0, kind="stable")
    whole = (ROWS * LENGTH) // 8
    assert (np.asarray(targets) >= 0).sum() == 2 * whole, "two whole tiles of targets"
    gradient = np.asarray(program(spoiled)).reshape(-1, WIDTH)
    assert np.isfinite(gradient).all() and np.any(gradient[order[0]])
    assert not np.any(np.asarray(token_logprobs(Projection(hidden, head, REAL, 0.0, 8), targets - VOCAB)))


def test_a_frozen_head_has_no_gradient_product():
    hidden, head, targets = case()

    def loss(hidden, head):
        return jnp.sum(token_logprobs(Projection(hidden, head, REAL, 0.0, 1), targets))

    frozen = jax.jit(jax.grad(loss)).lower(hidden, head).as_text()
    trained = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head).as_text()
    assert frozen.count("dot_general") == trained.count("dot_general") - 1
