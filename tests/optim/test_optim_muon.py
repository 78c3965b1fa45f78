"""Muon: the polar step, and the whole update against a float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.optim.muon import (
    COEFFICIENTS,
    PRESETS,
    MuonSettings,
    TrapezoidSettings,
    decay_schedule,
    momentum_schedule,
    muon,
    orthogonalize,
    orthogonalize_stacked,
    polar_express,
    polar_flops,
    scale_by_muon,
    trapezoid,
)
from bessemer.optim.state import Spread
from bessemer.topology import TopologySettings, make_topology


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def reference_orthogonalize(g: np.ndarray) -> np.ndarray:
    """float64; g: (fan_in, fan_out), a row being the weights into one output."""
    w = g.T.copy()  # (fan_out, fan_in): the orientation of the papers
    norms = np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-6)
    w *= np.linalg.norm(w) / np.sqrt(w.shape[0]) / norms
    x = w / (1.01 * np.linalg.norm(w) + 1e-6)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x * np.sqrt(min(x.shape)) / max(np.linalg.norm(x), 1e-6)).T


def reference_step(p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, c: dict[str, float]) -> tuple:
    """One update of one matrix, written out. v has one value per index of the longer axis."""
    m = c["mu"] * m + (1 - c["mu"]) * g
    u = reference_orthogonalize((1 - c["mu"]) * g + c["mu"] * m)
    axis = 0 if p.shape[1] >= p.shape[0] else 1
    square = (u**2).mean(axis)
    v = 0.9 * v + 0.1 * square
    scaled = u / np.expand_dims(np.sqrt(np.maximum(v, 1e-10)), axis)
    u = scaled * np.linalg.norm(u) / np.linalg.norm(scaled)
    stretch = np.sqrt(max(1.0, p.shape[1] / p.shape[0]))
    new = p - c["lr"] * stretch * u - c["lr"] * c["wd"] * p * (u * p >= 0)
    return new, m, v


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_polar_express_orthogonalizes(shape: tuple[int, int]) -> None:
    """The composed polynomial maps [1e-3, 1/1.01] into 1 ± .1412: that band is the method's own accuracy."""
    x = normal(0, 3, *shape)
    u, before, vt = np.linalg.svd(x, full_matrices=False)
    polar = np.asarray(polar_express(jnp.asarray(x, jnp.float32)))
    after = np.einsum("bmk,bmn,bkn->bk", u, polar, vt)  # the same directions, new singular values
    regular = before / np.linalg.norm(before, axis=1, keepdims=True) > 1.1e-3
    assert regular.mean() > 0.95
    assert np.abs(after[regular] - 1).max() < 0.142 and after.max() < 1.142
    np.testing.assert_allclose(np.einsum("bmk,bk,bkn->bmn", u, after, vt), polar, atol=1e-4)
    out = np.asarray(orthogonalize(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(np.linalg.norm(out, axis=(1, 2)), np.sqrt(min(shape)), rtol=1e-5)
    np.testing.assert_allclose(out[0], reference_orthogonalize(x[0]), atol=1e-4)


def test_zero_and_tiny_matrices_are_safe() -> None:
    x = jnp.stack([jnp.zeros((8, 16)), 1e-12 * jnp.asarray(normal(1, 8, 16), jnp.float32)])
    for dtype in (jnp.float32, jnp.bfloat16):
        out = orthogonalize(x.astype(dtype))
        assert out.dtype == jnp.float32 and bool(jnp.isfinite(out).all())
        assert not out[0].any()


def test_bf16_is_close_to_float32() -> None:
    x = jnp.asarray(normal(2, 2, 16, 32), jnp.float32)
    full, half = orthogonalize(x), orthogonalize(x.astype(jnp.bfloat16))
    cosine = jnp.vdot(full, half) / (jnp.linalg.norm(full) * jnp.linalg.norm(half))
    assert float(cosine) > 0.99


def test_stacked_equals_one_by_one() -> None:
    leaves = [jnp.asarray(normal(k, *s), jnp.float32) for k, s in enumerate([(8, 8), (8, 16), (8, 8), (16, 8)])]
    alone = [orthogonalize(leaf) for leaf in leaves]
    mesh = make_topology(TopologySettings(data=4), devices=jax.devices()[:4]).mesh
    for spread in (None, Spread(mesh, ("data",))):
        together = jax.jit(lambda x, s=spread: orthogonalize_stacked(x, jnp.dtype(jnp.float32), s))(leaves)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


SHAPES = {"a": (12, 12), "b": (12, 30), "c": (30, 12), "d": (12, 30)}


def test_update_matches_the_float64_reference() -> None:
    steps = 12
    settings = dataclasses.replace(MuonSettings(), weight_decay=0.7, momentum_steps=3, matrix_lr=0.05)
    schedule = trapezoid(TrapezoidSettings(warmup_steps=2), steps)
    tx = muon(settings, schedule, steps, lambda path: "matrix", compute_dtype=jnp.dtype(jnp.float32))
    exact = {k: normal(10 + i, *s) for i, (k, s) in enumerate(SHAPES.items())}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), exact)
    state = tx.init(params)
    m = {k: np.zeros(s) for k, s in SHAPES.items()}
    v = {k: np.zeros(max(s)) for k, s in SHAPES.items()}
    update = jax.jit(lambda g, s, p, i: tx.update(g, s, p, step=i))
    for i in (0, 1, 2, 5, 9):  # steps 3, 4, 6, 7 and 8 were skipped: schedules go on, moments do not
        grads = {k: normal(100 * i + j, *s) for j, (k, s) in enumerate(SHAPES.items())}
        lr = 0.05 * (min((i + 1) / 2, 1.0) if i <= 6 else (12 - i) / 6)
        c = {"mu": 0.85 + 0.10 * min(i / 3, 1), "lr": lr, "wd": 0.7 * (1 - i / 12)}
        for k in SHAPES:
            exact[k], m[k], v[k] = reference_step(exact[k], grads[k], m[k], v[k], c)
        updates, state = update(jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads), state, params, jnp.int32(i))
        params = jax.tree.map(jnp.add, params, updates)
        for k in SHAPES:
            np.testing.assert_allclose(params[k], exact[k], atol=2e-5, err_msg=f"{k} at step {i}")
    assert update._cache_size() == 1


def test_momentum_and_decay_schedules() -> None:
    classic = trapezoid(TrapezoidSettings(), 1000)
    momentum = momentum_schedule(MuonSettings(), classic, 1000)
    np.testing.assert_allclose([momentum(i) for i in (0, 150, 300, 1000)], [0.85, 0.90, 0.95, 0.95], rtol=1e-6)
    decay = decay_schedule(MuonSettings(), 1000)
    np.testing.assert_allclose([decay(i) for i in (0, 250, 1000)], [0.2, 0.15, 0.0], atol=1e-7)

    july = MuonSettings(preset="july2026")
    shape = trapezoid(TrapezoidSettings(preset="july2026"), 2000)  # warmdown begins at 700
    momentum = momentum_schedule(july, shape, 2000)
    got = [momentum(i) for i in (0, 200, 400, 700, 1350, 2000)]
    np.testing.assert_allclose(got, [0.85, 0.91, 0.97, 0.97, 0.935, 0.90], rtol=1e-6)
    decay = decay_schedule(july, 2000)
    np.testing.assert_allclose([decay(i) for i in (0, 1000, 2000)], [0.28, 0.14, 0.0], atol=1e-7)
    short = momentum_schedule(july, trapezoid(TrapezoidSettings(preset="july2026"), 600), 600)
    jumps = np.abs(np.diff(np.asarray(short(np.arange(601)))))
    assert jumps.max() < 1e-3


def test_groups_follow_the_presets_the_width_and_the_dial() -> None:
    groups = {g.name: g for g in MuonSettings().groups(width=3072)}  # s = 1/2
    expected = {"matrix": 0.02, "head": 0.002, "embedding": 0.15, "value_embedding": 0.075}
    expected |= {"rho": 0.005, "xi": 0.5, "scalar": 0.2}
    assert {name: g.lr for name, g in groups.items()} == pytest.approx(expected)
    assert groups["xi"].betas == (0.96, 0.95) and groups["rho"].betas == (0.8, 0.95)
    july = {g.name: g for g in MuonSettings(preset="july2026", lr_multiplier=0.5).groups(768)}
    assert (july["head"].lr, july["head"].betas, july["head"].weight_decay) == (0.004, (0.8, 0.96), 0.01)
    assert (july["embedding"].betas, july["embedding"].weight_decay) == ((0.8, 0.995), 0.001)
    assert (july["value_embedding"].betas, july["value_embedding"].weight_decay) == ((0.8, 0.995), 0.01)
    assert july["rho"].weight_decay == 0.05 and july["matrix"].weight_decay == 0.28
    assert PRESETS["july2026"].ratio == 12 and PRESETS["classic"].ratio == 10.5
    by_hand = {g.name: g.lr for g in MuonSettings(scalar_lr=0.1, embedding_lr=0.6).groups(768)}
    assert by_hand["xi"] == 0.1 and by_hand["rho"] == pytest.approx(0.001) and by_hand["embedding"] == 0.6


def kind(path: tuple[str, ...]) -> str:
    return {"e": "embedding", "h": "head", "v": "value_embedding", "r": "rho", "x": "xi", "s": "scalar"}.get(
        path[-1], "gate" if path[-1].startswith("g") else "matrix"
    )


@pytest.mark.slow
def test_the_rest_goes_to_adamw_groups_in_float32() -> None:
    shapes = {"e": (10, 4), "h": (4, 10), "v": (10, 4), "r": (3,), "x": (3,), "s": (), "g": (4, 2), "gv": (4,)}
    params: Any = {"block": {"q": jnp.asarray(normal(0, 4, 4), jnp.float32)}}
    params |= {k: jnp.asarray(normal(i + 1, *s), jnp.float32) for i, (k, s) in enumerate(shapes.items())}
    params["e"] = params["e"].astype(jnp.bfloat16)
    settings = MuonSettings(preset="july2026", scalar_warmup=0)
    schedule = trapezoid(TrapezoidSettings(), 100)
    tx = muon(settings, schedule, 100, kind)
    state = tx.init(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    grads = jax.tree.map(lambda p: jnp.asarray(np.sign(normal(5, *p.shape)), jnp.float32), params)
    updates, new = tx.update(grads, state, params, step=jnp.int32(0))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    rates = {g.name: g for g in settings.groups()}
    groups = {"e": "embedding", "h": "head", "v": "value_embedding", "r": "rho", "x": "xi", "s": "scalar"}
    for leaf, name in (groups | {"gv": "scalar"}).items():  # first Adam step of ±1 is the sign
        p = np.asarray(params[leaf], np.float32)
        expected = -rates[name].lr * (np.asarray(grads[leaf]) + rates[name].weight_decay * p)
        np.testing.assert_allclose(updates[leaf], expected, rtol=1e-4, atol=1e-6)
    assert "g" in new.inner_states["matrix"].inner_state[0].momentum


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(InputError, match=r"block/q has shape \(4,\)"):
        scale_by_muon(lambda step: jnp.float32(0.9)).init({"block": {"q": jnp.zeros(4)}})


def test_a_stack_of_experts_is_updated_as_its_matrices_alone() -> None:
    """A layer's experts are one parameter (n, fan_in, fan_out); sharing a norm would couple their updates."""
    tx = scale_by_muon(lambda step: jnp.float32(0.9))
    stack = {"experts": normal(1, 3, 8, 4), "other": normal(2, 3, 8, 4)}
    apart = {f"{name}{n}": array[n] for name, array in stack.items() for n in range(3)}
    state, alone = tx.init(stack), tx.init(apart)
    for number in range(2):
        made, state = tx.update(stack, state, step=jnp.int32(number))
        wanted, alone = tx.update(apart, alone, step=jnp.int32(number))
    for name, array in made.items():
        np.testing.assert_allclose(array, np.stack([wanted[f"{name}{n}"] for n in range(3)]), rtol=1e-5, atol=1e-6)
    assert polar_flops((3, 8, 4)) == 3 * polar_flops((8, 4))


def test_scalars_do_not_move_at_the_first_step_and_warm_up() -> None:
    """Behind output projections of 0 their first gradient is rounding noise; Adam makes a full step of any noise."""
    settings = MuonSettings(scalar_warmup=4)
    schedule = trapezoid(TrapezoidSettings(), 100)
    tx = muon(settings, schedule, 100, kind)
    params = {"r": jnp.ones(3), "x": jnp.ones(3), "s": jnp.ones(()), "h": jnp.ones((4, 10))}
    state = tx.init(params)
    noise = jax.tree.map(lambda p: jnp.full(p.shape, 1e-8), params)
    updates, state = tx.update(noise, state, params, step=jnp.int32(0))
    assert not np.any(updates["r"]) and not np.any(updates["x"]) and not np.any(updates["s"])
    assert np.all(updates["h"] != 0)
    # the noise leaves no trace in the moments: from the second step on, real gradients decide
    real = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), params)
    after, _ = tx.update(real, state, params, step=jnp.int32(1))
    clean, _ = tx.update(
        real,
        tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params, step=jnp.int32(0))[1],
        params,
        step=jnp.int32(1),
    )
    for name in ("r", "x", "s"):
        np.testing.assert_allclose(after[name], clean[name], rtol=1e-4)
    xi = next(group for group in settings.groups() if group.name == "xi")
    rates = [float(xi.rate(schedule)(step)) for step in (0, 1, 2, 4, 40)]
    np.testing.assert_allclose(rates, [0.0, 0.125, 0.25, 0.5, 0.5], rtol=1e-6)
    head = next(group for group in settings.groups() if group.name == "head")
    assert float(head.rate(schedule)(0)) == pytest.approx(0.004)


@pytest.mark.parametrize(("steps", "first"), [(0, 0.95), (1, 0.85), (300, 0.85)])
def test_momentum_steps_of_0_mean_no_ramp(steps: int, first: float) -> None:
    schedule = trapezoid(TrapezoidSettings(), 1000)
    momentum = momentum_schedule(MuonSettings(momentum_steps=steps), schedule, 1000)
    np.testing.assert_allclose([momentum(0), momentum(500)], [first, 0.95], rtol=1e-6)
