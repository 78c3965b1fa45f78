"""A step's attention by the one-pass kernel: the plain one's numbers at any length (interpreted here)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.absent_gpu import lowered_for_a_gpu

from bessemer.kernels import decode
from bessemer.kernels.attention import cached_attention
from bessemer.kernels.decode import decode_attention, suits_decode
from bessemer.models.cache import held_positions, write
from bessemer.models.gpt import GPT

SIZE = 250  # not a multiple of a block


def draw(seed: int, *shape: int, dtype: type = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.fixture
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows cut or not: as a chip with many or few processors would have it."""
    monkeypatch.setattr(decode, "PROGRAMS", request.param)
    yield


@pytest.mark.parametrize(("pieces", "heads", "kv_heads"), [(1, 6, 2), (64, 6, 2), (64, 2, 2)], indirect=["pieces"])
def test_it_is_the_plain_attention_at_every_length(pieces: None, heads: int, kv_heads: int) -> None:
    """Also in a full ring, where the new token takes the oldest one's place, and in rows that add nothing."""
    lengths = jnp.array([0, 62, 63, 64, 199, SIZE - 1, SIZE, SIZE + 70, 30, SIZE + 5])
    added = jnp.array([1] * 8 + [0] * 2)
    q = draw(0, len(lengths), heads, 32)
    k, v = (draw(seed, len(lengths), kv_heads, 32) for seed in (1, 2))
    stores = [draw(seed, len(lengths), kv_heads, SIZE, 32) for seed in (3, 4)]
    new = [write(store, x[:, None], lengths, added) for store, x in zip(stores, (k, v), strict=True)]
    wanted = cached_attention(
        q[:, None], *new, q_positions=(lengths + added)[:, None] - 1, k_positions=held_positions(SIZE, lengths + added)
    )[:, 0]
    got, *written = decode_attention(q, k, v, *stores, lengths, added)
    np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=1e-5)
    for mine, its in zip(written, new, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("pieces", [64], indirect=True)
def test_a_row_that_holds_nothing_gives_zeros_and_what_is_beyond_a_row_weighs_nothing(pieces: None) -> None:
    q, k, v = (draw(seed, 2, 2, 32) for seed in range(3))
    stores = [draw(seed, 2, 2, SIZE, 32) for seed in (3, 4)]
    lengths, added = jnp.array([0, 70]), jnp.array([0, 1])
    beyond = jnp.arange(SIZE)[None, None, :, None] >= lengths[:, None, None, None]
    got, *_ = decode_attention(q, k, v, *(jnp.where(beyond, np.nan, x) for x in stores), lengths, added)
    assert not np.any(got[0])
    np.testing.assert_allclose(got[1], decode_attention(q, k, v, *stores, lengths, added)[0][1], rtol=1e-6)


@pytest.mark.slow
def test_a_model_decodes_the_same_tokens_with_it_through_a_full_window() -> None:
    model = GPT(
        depth=2,
        width=64,
        head_dim=32,
        vocab_size=64,
        block_size=256,
        window="SL",
        window_short=0.5,
        precision="float32",
        kernels="xla",
    )
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 140)), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), prompts[:, :8])

    @jax.jit
    def begin(params: Any) -> Any:
        return model.apply(params, prompts, model.init_cache(2, 256), jnp.array([140, 100]), method="decode")[1]

    results = []
    for kernels in ("xla", "pallas"):
        one = dataclasses.replace(model, kernels=kernels)
        step = jax.jit(lambda tokens, cache, one=one: one.apply(params, tokens, cache, method="decode"))
        cache, rows = begin(params), []
        for token in range(4):
            logits, cache = step(jnp.full((2, 1), token), cache)
            rows.append(logits[:, 0])
        results.append(np.stack(rows))
    np.testing.assert_allclose(results[1], results[0], atol=1e-4)


def test_which_heads_it_reads() -> None:
    assert suits_decode(128, 1) and suits_decode(64, 16)
    assert not suits_decode(96, 1) and not suits_decode(128, 32)


def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = ((4, 6, 128), (4, 3, 128), (4, 3, 128), (4, 3, 1300, 128), (4, 3, 1300, 128))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    counts = [jax.ShapeDtypeStruct((4,), jnp.int32)] * 2
    assert "xla.gpu.triton" in lowered_for_a_gpu(decode_attention, *arrays, *counts)


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_plain_attention_in_half_precision() -> None:
    """To a rounding of the weights (2⁻⁹ each, averaged) and of the result (2⁻⁹): values are of size 1."""
    lengths, added = jnp.array([0, 62, 1151, 1279, 1280, 1400, 700]), jnp.array([1, 1, 1, 1, 1, 1, 0])
    q = draw(0, len(lengths), 6, 128).astype(jnp.bfloat16)
    k, v = (draw(seed, len(lengths), 3, 128).astype(jnp.bfloat16) for seed in (1, 2))
    stores = [draw(seed, len(lengths), 3, 1280, 128).astype(jnp.bfloat16) for seed in (3, 4)]
    new = [write(store, x[:, None], lengths, added) for store, x in zip(stores, (k, v), strict=True)]
    exact = [x.astype(jnp.float32) for x in (q[:, None], *new)]
    places = held_positions(1280, lengths + added)
    wanted = cached_attention(*exact, q_positions=(lengths + added)[:, None] - 1, k_positions=places)[:, 0]
    got, *written = jax.jit(decode_attention)(q, k, v, *stores, lengths, added)
    np.testing.assert_allclose(got.astype(jnp.float32), wanted, atol=0.02)
    for mine, its in zip(written, new, strict=True):
        np.testing.assert_array_equal(mine, its)
