"""Cached decoding equals the full forward at every position, whatever the settings and however it is fed."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.models.gpt import GPT

LENGTH = 24


@functools.cache
def make(**settings):
    defaults = {"depth": 3, "width": 32, "head_dim": 16, "vocab_size": 40, "block_size": LENGTH}
    model = GPT(**{**defaults, **settings})
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = jax.tree.unflatten(
        tree, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )

    @jax.jit
    def decode(ids, cache, lengths=None):
        return model.apply({"params": params}, ids, cache, lengths, method="decode")

    return model, params, decode


def forward(model, params, ids):
    return jax.jit(lambda p, x: model.apply({"params": p}, x))(params, ids)


def tokens(rows: int, length: int):
    return jnp.asarray(np.random.default_rng(0).integers(0, 40, (rows, length)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_heads": 1},
        {"smear": False, "backout": False},
        {"value_embeddings": False, "residual_mix": False, "qk_norm": False},
        {"scan_layers": True},
        {"bigram_rows": 128},
        {"bigram_rows": 64, "smear": False},
        {"key_offset": True},
        {"key_offset": True, "qk_norm": False, "kv_heads": 1},
        {"dense_connections": True},
        {"paired_heads": True, "key_offset": True},
    ],
    ids=str,
)
def test_steps_equal_the_full_forward(settings):
    model, params, decode = make(**settings)
    ids = tokens(2, 10)
    full = forward(model, params, ids)
    cache = model.init_cache(2, LENGTH)
    logits, cache = decode(ids[:, :4], cache)
    np.testing.assert_allclose(logits, full[:, :4], atol=1e-5)
    for t in range(4, 10):
        logits, cache = decode(ids[:, t : t + 1], cache)
        np.testing.assert_allclose(logits[:, 0], full[:, t], atol=1e-5)
    assert cache.lengths.tolist() == [10, 10]


@pytest.mark.slow
def test_windows_while_decoding():
    model, params, decode = make(block_size=256, window="SL")
    assert model.shape.windows == (128, None, None)
    ids = tokens(1, 150)
    full = forward(model, params, ids)
    logits, cache = decode(ids[:, :140], model.init_cache(1, 150))
    np.testing.assert_allclose(logits, full[:, :140], atol=1e-5)
    for t in range(140, 150):
        logits, cache = decode(ids[:, t : t + 1], cache)
        np.testing.assert_allclose(logits[:, 0], full[:, t], atol=1e-5)


@pytest.mark.slow
def test_a_window_keeps_only_its_own_keys_however_it_is_fed():
    """Rows of different lengths, pieces longer and shorter than what is left of the ring, padding, a row that rests."""
    model, params, decode = make(block_size=256, window="SL", depth=2)
    ids = tokens(2, 200)
    full = forward(model, params, ids)
    cache = model.init_cache(2, 200)
    assert [store.shape[2] for store in cache.keys] == [128, 200] and cache.capacity == 200
    at = np.zeros(2, int)
    for width, lengths in ((130, [130, 3]), (130, [40, 129]), (130, [0, 60]), (1, [1, 1]), (1, [1, 0]), (1, [1, 1])):
        piece = np.full((2, width), 39)
        for row, n in enumerate(lengths):
            piece[row, :n] = ids[row, at[row] : at[row] + n]
        logits, cache = decode(piece, cache, jnp.array(lengths))
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(logits[row, :n], full[row, at[row] : at[row] + n], atol=2e-5)
            at[row] += n
    assert cache.lengths.tolist() == at.tolist()


@pytest.mark.parametrize("settings", [{}, {"bigram_rows": 128}], ids=str)
def test_rows_of_different_lengths_padded_on_the_right(settings):
    model, params, decode = make(**settings)
    ids = tokens(3, 12)
    full = forward(model, params, ids)
    lengths = jnp.array([3, 7, 5])
    prompt = jnp.where(jnp.arange(7) < lengths[:, None], ids[:, :7], 39)  # padding is any token at all
    logits, cache = decode(prompt, model.init_cache(3, LENGTH), lengths)
    for row, n in enumerate(lengths.tolist()):
        np.testing.assert_allclose(logits[row, :n], full[row, :n], atol=1e-5)
    for step in range(4):
        at = lengths + step
        logits, cache = decode(ids[jnp.arange(3), at][:, None], cache)
        np.testing.assert_allclose(logits[:, 0], full[jnp.arange(3), at], atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"bigram_rows": 128}], ids=str)
def test_prefill_in_pieces_and_a_row_that_rests(settings):
    model, params, decode = make(**settings)
    ids = tokens(2, 9)
    full = forward(model, params, ids)
    _, cache = decode(ids[:, :4], model.init_cache(2, LENGTH))
    # The first row takes three tokens, the second none: it must not move.
    logits, cache = decode(ids[:, 4:7], cache, jnp.array([3, 0]))
    np.testing.assert_allclose(logits[0], full[0, 4:7], atol=1e-5)
    assert cache.lengths.tolist() == [7, 4]
    logits, cache = decode(jnp.stack([ids[0, 7:8], ids[1, 4:5]]), cache)
    np.testing.assert_allclose(logits[0, 0], full[0, 7], atol=1e-5)
    np.testing.assert_allclose(logits[1, 0], full[1, 4], atol=1e-5)


def test_last_only_and_a_full_cache():
    model, params, _ = make()
    ids = tokens(2, LENGTH)
    full = forward(model, params, ids)
    lengths = jnp.array([LENGTH, 5])
    decode = jax.jit(lambda ids, cache: model.apply({"params": params}, ids, cache, lengths, True, method="decode"))
    logits, cache = decode(ids, model.init_cache(2, LENGTH))
    assert logits.shape == (2, 1, 40) and cache.capacity == LENGTH
    np.testing.assert_allclose(logits[:, 0], full[jnp.arange(2), lengths - 1], atol=1e-5)
