"""relu² inside the products of the feed-forward: values and gradients, by the interpreter of GPU kernels or on one."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from bessemer.kernels import relu2_matmul
from bessemer.kernels.feed_forward import can_join, feed_forward
from bessemer.kernels.relu2_matmul import Tiles
from bessemer.models.gpt import GPT
from bessemer.models.layers import AXES
from bessemer.topology import TopologySettings, make_topology

ROWS, WIDTH, HIDDEN = (2, 256), 128, 512
MATRICES = (AXES["up"], AXES["down"])


NEW = hasattr(plgpu, "force_gpu_interpret_mode")
"""From jax 0.11 on the simulation is public, and knows multiprocessors that share what they copy."""
SMALL = Tiles(m=64, stages=3, cluster=2 if NEW else 1)


def interpreted() -> Any:
    """Kernels run by JAX's simulation of a GPU: blocks, warpgroups, copies and barriers."""
    home = plgpu if NEW else importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return home.force_gpu_interpret_mode()


def normal(index: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.fold_in(jax.random.key(3), index), shape)


def near(one: Any, other: Any) -> None:
    """bf16 keeps 8 bits: half a percent of the largest number, and two roundings of each."""
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    np.testing.assert_allclose(one, other, rtol=0.02, atol=0.005 * np.abs(other).max())


def plain(h: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.square(jnp.maximum(h @ up, 0)) @ down


def check(rows: tuple[int, ...], width: int, hidden: int) -> None:
    """The joined feed-forward and its three gradients in bf16 against plain JAX in float32, of the same numbers."""
    h, g = (normal(i, *rows, width).astype(jnp.bfloat16) for i in (0, 1))
    up, down = normal(2, width, hidden, scale=width**-0.5), normal(3, hidden, width, scale=hidden**-0.5)
    up, down = (w.astype(jnp.bfloat16).astype(jnp.float32) for w in (up, down))

    out, pull = jax.vjp(lambda *a: feed_forward(*a, MATRICES, jnp.bfloat16, "mlp_hidden"), h, up, down)
    grads = pull(g)
    wide, wide_pull = jax.vjp(plain, h.astype(jnp.float32), up, down)
    near(out, wide)
    for mine, theirs in zip(grads, wide_pull(g.astype(jnp.float32)), strict=True):
        near(mine, theirs)


@pytest.mark.slow
def test_the_joined_feed_forward_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relu2_matmul, "TILES", SMALL)
    with interpreted():
        check(ROWS, WIDTH, HIDDEN)


@pytest.mark.parametrize(
    ("tiles", "rows", "width", "hidden"),
    [
        (SMALL, 384, 192, 256),
        (Tiles(m=64, n=256, stages=2, cluster=1), 384, 192, 256),
        (SMALL, 128, 64, 128),  # a multiprocessor has fewer blocks than its ring: it must not wait for the rest
    ],
)
def test_a_product_however_it_is_cut(tiles: Tiles, rows: int, width: int, hidden: int) -> None:
    x = normal(0, rows, width).astype(jnp.bfloat16)
    w = normal(1, width, hidden, scale=0.1).astype(jnp.bfloat16)
    with interpreted():
        y = relu2_matmul.up(x, w, tiles)
    wide = jnp.square(jnp.maximum(x.astype(jnp.float32) @ w.astype(jnp.float32), 0))
    near(y, wide)
    assert float(jnp.min(y)) == 0 and float(jnp.mean(y == 0)) > 0.4


def test_it_is_left_alone_where_it_cannot_be() -> None:
    h, up = jnp.zeros((32, 256, 256), jnp.bfloat16), jnp.zeros((256, 1024))
    assert not can_join(h, up, "xla")
    assert can_join(h, up, "pallas") == (jax.default_backend() == "gpu")
    assert relu2_matmul.suits(65536, 768, 3072) and relu2_matmul.suits(65536, 1280, 5120)
    assert not relu2_matmul.suits(65536, 768, 3000) and not relu2_matmul.suits(100, 768, 3072)


@pytest.mark.slow
def test_on_a_mesh_each_device_multiplies_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation has one GPU: plain products stand for the kernels here, and see 4 × 64 rows and whole matrices."""
    seen = []

    def up(x: jax.Array, w: jax.Array) -> jax.Array:
        seen.append((x.shape, w.shape))
        return jnp.square(jnp.maximum(x @ w, 0))

    monkeypatch.setattr(relu2_matmul, "up", up)
    monkeypatch.setattr(relu2_matmul, "back", lambda g, v, y: (g @ v) * (2 * jnp.sqrt(y)))
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=1, context=2))
    with topology.scope():
        check((16, 128), WIDTH, HIDDEN)
    assert set(seen) == {((4 * 64, WIDTH), (WIDTH, HIDDEN))}


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "width"), [(8, 768), (8, 1280), (4, 256)])
def test_on_a_gpu(batch: int, width: int) -> None:
    """Tolerances as above; rows of 1,024 tokens. In the last case a multiprocessor has less than a ring of blocks."""
    assert can_join(jnp.zeros((batch, 1024, width)), jnp.zeros((width, 4 * width)), "pallas")
    assert "relu²" in GPT(depth=1, width=width, vocab_size=64).chosen_kernels()["kernels"][1]
    check((batch, 1024), width, 4 * width)
