"""Stochastic rounding of bf16 parameters: unbiased, reproducible, and the same however arrays are split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bessemer.optim import build_optimizer
from bessemer.optim.standard import AdamWSettings
from bessemer.optim.state import apply_updates, noise, noise_words, round_to_bfloat16

KEY = jax.random.key(7)
PATH = ("block", "query")


def words(step: int = 0) -> jax.Array:
    return noise_words(jax.random.fold_in(KEY, step), [PATH])[0]


def test_noise_is_uniform_and_uncorrelated_between_places_and_steps() -> None:
    first, second = (np.asarray(noise(words(step), (300, 400))) for step in (0, 1))
    shares = np.bincount((first >> 28).ravel(), minlength=16) / first.size
    assert np.abs(shares - 1 / 16).max() < 4 * np.sqrt(1 / 16 / first.size)
    unit = first / 2.0**32 - 0.5
    others = [np.roll(unit, 1, 0), np.roll(unit, 1, 1), second / 2.0**32 - 0.5, ((first & 0xFFFF) / 2.0**16) - 0.5]
    for other in others:
        assert abs(np.mean(unit * other)) * 12 < 4 / np.sqrt(first.size)


def test_rounding_is_unbiased_and_goes_to_a_neighbor() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal(64) * 3, jnp.float32)
    tiled = jnp.broadcast_to(x, (20_000, 64))
    rounded = np.asarray(round_to_bfloat16(tiled, noise(words(), tiled.shape)), np.float64)
    below = np.asarray(round_to_bfloat16(x, jnp.zeros(64, jnp.uint32)), np.float64)
    above = np.asarray(round_to_bfloat16(x, jnp.full(64, 0xFFFF, jnp.uint32)), np.float64)
    assert (np.isin(rounded, [below, above])).all()
    spacing = np.abs(above - below)
    assert (np.abs(rounded.mean(0) - np.asarray(x)) <= 4 * spacing / 2 / np.sqrt(20_000) + 1e-12).all()


def test_numbers_of_bf16_and_non_finite_values_stay_as_they_are() -> None:
    exact = jnp.asarray([0.0, -0.0, 1.5, -2.0, 3.0e38, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    exact = exact.astype(jnp.bfloat16).astype(jnp.float32)
    for bits in (0, 0xFFFF, 0xFFFFFFFF):
        rounded = round_to_bfloat16(exact, jnp.full(exact.shape, bits, jnp.uint32))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(exact))


def test_float32_parameters_are_updated_as_optax_does() -> None:
    params = {"w": jnp.ones((2, 3)), "scale": jnp.ones(3)}
    updates = jax.tree.map(lambda p: 1e-3 * p, params)
    found = apply_updates(params, updates, KEY)
    for name in params:
        np.testing.assert_array_equal(found[name], params[name] + updates[name])


@pytest.fixture(scope="module")
def trained() -> dict[str, np.ndarray]:
    """300 AdamW updates at a rate of 3e-6 by a gradient of constant signs: in float32, in bf16, and in bf16 rounded to
    nearest."""
    rng = np.random.default_rng(0)
    start = {"w": jnp.asarray(rng.standard_normal((256, 256)) * 0.02 + 0.05, jnp.bfloat16).astype(jnp.float32)}
    slope = jnp.asarray(np.sign(rng.standard_normal((256, 256))), jnp.float32)
    settings = AdamWSettings(lr=3e-6, weight_decay=0.0)
    tx = build_optimizer("adamw", lambda cls: settings if cls is AdamWSettings else cls(), 300, schedule=None).tx

    def run(dtype: jnp.dtype, nearest: bool) -> np.ndarray:
        def step(carry: tuple, i: jax.Array) -> tuple:
            params, state = carry
            grads = {"w": slope * (1 + 0.1 * jnp.sin(i.astype(jnp.float32)))}
            updates, state = tx.update(grads, state, params, step=i)
            if nearest:
                params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
            else:
                params = apply_updates(params, updates, jax.random.fold_in(KEY, i))
            return (params, state), None

        params = jax.tree.map(lambda p: p.astype(dtype), start)
        (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(300)))((params, tx.init(params)))
        return np.asarray(params["w"], np.float64)

    runs = {"start": np.asarray(start["w"], np.float64), "slope": np.asarray(slope)}
    runs |= {"float32": run(jnp.float32, False), "bfloat16": run(jnp.bfloat16, False)}
    return runs | {"nearest": run(jnp.bfloat16, True)}


@pytest.mark.slow
def test_small_updates_of_bf16_parameters_add_up_to_those_of_float32(trained: dict[str, np.ndarray]) -> None:
    moved = {name: (trained[name] - trained["start"]) * -trained["slope"] for name in ("float32", "bfloat16")}
    expected, found = moved["float32"].mean(), moved["bfloat16"]
    error = found.std() / np.sqrt(found.size)
    assert error < 0.01 * expected  # or the comparison would say nothing
    assert abs(found.mean() - expected) < 4 * error


def test_rounded_to_nearest_most_of_these_parameters_would_not_move(trained: dict[str, np.ndarray]) -> None:
    assert np.mean(trained["nearest"] == trained["start"]) > 0.9
    assert np.mean(trained["bfloat16"] == trained["start"]) < np.mean(trained["nearest"] == trained["start"])


def test_a_split_array_is_rounded_as_the_whole_one() -> None:
    params = {"block": {"query": jnp.ones((8, 512), jnp.bfloat16)}, "head": jnp.ones((16, 8), jnp.bfloat16)}
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 1e-4, jnp.float32), params)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    place = NamedSharding(mesh, PartitionSpec("a", "b"))
    split = jax.jit(apply_updates)(jax.device_put(params, place), jax.device_put(updates, place), KEY)
    whole = jax.jit(apply_updates)(params, updates, KEY)
    for one, other in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole)} == {"bfloat16"}
    assert not np.array_equal(np.asarray(whole["block"]["query"][0, :8]), np.asarray(whole["head"][0]))
