"""The whole GPT against a second implementation, written in numpy float64 from the specification alone."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    model = GPT(
        depth=depth, width=32, head_dim=16, kv_heads=kv_heads, vocab_size=40, block_size=256, window="SL"
    )
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
