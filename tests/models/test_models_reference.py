"""The GPT equals two others: models/reference.py in loss, gradients and decoding, and a numpy float64 one in logits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.models import reference
from bessemer.models.gpt import GPT


def norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotary(x, base):
    """x: (T, N, H)."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) + b * np.sin(angle), b * np.cos(angle) - a * np.sin(angle)], -1)


def attend(q, k, v, window):
    out = np.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(q.shape[1]):
            scores = k[first : t + 1, n // share] @ q[t, n] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[t, n] = (weights / weights.sum()) @ v[first : t + 1, n // share]
    return out


def forward(p, ids, depth, head_dim, windows, vocab):
    """Logits (T, vocab) of one row."""
    x = norm(p["embedding"][ids])
    gate = p["smear_scale"] * sigmoid(x[1:, :24] @ p["smear_gate"])
    x = np.concatenate([x[:1], x[1:] + gate * x[:-1]])
    x0 = middle = x
    for i in range(depth):
        b = p[f"blocks_{i}"]
        x = p["rho"][i] * x + p["xi"][i] * x0
        h = norm(x)
        q, k, v = (np.reshape(h @ b[n], (len(ids), -1, head_dim)) for n in ("q", "k", "v"))
        if i % 2 == (depth - 1) % 2:
            values = b["value_table"][ids].reshape(v.shape)
            v = v + 3 * sigmoid(h[:, :12] @ b["value_gate"])[..., None] * values
        q, k = 1.2 * norm(rotary(q, 1e5)), 1.2 * norm(rotary(k, 1e5))
        x = x + attend(q, k, v, windows[i]).reshape(len(ids), -1) @ b["out"]
        x = x + np.maximum(norm(x) @ b["up"], 0) ** 2 @ b["down"]
        middle = x if i == depth // 2 else middle
    x = norm(x - p["backout_scale"] * middle)
    return (15 * np.tanh(x @ p["head"] / 15))[:, :vocab]


@pytest.mark.parametrize(("depth", "kv_heads"), [(4, 1), (3, 2)])
def test_logits_equal_numpy_float64(depth, kv_heads):
    model = GPT(depth=depth, width=32, head_dim=16, kv_heads=kv_heads, vocab_size=40, block_size=256, window="SL")
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64) + 0.1 * rng.standard_normal(x.shape), params)
    ids = rng.integers(0, 40, (2, 180))
    small = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    got = jax.jit(lambda p, x: model.apply({"params": p}, x))(small, jnp.asarray(ids))
    assert model.shape.windows[0] == 128
    for row in range(2):
        want = forward(params, ids[row], depth, 16, model.shape.windows, 40)
        np.testing.assert_allclose(got[row], want, atol=5e-5)


SWITCHES = [
    {},
    {"depth": 3, "kv_heads": 1, "rotary_base": 500.0, "softcap": 0.0},
    {"depth": 2, "document_mask": True, "window_short": 0.3},
    {"depth": 3, "smear": False, "backout": False, "qk_norm": False},
    {"depth": 3, "residual_mix": False, "value_embeddings": False, "window": "L"},
    {"depth": 3, "kv_heads": 1, "key_offset": True, "document_mask": True},
    {"depth": 3, "dense_connections": True},
    {"depth": 2, "paired_heads": True, "document_mask": True},
]
SIZES = {"depth": 5, "width": 32, "head_dim": 16, "kv_heads": 2, "vocab_size": 70, "block_size": 256}


def pair(switches):
    """The fast model, the configuration of the reference, and parameters in which nothing is zero."""
    settings = {**SIZES, **switches}
    config = reference.Config(**settings)
    params = reference.init(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    noise = [0.1 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    params = jax.tree.unflatten(tree, [leaf + n for leaf, n in zip(leaves, noise, strict=True)])
    return GPT(**settings, precision="float32"), config, params


def batch(rows, length):
    rng = np.random.default_rng(2)
    segments = np.repeat([[1, 2, 3]], rows, axis=0).repeat([length // 2, 5, length - length // 2 - 5], axis=1)
    ids = rng.integers(0, SIZES["vocab_size"], (rows, length + 1))
    return {
        "input_ids": jnp.asarray(ids[:, :-1]),
        "target_ids": jnp.asarray(np.where(rng.random((rows, length)) < 0.1, -1, ids[:, 1:])),
        "loss_mask": jnp.asarray(rng.random((rows, length)), jnp.float32),
        "segment_ids": jnp.asarray(segments),
        "positions": jnp.asarray(
            [[np.flatnonzero(row == n).tolist().index(t) for t, n in enumerate(row)] for row in segments]
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_loss_and_every_gradient_equal_the_reference(switches):
    model, config, params = pair(switches)
    rows = batch(2, 150)
    assert 128 in model.shape.windows or switches.get("window") == "L"

    def fast(params):
        total, weight, _ = model.apply({"params": params}, rows, z_loss=1e-3, method="loss")
        return total / weight

    got, got_gradients = jax.jit(jax.value_and_grad(fast))(params)
    want, want_gradients = jax.jit(jax.value_and_grad(lambda p: reference.loss(config, p, rows, 1e-3)))(params)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    unused = {"backout_scale"} if config.depth < 3 else set()
    for (path, gradient), other in zip(
        jax.tree_util.tree_leaves_with_path(want_gradients), jax.tree.leaves(got_gradients), strict=True
    ):
        name = path[-1].key
        assert (np.abs(gradient).max() > 1e-6) == (name not in unused), name
        np.testing.assert_allclose(other, gradient, rtol=2e-4, atol=2e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("switches", SWITCHES[:2] + SWITCHES[3:], ids=str)
def test_incremental_decoding_equals_the_reference(switches):
    model, config, params = pair(switches)
    ids = batch(2, 140)["input_ids"]
    decode = jax.jit(lambda ids, cache: model.apply({"params": params}, ids, cache, method="decode"))
    want, past = reference.forward(config, params, ids)
    got, cache = decode(ids, model.init_cache(2, 150))
    np.testing.assert_allclose(got, want, atol=3e-5)
    tokens = [jnp.argmax(want[:, -1], axis=-1)]
    for _ in range(4):
        want, past = reference.forward(config, params, tokens[-1][:, None], past=past)
        got, cache = decode(tokens[-1][:, None], cache)
        np.testing.assert_allclose(got, want, atol=3e-5)
        tokens.append(jnp.argmax(want[:, -1], axis=-1))
    np.testing.assert_array_equal(reference.generate(config, params, ids, 5), jnp.stack(tokens, axis=1))
    whole, _ = reference.forward(config, params, jnp.concatenate([ids, jnp.stack(tokens, axis=1)], axis=1))
    np.testing.assert_allclose(want[:, 0], whole[:, -2], atol=3e-5)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_fresh_parameters_have_the_names_shapes_and_spread_of_the_reference(switches):
    settings = {**SIZES, **switches, "width": 64, "head_dim": 32}
    model, config = GPT(**settings), reference.Config(**settings)
    fast = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    plain = reference.init(config, jax.random.key(1))
    assert jax.tree.map(jnp.shape, fast) == jax.tree.map(jnp.shape, plain)
    for got, want in zip(jax.tree.leaves(fast), jax.tree.leaves(plain), strict=True):
        error = 1e-6 if np.array_equal(got, want) else 0.5 if got.size < 100 else 0.1
        np.testing.assert_allclose(jnp.std(got), jnp.std(want), rtol=error)
        np.testing.assert_allclose(jnp.max(got), jnp.max(want), rtol=2 * error)


def test_the_defaults_of_the_reference_are_those_of_the_model():
    model, config = GPT(vocab_size=256), reference.Config(vocab_size=256)
    for name in vars(config).keys() - {"width", "kv_heads"}:
        assert getattr(model, name) == getattr(config, name), name
    assert (model.shape.width, model.shape.kv_heads) == (config.width, config.kv_heads)
    assert model.shape.windows == tuple(config.window_of(layer) for layer in range(config.depth))
