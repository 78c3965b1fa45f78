"""A step's attention by the one-pass kernel: the plain one's numbers at any length (interpreted here)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.models import decode_kernel
from bessemer.models.attention import cached_attention
from bessemer.models.decode_kernel import decode_attention, suits_decode
from bessemer.models.gpt import GPT

SIZE = 256


def draw(seed: int, *shape: int, dtype: type = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.fixture
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows cut or not: as a chip with many or few processors would have it."""
    monkeypatch.setattr(decode_kernel, "PROGRAMS", request.param)
    yield


@pytest.mark.parametrize("pieces", [1, 64], indirect=True)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_it_is_the_plain_attention_at_every_length(pieces: None, heads: int, kv_heads: int) -> None:
    held = jnp.array([1, 63, 64, 65, 200, SIZE])
    q = draw(0, len(held), heads, 32)
    k, v = (draw(seed, len(held), kv_heads, SIZE, 32) for seed in (1, 2))
    places = jnp.broadcast_to(jnp.arange(SIZE), (len(held), SIZE))
    wanted = cached_attention(q[:, None], k, v, q_positions=held[:, None] - 1, k_positions=places)[:, 0]
    np.testing.assert_allclose(decode_attention(q, k, v, held), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("pieces", [64], indirect=True)
def test_a_row_that_holds_nothing_gives_zeros_and_what_is_beyond_a_row_weighs_nothing(pieces: None) -> None:
    q, k, v = draw(0, 2, 2, 32), draw(1, 2, 2, SIZE, 32), draw(2, 2, 2, SIZE, 32)
    held = jnp.array([0, 70])
    garbage = jnp.arange(SIZE)[None, None, :, None] >= held[:, None, None, None]
    got = decode_attention(q, *(jnp.where(garbage, 1e9, x) for x in (k, v)), held)
    assert not np.any(got[0])
    np.testing.assert_allclose(got[1], decode_attention(q, k, v, held)[1], rtol=1e-6)


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
    params = model.init(jax.random.key(0), prompts)
    results = []
    for kernels in ("xla", "pallas"):
        one = dataclasses.replace(model, kernels=kernels)
        step = jax.jit(lambda tokens, cache, one=one: one.apply(params, tokens, cache, method="decode"))
        logits, cache = one.apply(
            params, prompts, one.init_cache(2, 256), jnp.array([140, 100]), method="decode"
        )
        rows = []
        for token in range(4):
            logits, cache = step(jnp.full((2, 1), token), cache)
            rows.append(logits[:, 0])
        results.append(np.stack(rows))
    np.testing.assert_allclose(results[1], results[0], atol=1e-4)


def test_which_caches_it_reads() -> None:
    assert suits_decode(1280, 128) and suits_decode(64, 64)
    assert not suits_decode(100, 128) and not suits_decode(1280, 96)


def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as far as a machine without a GPU can: the Triton program is built."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 6, 128), (4, 3, 1280, 128)))
    held = jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = jax.jit(decode_attention).trace(q, k, k, held).lower(lowering_platforms=("cuda",))
    assert "xla.gpu.triton" in lowered.as_text()
