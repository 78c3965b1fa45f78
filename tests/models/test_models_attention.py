"""Attention against a masked reference in numpy float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from bessemer.errors import InputError
from bessemer.kernels.attention import attention, block_length, cached_attention
from bessemer.models.gpt import GPT
from bessemer.topology import TopologySettings, make_topology


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(q, k, v, allowed):
    """Plain softmax attention; allowed: (B, T, S)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = np.where(allowed[:, None], np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights / np.where(total == 0, 1, total), v)


def causal(length, window=None, segments=None):
    t, s = np.arange(length)[:, None], np.arange(length)[None]
    allowed = s <= t
    if window is not None:
        allowed &= t - s < window  # exactly `window` keys, itself included
    allowed = allowed[None]
    return allowed if segments is None else allowed & (segments[:, :, None] == segments[:, None, :])


@pytest.mark.parametrize("length", [5, 150])
@pytest.mark.parametrize("window", [None, 1, 3, 64, 100, 1000])
def test_window_equals_masked_reference(length, window):
    q, k, v = draw(2, length, 4, 8), draw(2, length, 2, 8, seed=1), draw(2, length, 2, 8, seed=2)
    got = attention(q, k, v, window=window, implementation="xla")
    np.testing.assert_allclose(got, reference(q, k, v, causal(length, window)), atol=2e-6)


def test_documents_are_isolated_and_blocks_agree():
    length = 200
    segments = np.sort(np.random.default_rng(3).integers(0, 4, (2, length)), axis=1)
    q, k, v = (draw(2, length, 2, 8, seed=s) for s in range(3))
    got = attention(q, k, v, window=70, segment_ids=jnp.asarray(segments))
    np.testing.assert_allclose(got, reference(q, k, v, causal(length, 70, segments)), atol=2e-6)


def test_gradients_equal_autodiff_of_the_reference():
    length = 130
    q, k, v, g = (jnp.asarray(draw(1, length, 2, 4, seed=s)) for s in range(4))
    allowed = jnp.asarray(causal(length, 65))

    def plain(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2.0
        weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -1e30), axis=-1)
        return jnp.sum(g * jnp.einsum("bnts,bsnh->btnh", weights, v))

    ours = jax.grad(lambda *x: jnp.sum(g * attention(*x, window=65)), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(ours, jax.grad(plain, argnums=(0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_cached_queries_see_the_keys_up_to_their_position():
    q, k, v = draw(2, 3, 4, 8), draw(2, 20, 2, 8, seed=1), draw(2, 20, 2, 8, seed=2)
    positions = np.array([[4, 5, 6], [11, 12, 13]])
    keys = np.arange(20)[None, None]
    allowed = (keys <= positions[..., None]) & (keys > positions[..., None] - 5)
    # places of a cache are in any order, and some are empty
    order = np.random.default_rng(3).permutation(20)
    held = np.concatenate([np.broadcast_to(order, (2, 20)), np.full((2, 4), -1)], axis=1)
    k_held, v_held = (np.pad(x[:, order], ((0, 0), (0, 4), (0, 0), (0, 0))).swapaxes(1, 2) for x in (k, v))
    got = cached_attention(q, k_held, v_held, window=5, q_positions=positions, k_positions=held)
    np.testing.assert_allclose(got, reference(q, k, v, allowed), atol=2e-6)


def test_a_query_without_keys_gives_zeros_not_the_mean():
    q, k, v = draw(1, 1, 2, 8), draw(1, 6, 2, 8), draw(1, 6, 2, 8)
    held, nowhere = jnp.arange(6)[None], jnp.array([[-1]])
    got = cached_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), q_positions=nowhere, k_positions=held)
    assert np.all(np.asarray(got) == 0)


def test_few_blocks_whatever_the_length():
    assert [block_length(n) for n in (16, 256, 512, 2048, 4096)] == [64, 64, 64, 256, 512]


@pytest.mark.parametrize("segments", [False, True])
def test_scores_of_a_window_are_never_held_for_the_whole_square(segments):
    """2048 tokens and a window of 256: what is held grows with the window, with a document mask too."""
    length, window = 2048, 256
    q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if segments else None

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (value.aval.size for value in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    def attend(q, k, v, ids):
        return attention(q, k, v, window=window, segment_ids=ids, implementation="xla")

    assert max(sizes(jax.make_jaxpr(attend)(q, q, q, ids).jaxpr)) < length * length / 2


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 128, 16])
def test_cudnn_is_attention_in_float32(window, documents):
    """Result and gradients in bf16 against XLA's in float32 of the same numbers: within 1% on average (root of the
    mean square) and 2% of the largest. Number by number bf16 has no bound: where few keys are seen, gradients cancel.
    """
    q, k, v = (jnp.asarray(draw(2, 512, n, 64, seed=n), jnp.bfloat16) for n in (4, 2, 2))
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    ids = jnp.asarray(np.arange(1024).reshape(2, 512) // 100) if documents else None

    def value(q, k, v, name):
        out = attention(q, k, v, window=window, segment_ids=ids, implementation=name)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    gradients = jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True), static_argnums=3)
    with jax.default_matmul_precision("float32"):
        want = gradients(*wide, "xla")
    got = gradients(q, k, v, "cudnn")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error, b = np.abs(np.asarray(a, np.float32) - np.asarray(b)), np.asarray(b)
        assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(b**2))
        assert np.max(error) < 0.02 * np.max(np.abs(b))


@pytest.mark.parametrize("segments", [None, np.ones((1, 8), np.int32)])
def test_cudnn_by_name_is_refused_where_it_cannot(segments):
    q = jnp.zeros((1, 8, 2, 16))
    with pytest.raises(InputError, match=r"architecture\.attention=auto"):
        attention(q, q, q, segment_ids=segments, implementation="cudnn")


def test_what_is_chosen_is_said():
    chosen = GPT(depth=1, width=32, head_dim=16, vocab_size=64, document_mask=True).chosen_kernels()
    assert chosen["attention"] == ("xla", "for float32, head dimension 16, with a document mask")
    assert chosen["kernels"] == ("xla", "norms and loss for float32")
    with make_topology(TopologySettings(data=1, context=4), jax.devices()[:4]).scope():
        chosen = GPT(depth=1, width=32, head_dim=16, vocab_size=64, block_size=64).chosen_kernels()
    assert chosen["attention"][1].endswith("sequences in 4 pieces: keys and values gathered")
