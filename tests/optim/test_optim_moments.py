"""Moments stored in bf16 and in 8 bits: errors of the codes, bytes, and updates beside those of float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bessemer.optim import build_optimizer, state_shardings
from bessemer.optim.standard import AdamWSettings, LionSettings, SgdSettings
from bessemer.optim.state import Packed, is_packed, noise, noise_words, pack_mean, pack_square, unpack

SETTINGS = {"adamw": AdamWSettings, "lion": LionSettings, "sgd": SgdSettings}


def bits(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return noise(noise_words(jax.random.key(seed), [("w",)])[0], shape)


def made(name: str, dtype: str, **settings: Any) -> optax.GradientTransformationExtraArgs:
    own = SETTINGS[name](state_dtype=dtype, **settings)
    return build_optimizer(name, lambda cls: own if cls is SETTINGS[name] else cls(), 100, schedule=None, seed=3).tx


def size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("pack", "positive"), [(pack_mean, False), (pack_square, True)])
def test_codes_are_unbiased_with_a_known_error(pack: Any, positive: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 600)) * np.exp(rng.standard_normal((4, 1)))
    x = jnp.asarray(x**2 if positive else x, jnp.float32)
    tiled = jnp.broadcast_to(x, (2000, 4, 600))
    packed = jax.jit(pack)(tiled, bits(tiled.shape))
    found = np.asarray(unpack(packed), np.float64)
    assert packed.codes.dtype == (jnp.uint8 if positive else jnp.int8)
    assert packed.scale.shape == (2000, 4, 3)
    scale = np.repeat(np.asarray(packed.scale[0]), 256, -1)[:, :600]
    share, power, codes = np.abs(np.asarray(x)) / scale, 4 if positive else 2, 255 if positive else 127
    spacing = scale * power / codes * np.maximum(share, codes ** -float(power)) ** (1 - 1 / power) * 1.6 + scale * 1e-6
    spacing = np.maximum(spacing, scale * codes ** -float(power) * 2**power)
    assert (np.abs(found - np.asarray(x)) <= spacing).all()
    tiny = share < (2.0 / codes) ** power  # the smallest positive code stands for less, too
    deviation = np.abs(found.mean(0) - np.asarray(x)) / (spacing / np.sqrt(2000))
    assert deviation[~tiny].max() < 4


def test_a_positive_square_never_becomes_zero_and_zero_stays_zero() -> None:
    x = jnp.asarray([[0.0, 1e-30, 1e-12, 1.0]], jnp.float32)
    for seed in range(20):
        found = np.asarray(unpack(pack_square(x, bits(x.shape, seed))))[0]
        assert found[0] == 0
        assert (found[1:] > 0).all()
        assert found[3] == 1
    nothing = jnp.zeros((2, 300))
    assert not np.asarray(unpack(pack_mean(nothing, bits(nothing.shape)))).any()


def test_bytes_of_the_state() -> None:
    params = {"w": jnp.zeros((64, 512)), "scale": jnp.zeros(512), "small": jnp.zeros((8, 8))}
    own, exact = 64 * 512, 4 * (512 + 64)
    held = {dtype: size(made("adamw", dtype).init(params)) - 4 for dtype in ("float32", "bfloat16", "int8")}
    assert held["float32"] == 2 * (4 * own + exact)
    assert held["bfloat16"] == 2 * (2 * own + exact)
    assert held["int8"] == 2 * (own + 4 * own // 256 + exact)
    assert size(made("lion", "int8").init(params)) - 4 == held["int8"] // 2
    assert size(made("sgd", "int8").init(params)) == held["int8"] // 2


@functools.cache
def path_of(name: str, dtype: str, steps: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Losses and final weights of a noisy least-squares problem with columns of very different scale."""
    rng = np.random.default_rng(1)
    scales = jnp.asarray(np.exp(rng.uniform(-4, 2, 256)), jnp.float32)
    goal = jnp.asarray(rng.standard_normal((256, 64)), jnp.float32) / scales[:, None]
    rate = {"adamw": 0.02, "lion": 0.01, "sgd": 2.0}[name]
    tx = made(name, dtype, lr=rate, weight_decay=0.0)

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        rows = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (64, 256)) * scales

        def loss_of(p: Any) -> jax.Array:
            return jnp.mean(jnp.square(rows @ (p["w"] - goal))) / 64

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params, step=i)
        return (optax.apply_updates(params, updates), state), loss

    params = {"w": jnp.zeros((256, 64))}
    (params, _), losses = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(steps)))((params, tx.init(params)))
    return np.asarray(losses), np.asarray(params["w"])


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_moments_train_like_float32(name: str, dtype: str) -> None:
    exact, found = path_of(name, "float32")[0], path_of(name, dtype)[0]
    assert exact[-5:].mean() < 0.75 * exact[0]
    np.testing.assert_allclose(found, exact, rtol=0.005)  # measured: 4e-4 for adamw and sgd, 1.9e-3 for lion


def test_the_same_step_is_rounded_alike_and_another_otherwise() -> None:
    tx = made("adamw", "int8")
    params = {"w": jnp.ones((16, 512))}
    grads = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((16, 512)), jnp.float32)}

    def codes(step: int) -> np.ndarray:
        _, state = tx.update(grads, tx.init(params), params, step=jnp.int32(step))
        return np.asarray(jax.tree.leaves(state, is_leaf=is_packed)[1].codes)

    np.testing.assert_array_equal(codes(5), codes(5))
    assert (codes(5) != codes(6)).any()


def test_a_split_state_is_the_whole_one() -> None:
    tx = made("adamw", "int8")
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((8, 1024)), jnp.float32), "b": jnp.zeros(1024)}
    grads = jax.tree.map(jnp.cos, params)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = {"w": NamedSharding(mesh, PartitionSpec("fsdp", "tensor")), "b": whole}
    there = state_shardings(tx, params, placed, whole)
    packed = jax.tree.leaves(there, is_leaf=is_packed)
    packed = next(leaf for leaf in packed if isinstance(leaf, Packed))
    assert packed.codes.spec == PartitionSpec("fsdp", "tensor")
    assert packed.scale.spec == PartitionSpec("fsdp", None)

    def both(params: Any, grads: Any) -> Any:
        state = tx.init(params)
        for step in range(2):
            updates, state = tx.update(grads, state, params, step=jnp.int32(step))
        return updates, state

    one = jax.jit(both)(params, grads)
    split = jax.jit(both, out_shardings=(placed, there))(jax.device_put(params, placed), jax.device_put(grads, placed))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6)
