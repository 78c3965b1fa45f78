"""The chunked one-pass cross-entropy against numpy float64, values and gradients."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.kernels.loss import LARGEST_SHIFT
from bessemer.losses import cross_entropy as losses
from bessemer.losses.cross_entropy import Further, Projection, choose_chunks, cross_entropy
from bessemer.losses.distillation import distillation_loss, top_tokens
from bessemer.losses.divergence import kl_regularized_loss
from bessemer.losses.token_scores import policy_scores, token_logprobs, token_scores

B, T, D, V, REAL = 3, 10, 6, 16, 13


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    targets = rng.integers(0, REAL, (B, T))
    targets[0, :4] = -1
    targets[2, -1] = -1
    return (
        rng.standard_normal((B, T, D)).astype(np.float32),
        rng.standard_normal((D, V)).astype(np.float32),
        targets.astype(np.int32),
        rng.uniform(0, 2, (B, T)).astype(np.float32),
    )


def reference(hidden, head, targets, weights, softcap=0.0, label_smoothing=0.0, z_loss=0.0):
    """(Σ w·loss, Σ w·nll) in float64, straight from the formula."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    z = (softcap * np.tanh(logits / softcap) if softcap else logits)[..., :REAL]
    lse = np.logaddexp.reduce(z, axis=-1)
    logp = z - lse[..., None]
    nll = -np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = (1 - label_smoothing) * nll - label_smoothing * logp.mean(-1) + z_loss * lse**2
    weights = np.where(targets < 0, 0, weights.astype(np.float64))
    return (weights * loss).sum(), (weights * nll).sum()


SETTINGS = [
    {},
    {"softcap": 5.0},
    {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01},
    {"label_smoothing": 0.2},
    {"z_loss": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("chunks", [1, 5, 4])  # 4 does not divide 10: padded
def test_value_equals_numpy(data, settings, chunks):
    got = cross_entropy(*data, vocab_size=REAL, chunks=chunks, **settings)
    np.testing.assert_allclose(got, reference(*data, **settings), rtol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_gradient_equals_central_differences_in_float64(data, settings, chunks):
    hidden, head, targets, weights = data

    def loss(hidden, head):
        return 3.0 * cross_entropy(hidden, head, targets, weights, vocab_size=REAL, chunks=chunks, **settings)[0]

    dhidden, dhead = jax.grad(loss, argnums=(0, 1))(hidden, head)
    for which, gradient in ((0, dhidden), (1, dhead)):
        numeric = np.zeros(gradient.shape)
        for index in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-6, -1e-6):
                parts = [hidden.astype(np.float64), head.astype(np.float64)]
                parts[which][index] += step
                ends.append(reference(*parts, targets, weights, **settings)[0])
            numeric[index] = 3.0 * (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(gradient, numeric, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunks": 4, "softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01},
        {"chunks": 1},
        {"chunks": 3, "softcap": 5.0, "kernels": "pallas"},
    ],
    ids=str,
)
def test_further_targets_on_one_tile_equal_losses_of_their_own(data, settings):
    """Values and gradients; only the first target has smoothing and z-loss."""
    hidden, head, targets, weights = data
    rng = np.random.default_rng(1)
    more = np.where(rng.random((B, T, 2)) < 0.2, -1, rng.integers(0, REAL, (B, T, 2))).astype(np.int32)
    further = Further(more, rng.uniform(0, 2, (B, T, 2)).astype(np.float32), jnp.asarray([0.5, 0.2]))
    plain = {name: value for name, value in settings.items() if name not in ("label_smoothing", "z_loss")}

    def together(hidden, head):
        loss, *nlls = cross_entropy(hidden, head, targets, weights, vocab_size=REAL, further=further, **settings)
        return loss, nlls

    def apart(hidden, head):
        loss, nll = cross_entropy(hidden, head, targets, weights, vocab_size=REAL, **settings)
        found = [
            cross_entropy(hidden, head, more[..., n], further.weights[..., n], vocab_size=REAL, **plain) for n in (0, 1)
        ]
        return loss + 0.5 * found[0][0] + 0.2 * found[1][0], [nll, (found[0][1] + found[1][1]) / 2]

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, head) for f in (together, apart))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(together(hidden, head)[0], want[0][0], rtol=1e-5)  # without a gradient


def test_padding_of_the_vocabulary_gets_no_gradient(data):
    hidden, head, targets, weights = data
    dhead = jax.grad(lambda w: cross_entropy(hidden, w, targets, weights, vocab_size=REAL)[0])(head)
    assert np.all(np.asarray(dhead)[:, REAL:] == 0) and np.any(np.asarray(dhead)[:, :REAL] != 0)


def test_flat_rows_and_batches_agree(data):
    hidden, head, targets, weights = data
    flat = cross_entropy(hidden.reshape(-1, D), head, targets.ravel(), weights.ravel(), vocab_size=REAL, chunks=3)
    np.testing.assert_allclose(flat, cross_entropy(*data, vocab_size=REAL), rtol=1e-6)


def test_chunks_never_hold_the_full_logits():
    rows, vocab = 64, 512

    def loss(hidden, head):
        targets = jnp.zeros((1, rows), jnp.int32)
        return cross_entropy(hidden, head, targets, jnp.ones((1, rows)), vocab_size=vocab, chunks=8)[0]

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(jnp.ones((1, rows, 4)), jnp.ones((4, vocab)))
    assert f"{rows}x{vocab}xf32" not in program.as_text()
    assert f"{rows // 8}x{vocab}xf32" in program.as_text()


LLAMA = types.SimpleNamespace(rows=8, length=2048, width=2048, vocab=128256)  # 2.1e9 logits, 8.4 GB in float32


def other_model(hidden: jax.Array, head: jax.Array) -> Projection:
    return Projection(0.5 * jax.lax.stop_gradient(hidden), 0.9 * jax.lax.stop_gradient(head), LLAMA.vocab)


LARGE = {
    "cross-entropy": lambda h, w, t, ones: cross_entropy(h, w, t, ones, vocab_size=LLAMA.vocab)[0],
    "cross-entropy-kernel": lambda h, w, t, ones: cross_entropy(
        h, w, t, ones, vocab_size=LLAMA.vocab, kernels="pallas"
    )[0],
    "kl": lambda h, w, t, ones: (
        kl_regularized_loss(Projection(h, w, LLAMA.vocab), other_model(h, w), t, ones, 0.3).loss
    ),
    "distill": lambda h, w, t, ones: distillation_loss(
        Projection(h, w, LLAMA.vocab), other_model(h, w), t, ones, alpha=0.7, temperature=2.0
    )[0],
    "dpo": lambda h, w, t, ones: jax.nn.softplus(token_logprobs(Projection(h, w, LLAMA.vocab), t).sum(1)).sum(),
    "grpo": lambda h, w, t, ones: jnp.exp(policy_scores(Projection(h, w, LLAMA.vocab), t, 0.8)[0]).sum(),
}


def largest(jaxpr) -> int:
    """Elements of the largest array anywhere in a traced program."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size")]
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            sizes += [largest(inner)] if hasattr(inner, "eqns") else []
    return max(sizes)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("name", LARGE)
def test_no_loss_holds_the_logits_of_a_large_vocabulary(name, trained, monkeypatch):
    """Value and gradient as an accelerator runs them, for a micro-batch of a Llama with 128,256 tokens: nothing is
    larger than a tile of logits or the head."""
    monkeypatch.setattr(losses, "backend", lambda: "gpu")
    hidden = jax.ShapeDtypeStruct((LLAMA.rows, LLAMA.length, LLAMA.width), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((LLAMA.width, LLAMA.vocab), jnp.bfloat16)
    targets, ones = (jax.ShapeDtypeStruct((LLAMA.rows, LLAMA.length), kind) for kind in (jnp.int32, jnp.float32))
    gradient = jax.value_and_grad(LARGE[name], argnums=(0, 1) if trained else 0)
    tile = losses.KERNEL_TILE if "kernel" in name else 1.01 * losses.TILE
    held = largest(jax.make_jaxpr(gradient)(hidden, head, targets, ones).jaxpr)
    assert held <= max(tile, head.size) < LLAMA.rows * LLAMA.length * LLAMA.vocab / 7


@pytest.mark.parametrize("chunks", [1, 4])
def test_token_logprobs_values_and_per_token_gradients(data, chunks):
    hidden, head, targets, weights = data
    logprobs = token_logprobs(Projection(hidden, head, REAL, 5.0, chunks), targets)
    assert np.all(np.asarray(logprobs)[targets < 0] == 0)
    np.testing.assert_allclose(-(weights * logprobs).sum(), reference(*data, softcap=5.0)[1], rtol=1e-6)

    def summed(hidden, head):
        lp = token_logprobs(Projection(hidden, head, REAL, 5.0, chunks), targets)
        return -jnp.sum(weights * lp)

    def direct(hidden, head):
        return cross_entropy(hidden, head, targets, weights, vocab_size=REAL, softcap=5.0)[0]

    pairs = zip(*(jax.grad(f, argnums=(0, 1))(hidden, head) for f in (summed, direct)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5)


TIED = {
    "cross-entropy": lambda h, own, t, w: cross_entropy(h, own.head, t, w, vocab_size=REAL, chunks=4, tied=own.tied)[0],
    "its kernel": lambda h, own, t, w: cross_entropy(
        h, own.head, t, w, vocab_size=REAL, chunks=4, tied=own.tied, kernels="pallas"
    )[0],
    "log-probabilities": lambda h, own, t, w: jnp.sum(w * token_logprobs(own, t)),
    "entropy": lambda h, own, t, w: jnp.sum(w * policy_scores(own, t, 0.7, entropy_gradient=True)[1]),
    "divergence": lambda h, own, t, w: (
        kl_regularized_loss(own, Projection(0.5 * h, 0.9 * own.columns, REAL, chunks=4), t, w, 0.3).loss
    ),
    "distillation": lambda h, own, t, w: distillation_loss(
        own, Projection(0.5 * h, 0.9 * own.columns, REAL), t, w, alpha=0.7, temperature=2.0, chunks=4
    )[0],
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_is_the_same_head_as_rows(data, name):
    """The embedding table goes into every loss as it is stored, and its gradient comes out that way."""
    hidden, head, targets, weights = data

    def of(tied):
        def value(h, table):
            return TIED[name](h, Projection(h, table, REAL, chunks=4, tied=tied), targets, weights)

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(hidden, head.T if tied else head)

    (own, (dhidden, dtable)), (expected, (dh, dw)) = of(True), of(False)
    np.testing.assert_allclose(own, expected, rtol=1e-6)
    np.testing.assert_allclose(dhidden, dh, atol=1e-5)
    np.testing.assert_allclose(dtable, dw.T, atol=1e-5)
    assert np.abs(dtable).max() > 1e-3


def test_no_loop_over_tiles_turns_a_tied_head(data):
    """Turned once for the loop, the table would be copied (0.5 GiB in a Llama of 1.24B), and its gradient twice."""
    hidden, head, targets, weights = data

    def loss(h, table):
        return cross_entropy(h, table, targets, weights, vocab_size=REAL, chunks=3, tied=True)[0]

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, head.T)
    assert "scan" in str(program) and f"{D},{V}]" not in str(program)


def _sums_of_every_loss(hidden, head, targets, weights, softcap):
    """Σ w·nll as each loss over the vocabulary reports it; all must be the same number."""
    own = Projection(hidden, head, REAL, softcap)
    scored = {
        "token_logprobs": token_logprobs(own, targets),
        "token_scores": token_scores(own, targets)[0],
        "policy_scores": policy_scores(own, targets)[0],
    }
    against = {"teacher": own, "stored": top_tokens(own, 3, 1.0)}
    settings = {"alpha": 0.5, "temperature": 1.0}
    return {
        "value": cross_entropy(hidden, head, targets, weights, vocab_size=REAL, softcap=softcap)[1],
        "divergence": kl_regularized_loss(own, own, targets, weights, 0.1).nll,
        **{name: distillation_loss(own, teacher, targets, weights, **settings)[2] for name, teacher in against.items()},
        **{name: -jnp.sum(jnp.where(targets < 0, 0, weights) * lp) for name, lp in scored.items()},
    }


def _rounding_of_the_sum(hidden, head, targets, weights, softcap):
    """Return how far Σ w·nll may be off because the capped logits are float32 numbers.

    nll = log Σ exp(z) − z[target], and the gradients of both terms by z sum to 1: logits that are each off by at most
    δ move nll by at most 2δ. δ is measured: float32 logits against float64 ones.
    """
    exact = softcap * np.tanh(np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / softcap)
    rounded = softcap * jnp.tanh(jnp.asarray(hidden) @ jnp.asarray(head) / softcap)
    return 2 * np.abs(rounded - exact).max() * weights[targets >= 0].sum(dtype=np.float64)


@pytest.mark.parametrize("softcap", [LARGEST_SHIFT, 50.0, 88.0, 1e4])
@pytest.mark.parametrize("level", ["near zero", "at the lower end"])
def test_every_loss_is_right_with_a_large_softcap(data, softcap, level):
    """exp(z − c) of a whole row underflows from c = 44 (rows at −c) or 88 (rows at 0) on."""
    hidden, head, targets, weights = data
    if level == "at the lower end":  # one more feature lowers all logits of a row together
        down = -4 * softcap
        hidden = np.concatenate([hidden, np.full((B, T, 1), down, np.float32)], axis=-1)
        head = np.concatenate([head, np.ones((1, V), np.float32)])
    expected = reference(hidden, head, targets, weights, softcap=softcap)[1]
    tolerance = _rounding_of_the_sum(hidden, head, targets, weights, softcap) + 1e-6 * expected
    if (softcap, level) != (1e4, "at the lower end"):  # there z = −9993, and float32 numbers are 1e-3 apart
        assert tolerance < 2e-5 * expected
    for name, found in _sums_of_every_loss(hidden, head, targets, weights, softcap).items():
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=name)
    for kernels in ("xla", "pallas"):

        def loss(hidden, head, kernels=kernels):
            options = {"vocab_size": REAL, "softcap": softcap, "kernels": kernels}
            return cross_entropy(hidden, head, targets, weights, **options)[0]

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance, err_msg=kernels)
        assert all(np.isfinite(gradient).all() for gradient in gradients), kernels


def test_chunk_choice():
    assert choose_chunks(3, 2, 10, 100) == 3
    assert choose_chunks("auto", 2, 16, 100) == 1
    assert choose_chunks("auto", 16, 256, 4096) == 16
    assert choose_chunks("auto", 1, 1021, 65536) == 4  # a prime length is padded rather than cut into ones
