"""The whole GPT in plain JAX, written to be read top to bottom: pure functions of a dict of parameters.

No kernels, no mesh, no mixed precision, no chunked loss: models/gpt.py computes the same numbers faster, and
tests/models/test_models_reference.py holds its loss, gradients and decoding to this file. The parameter dict is the
one that GPT checkpoints store. Not covered: dropout, fp8 and lookup layers (models/lookup.py).

Shapes: B rows, T tokens per row, D width, N query heads, K key-value heads, H head_dim, V vocab_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Params = dict[str, Any]  # "embedding", "head", …, and per layer "blocks_0": {"q": Array, "k": Array, …}


@dataclass(frozen=True)
class Config:
    """Sizes and switches, named as the fields of `GPT` (models/gpt.py); the defaults are those of `bessemer train`."""

    vocab_size: int
    depth: int = 12
    width: int = 768
    head_dim: int = 128
    kv_heads: int = 6
    block_size: int = 512  # training context; sizes the short windows
    window: str = "SSSL"
    window_short: float = 0.5
    smear: bool = True
    residual_mix: bool = True
    value_embeddings: bool = True
    key_offset: bool = False
    dense_connections: bool = False
    paired_heads: bool = False
    backout: bool = True
    qk_norm: bool = True
    softcap: float = 15.0
    rotary_base: float = 100_000.0
    document_mask: bool = False

    def has_value_table(self, layer: int) -> bool:
        """Every other layer, counted from the last."""
        return self.value_embeddings and (self.depth - 1 - layer) % 2 == 0

    def window_of(self, layer: int) -> int | None:
        """How many keys a query of `layer` sees, itself included; None is all of them. The last layer sees all."""
        if layer == self.depth - 1 or self.window[layer % len(self.window)] == "L":
            return None
        keys = 128 * math.ceil(self.window_short * self.block_size / 128)
        return keys if keys < self.block_size else None


# -- parameters --------------------------------------------------------------------------------------------------


def init(config: Config, key: Array) -> Params:
    """Draw fresh parameters. Matrices are (fan_in, fan_out); projections back into the residual stream start at 0."""
    draws = iter(jax.random.split(key, 8 * config.depth + 3))
    d, kv = config.width, config.kv_heads * config.head_dim
    vocab = 64 * math.ceil(config.vocab_size / 64)  # padded, so that it divides over devices
    bound = math.sqrt(3 / d)

    def uniform(shape: tuple[int, ...], low: float, high: float) -> Array:
        return jax.random.uniform(next(draws), shape, minval=low, maxval=high)

    params: Params = {
        "embedding": 0.8 * jax.random.normal(next(draws), (vocab, d)),
        "head": 0.001 * jax.random.normal(next(draws), (d, vocab)),
    }
    if config.smear:
        params["smear_gate"] = uniform((min(24, d), 1), 0, 0.02)
        params["smear_scale"] = jnp.zeros(())
    if config.residual_mix:
        params["rho"] = jnp.linspace(1.15, 1.05, config.depth)
        params["xi"] = jnp.linspace(0.20, 0.05, config.depth)
    if config.backout:
        params["backout_scale"] = jnp.array(0.2)
    for layer in range(config.depth):
        block = {
            "q": uniform((d, d), -bound, bound),
            "k": uniform((d, kv), -bound, bound),
            "v": uniform((d, kv), -bound, bound),
            "out": jnp.zeros((d, d)),
            "up": uniform((d, 4 * d), -0.4 * bound, 0.4 * bound),
            "down": jnp.zeros((4 * d, d)),
        }
        if config.has_value_table(layer):
            block["value_table"] = uniform((vocab, kv), -bound, bound)
            block["value_gate"] = uniform((min(12, d), config.kv_heads), 0, 0.02)
        params[f"blocks_{layer}"] = block
        if config.dense_connections:
            params[f"connections_{layer}"] = {
                "connect_read": uniform((d, config.depth + 1), -bound, bound),
                "connect_write": jnp.zeros((config.depth + 1, layer + 2)),
                "connect_bias": jnp.zeros(layer + 2),
            }
    return params


# -- parts -------------------------------------------------------------------------------------------------------


def norm(x: Array) -> Array:
    """x / rms(x) over the last axis. No learned weights."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def rotary(x: Array, positions: Array, base: float) -> Array:
    """Rotate each pair (x_i, x_{i+H/2}) by position · base^(−2i/H). x: (B, T, N, H); positions: (B, T)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * base ** (-jnp.arange(half) / half)  # (B, T, 1, H/2)
    cos, sin, a, b = jnp.cos(angle), jnp.sin(angle), x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)


def softmax_attention(q: Array, k: Array, v: Array, allowed: Array) -> Array:
    """q: (B, T, N, H); k, v: (B, S, K, H), each shared by N/K query heads; allowed: (B, T, S), True = visible."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


# -- model -------------------------------------------------------------------------------------------------------


def forward(
    config: Config,
    params: Params,
    ids: Array,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    past: Params | None = None,
) -> tuple[Array, Params]:
    """Return the logits (B, T, V) and the cache for the tokens that follow.

    ids: (B, T). segment_ids: (B, T), equal within a document; with document_mask, attention and smear stay inside it.
    positions: (B, T) for the rotary angles; counted from the start of the row by default.
    past: the cache returned for the tokens before `ids`; the cache grows, nothing is overwritten.
    """
    rows, length = ids.shape
    documents = segment_ids if config.document_mask else None
    seen = past["blocks_0"][0].shape[1] if past else 0
    order = seen + jnp.arange(length)
    positions = jnp.broadcast_to(order, ids.shape) if positions is None else positions

    # Embedding, and a gated share of the previous token's ("smear").
    x = embedded = norm(params["embedding"][ids])
    if config.smear:
        first = past["previous"][:, None] if past else jnp.zeros_like(x[:, :1])
        previous = jnp.concatenate([first, x[:, :-1]], axis=1)
        gate = jax.nn.sigmoid(x[..., :24] @ params["smear_gate"])  # (B, T, 1)
        if documents is not None:
            gate *= jnp.pad(documents[:, 1:] == documents[:, :-1], ((0, 0), (1, 0)))[..., None]
        x = x + params["smear_scale"] * gate * previous

    x0 = middle = x
    outputs = [x]
    cache: Params = {"previous": embedded[:, -1]}
    for layer in range(config.depth):
        block = params[f"blocks_{layer}"]
        if config.residual_mix:
            x = params["rho"][layer] * x + params["xi"][layer] * x0

        # Attention. Some layers add a row of a table, chosen by the token, to the values.
        h = norm(x)
        q, k, v = (jnp.reshape(h @ block[name], (rows, length, -1, config.head_dim)) for name in "qkv")
        if config.has_value_table(layer):
            gate = 3 * jax.nn.sigmoid(h[..., :12] @ block["value_gate"])  # (B, T, K)
            v = v + gate[..., None] * block["value_table"][ids].reshape(v.shape)
        q, k = (rotary(y, positions, config.rotary_base) for y in (q, k))
        if config.qk_norm:
            q, k = 1.2 * norm(q), 1.2 * norm(k)
        last = k[:, -1:]
        if config.key_offset:  # half of the channels, the slower rotary pairs, are those of the token before
            first = past[f"blocks_{layer}"][2] if past else jnp.zeros_like(last)
            previous = jnp.concatenate([first, k[:, :-1]], axis=1)
            if documents is not None:
                previous *= jnp.pad(documents[:, 1:] == documents[:, :-1], ((0, 0), (1, 0)))[..., None, None]
            half = config.head_dim // 2
            k = jnp.where(jnp.arange(config.head_dim) % half >= half // 2, previous, k)
        if past:
            old_k, old_v, _ = past[f"blocks_{layer}"]
            k, v = jnp.concatenate([old_k, k], axis=1), jnp.concatenate([old_v, v], axis=1)
        cache[f"blocks_{layer}"] = (k, v, last)
        window, placed, same = config.window_of(layer), order, documents
        if config.paired_heads:  # two heads are one with twice the tokens: a_0 b_0 a_1 b_1 …
            q, k, v = (
                y.reshape(rows, y.shape[1], -1, 2, config.head_dim).swapaxes(2, 3) for y in (q, k, v)
            )  # (B, T, 2, N/2, H)
            q, k, v = (y.reshape(rows, -1, *y.shape[3:]) for y in (q, k, v))
            window, placed = window and 2 * window - 1, jnp.stack([2 * order, 2 * order + 1], axis=1).ravel()
            same = None if documents is None else jnp.repeat(documents, 2, axis=1)
        distance = placed[:, None] - jnp.arange(k.shape[1])  # (T, S): how far back a key lies
        allowed = (distance >= 0) & (distance < (window or k.shape[1]))
        allowed = jnp.broadcast_to(allowed, (rows, *allowed.shape))
        if same is not None:
            allowed &= same[:, :, None] == same[:, None, :]
        found = softmax_attention(q, k, v, allowed)
        if config.paired_heads:
            found = found.reshape(rows, length, 2, -1, config.head_dim).swapaxes(2, 3)
        x = x + found.reshape(rows, length, -1) @ block["out"]

        # Feed-forward with relu².
        x = x + jax.nn.relu(norm(x) @ block["up"]) ** 2 @ block["down"]
        if layer == config.depth // 2:
            middle = x
        if config.dense_connections:  # the next block reads a mixture of all outputs so far
            outputs.append(x)
            mix = params[f"connections_{layer}"]
            weights = jax.nn.gelu(norm(x) @ mix["connect_read"]) @ mix["connect_write"] + mix["connect_bias"]
            x = x + jnp.einsum("btj,jbtd->btd", weights, jnp.stack(outputs))

    # "Backout": subtract the middle layer. Below three layers the middle is the last layer, so it is skipped.
    if config.backout and config.depth >= 3:
        x = x - params["backout_scale"] * middle
    logits = (norm(x) @ params["head"])[..., : config.vocab_size]
    return (config.softcap * jnp.tanh(logits / config.softcap) if config.softcap else logits), cache


def loss(config: Config, params: Params, batch: dict[str, Array], z_loss: float = 0.0) -> Array:
    """Return the mean cross-entropy over `target_ids` (B, T), weighted by `loss_mask`; targets below 0 are ignored.

    z_loss adds that share of log²Σexp(logits), which keeps the logits from drifting.
    """
    targets = batch["target_ids"]
    logits, _ = forward(config, params, batch["input_ids"], batch.get("segment_ids"), batch.get("positions"))
    total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    weights = jnp.where(targets < 0, 0.0, batch.get("loss_mask", jnp.ones(targets.shape)))
    return jnp.sum(weights * (total - picked + z_loss * total**2)) / jnp.sum(weights)


def generate(config: Config, params: Params, prompt: Array, count: int) -> Array:
    """Return `count` tokens after `prompt` (B, T), the likeliest each time: (B, count)."""
    logits, cache = forward(config, params, prompt)
    tokens = [jnp.argmax(logits[:, -1], axis=-1)]
    while len(tokens) < count:
        logits, cache = forward(config, params, tokens[-1][:, None], past=cache)
        tokens.append(jnp.argmax(logits[:, -1], axis=-1))
    return jnp.stack(tokens, axis=1)
