"""Grouped products of padded groups: by the interpreter of GPU kernels, by plain JAX, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.absent_gpu import lowered_for_a_gpu
from tests.models.test_feed_forward import NEW, interpreted

from bessemer.kernels import grouped, grouped_matmul, relu2_matmul
from bessemer.kernels.grouped import Order, choose_padded, collect, dispatch, grouped_linear
from bessemer.kernels.relu2_matmul import Tiles
from bessemer.topology.chips import planned_for

SMALL = Tiles(m=64, n=64, stages=3, cluster=2 if NEW else 1)
STEP = SMALL.m * SMALL.cluster
SIZES = [(1, 0, 2, 0), (0, 0, 0, 3), (0, 0, 0, 0), (3, 0, 0, 0)]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def loop(x: Any, w: Any, g: Any, sizes: Any) -> tuple[np.ndarray, np.ndarray]:
    """y and dW of each group in float64; rows beyond the last group are zeros."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    y, dw, start = np.zeros((len(x), w.shape[2])), np.zeros(w.shape), 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        y[rows], dw[e] = x[rows] @ w[e], x[rows].T @ g[rows]
        start += size
    return y, dw


def near(got: Any, wanted: np.ndarray) -> None:
    """bf16 keeps 8 bits."""
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=0.01, atol=0.005 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("tiles", SIZES)
def test_products_of_each_group_in_the_simulation(tiles: tuple[int, ...]) -> None:
    sizes = jnp.asarray(tiles, jnp.int32) * STEP
    x, w, g = normal(0, 4 * STEP, 128), normal(1, 4, 128, 192), normal(2, 4 * STEP, 192)
    x = jnp.where(jnp.arange(4 * STEP)[:, None] < sizes.sum(), x, jnp.nan)  # no row beyond the last group is read
    y, dw = loop(x, w, g, sizes)
    with interpreted():
        near(grouped_matmul.product(x, w, sizes, SMALL), y)
        if NEW:  # before jax 0.11 the simulation does not know transposed blocks
            near(grouped_matmul.weight_gradient(x, g, sizes, SMALL), dw)


def test_it_lowers_for_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda *_: "gpu")
    x, g = (jax.ShapeDtypeStruct((2048, width), jnp.bfloat16) for width in (768, 384))
    w, sizes = jax.ShapeDtypeStruct((4, 768, 384), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    assert "mosaic_gpu" in lowered_for_a_gpu(grouped_matmul.product, x, w, sizes)
    assert "mosaic_gpu" in lowered_for_a_gpu(grouped_matmul.weight_gradient, x, g, sizes)
    assert "mosaic_gpu" in lowered_for_a_gpu(grouped_matmul.weight_gradient, g, x, sizes)  # 384: no pairs


@pytest.mark.parametrize("experts", [1, 5])
@pytest.mark.parametrize("count", [0, 3, 300])
def test_padded_rows_keep_the_order_of_their_tokens(count: int, experts: int) -> None:
    rng = np.random.default_rng(count)
    chosen = jnp.asarray(rng.integers(0, experts, (count, 2)), jnp.int32)
    plain, padded = Order.of(chosen, experts), Order.of(chosen, experts, 16)
    kept = padded.order[padded.order < 2 * count]
    np.testing.assert_array_equal(kept, plain.order)
    np.testing.assert_array_equal(padded.sizes, -(-plain.sizes // 16) * 16)
    np.testing.assert_array_equal(padded.order[padded.inverse], jnp.arange(2 * count))
    owner = jnp.repeat(jnp.arange(experts), padded.sizes, total_repeat_length=len(padded.order))
    np.testing.assert_array_equal(owner[padded.inverse], chosen.reshape(-1))


@pytest.mark.parametrize("implementation", ["tiles", "batched"])
def test_dispatch_and_collect_with_padding_are_a_loop_over_experts(implementation: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 6), (5, 6, 4)))
    chosen = jnp.asarray(rng.choice([0, 1, 3], (40, 2)), jnp.int32)  # 2 and 4 are empty
    weights = rng.standard_normal((80, 4)).astype(np.float32)

    def ours(x: Any, w: Any) -> Any:
        order = Order.of(chosen, 5, grouped.ALIGNMENT["batched"])
        rows = dispatch(x, order.order, order.inverse)
        made = grouped_linear(rows, w, order.sizes, jnp.float32, implementation)
        return jnp.sum(weights * collect(made, order.order, order.inverse))

    def plain(x: Any, w: Any) -> Any:
        return jnp.sum(weights * jnp.einsum("nd,ndf->nf", jnp.repeat(x, 2, axis=0), w[chosen.reshape(-1)]))

    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (ours, plain))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4)
    for a, b in zip(got[1], wanted[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_the_implementation_follows_the_device() -> None:
    assert choose_padded(1 << 18, 32, jnp.bfloat16, 768, 768) in ("tiles", "mosaic")  # of a CPU; of a Hopper GPU
    with planned_for("gpu"):
        assert choose_padded(1 << 18, 32, jnp.float32, 768, 768) == "batched"
        assert choose_padded(64, 32, jnp.bfloat16, 768, 768) == "tiles"
    assert grouped.ALIGNMENT["mosaic"] == grouped_matmul.ROWS
    assert grouped_matmul.suits(256, 768, 384, jnp.bfloat16) and not grouped_matmul.suits(256, 768, 384, jnp.float32)
    assert not grouped_matmul.suits(256, 768, 400, jnp.bfloat16)


@pytest.fixture
def hopper() -> Iterator[None]:
    assert relu2_matmul.runs_on(jax.devices()[0])
    yield


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(0, 1024, 256, 0), (0, 0, 0, 2048), (2048, 0, 0, 0), (0, 0, 0, 0), (512,) * 4])
@pytest.mark.parametrize(("width", "hidden"), [(768, 768), (768, 384), (128, 256)])
def test_on_a_gpu(hopper: None, width: int, hidden: int, sizes: tuple[int, ...]) -> None:
    x, w, g = normal(0, 2048, width), normal(1, 4, width, hidden), normal(2, 2048, hidden)
    x = jnp.where(jnp.arange(2048)[:, None] < sum(sizes), x, jnp.nan)
    y, dw = loop(x, w, g, sizes)
    near(grouped_matmul.product(x, w, jnp.asarray(sizes, jnp.int32)), y)
    near(grouped_matmul.weight_gradient(x, g, jnp.asarray(sizes, jnp.int32)), dw)
