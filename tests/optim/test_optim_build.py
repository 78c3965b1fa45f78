"""Optimizers by name, raw optax transformations, masks, rates and the printed table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bessemer.config import gather
from bessemer.errors import InputError
from bessemer.optim import build_optimizer, default_schedule, settings_classes, wrap_optax
from bessemer.optim.schedules import ConstantSettings, constant
from bessemer.optim.standard import AdamWSettings, adamw
from bessemer.optim.transform import Group
from bessemer.registry import Entry, optimizers

STEPS = 40


def defaults(cls: type) -> Any:
    return cls()


def small_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "embedding": jnp.asarray(rng.standard_normal((12, 4)), jnp.float32),
        "block_0": {"query": jnp.asarray(rng.standard_normal((4, 4)), jnp.float32), "scale": jnp.ones((4,))},
        "lm_head": jnp.asarray(rng.standard_normal((4, 12)), jnp.float32),
    }


def test_every_optimizer_lowers_a_loss_and_compiles_once() -> None:
    assert optimizers.names() == ["adafactor", "adamw", "lion", "muon", "sgd"]
    start = small_params()
    target = jax.tree.map(lambda p: p + jnp.where(jnp.sin(9 * p) > 0, 1.0, -1.0), start)

    def loss(params: Any) -> jax.Array:
        return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True))

    for name in optimizers.names():
        optimizer = build_optimizer(name, defaults, STEPS)

        @jax.jit
        def step(params: Any, state: Any, i: jax.Array, tx: Any = optimizer.tx) -> Any:
            updates, state = tx.update(jax.grad(loss)(params), state, params, step=i)
            return optax.apply_updates(params, updates), state

        params, state = start, optimizer.tx.init(start)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} <= {"float32", "int32"}
        for i in range(3):
            params, state = step(params, state, jnp.int32(i))
        assert step._cache_size() == 1, name
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
        assert loss(params) < loss(start), name


def test_adamw_is_optax_adamw_with_its_rule_for_decay() -> None:
    params = small_params()
    grads = jax.tree.map(jnp.cos, params)
    ours = adamw(AdamWSettings(lr=0.1, weight_decay=0.5), constant(ConstantSettings(), 10), 10)
    mask = {"embedding": False, "block_0": {"query": True, "scale": False}, "lm_head": True}
    theirs = optax.adamw(0.1, 0.9, 0.95, weight_decay=0.5, mask=mask)
    a, b = ours.init(params), theirs.init(params)
    for i in range(3):
        u, a = ours.update(grads, a, params, step=jnp.int32(i))
        w, b = theirs.update(grads, b, params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), u, w)


def test_the_schedule_reads_the_step_not_a_count() -> None:
    params = small_params()
    optimizer = build_optimizer("sgd", defaults, STEPS, schedule="wsd")
    state = optimizer.tx.init(params)
    updates, _ = optimizer.tx.update(params, state, params, step=jnp.int32(STEPS))  # never stepped before
    np.testing.assert_allclose(updates["lm_head"], -0.1 * 0.01 * params["lm_head"], rtol=1e-5)


def test_rates_and_table() -> None:
    params = small_params()
    muon = build_optimizer("muon", defaults, STEPS, width=768)
    assert default_schedule("muon") == "trapezoid" and default_schedule("adamw") == "wsd"
    rates = jax.jit(muon.rates)(jnp.int32(30))  # p = 10/20
    assert rates["lrm"] == 0.5 and rates["lr"] == pytest.approx(0.01)
    assert rates["lr/embedding"] == pytest.approx(0.15) and rates["lr/head"] == pytest.approx(0.002)
    table = {row.group: (row.tensors, row.parameters) for row in muon.describe(params)}
    assert table == {"matrix": (1, 16), "head": (1, 48), "embedding": (1, 48), "scalar": (1, 4)}
    plain = build_optimizer("adamw", defaults, STEPS)
    assert set(plain.rates(3)) == {"lr", "lrm"}
    rows = {row.group: row for row in plain.describe(jax.eval_shape(small_params))}
    assert rows["matrices"].parameters == 64 and rows["matrices"].decay == 0.01
    assert rows["rest"].parameters == 52 and rows["rest"].decay == 0.0 and rows["rest"].betas == (0.9, 0.95)


class Plain:
    """Settings of a user's optimizer that provide nothing but their fields."""


class Rated:
    lr = 0.5


class Halves(Rated):
    """All that settings may provide besides their fields."""

    default_schedule = "cosine"

    def groups(self, width: int | None) -> tuple[Group, ...]:
        return Group("even", self.lr), Group("odd", 2 * self.lr)

    def label(self, path: tuple[str, ...], leaf: Any, group_of: Any) -> str:
        return "odd" if leaf.ndim % 2 else "even"

    def curves(self, schedule: Any, steps: int) -> dict[str, Any]:
        return {"twice": lambda step: 2 * schedule(step)}

    def update_flops(self, label: str, shape: tuple[int, ...]) -> float:
        return 7.0 if label == "odd" else 0.0


def test_settings_of_an_own_optimizer_provide_as_much_as_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(settings: type) -> Any:
        entry = Entry("mine", lambda settings, schedule, steps, group_of: optax.identity(), (settings,))
        monkeypatch.setattr(optimizers, "entry", lambda name: entry)
        return build_optimizer("mine", defaults, STEPS)

    params = small_params()
    plain, rated, halves = built(Plain), built(Rated), built(Halves)
    assert [group.lr for group in plain.groups] == [1.0] and [group.lr for group in rated.groups] == [0.5]
    assert {row.group for row in rated.describe(params)} == {"all"} and rated.update_flops(params) == 0.0
    assert set(rated.curves) == {"lrm", "weight_decay"} and float(rated.rates(STEPS - 1)["lr"]) == 0.5
    assert {row.group: row.tensors for row in halves.describe(params)} == {"even": 3, "odd": 1}
    assert halves.update_flops(params) == 7.0 and "twice" in halves.curves
    assert float(halves.rates(STEPS - 1)["lr"]) < 0.5, "cosine by default"


def test_raw_optax_is_accepted() -> None:
    params = small_params()
    for tx in (optax.sgd(0.5), optax.chain(optax.clip(1.0), optax.adam(1e-3)), optax.lbfgs):
        if tx is optax.lbfgs:
            with pytest.raises(InputError, match="GradientTransformation"):
                wrap_optax(tx)
            continue
        optimizer = build_optimizer(tx, defaults, STEPS, schedule=lambda step: 0.5)
        updates, _ = optimizer.tx.update(params, optimizer.tx.init(params), params, step=jnp.int32(7))
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert optimizer.rates(3)["lr"] == 0.5
        assert [row.parameters for row in optimizer.describe(params)] == [116]


def test_a_schedule_of_optax_is_the_rate_itself() -> None:
    optimizer = build_optimizer("adamw", defaults, STEPS, schedule=optax.linear_schedule(0.0, 6e-4, 10))
    assert optimizer.rates(10)["lr"] == pytest.approx(6e-4)
    assert build_optimizer("adamw", defaults, STEPS, schedule=None).rates(0)["lr"] == pytest.approx(3e-4)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", pytest.param(optax.adam(1e-3), id="optax")])
def test_silent_parameters_do_not_follow_rounding_noise_at_step_0(name: Any) -> None:
    """Neither the first update nor any later one depends on it; all other parameters are as they would be."""
    params: dict[str, Any] = {"rho": jnp.ones(3), "block_0": {"query": small_params()["block_0"]["query"]}}
    real = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), params)

    def train(noise: float, silent: tuple[str, ...]) -> list[Any]:
        tx = build_optimizer(name, defaults, STEPS, silent=silent).tx
        made, state = [], tx.init(params)
        for step in range(3):
            given = {**real, "rho": jnp.full(3, noise)} if step == 0 else real
            updates, state = tx.update(given, state, params, step=jnp.int32(step))
            made.append(updates)
        return made

    one, other, plain = train(1e-8, ("rho",)), train(-2e-8, ("rho",)), train(1e-8, ())
    assert not np.any(one[0]["rho"]) and np.all(one[1]["rho"] != 0)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    jax.tree.map(np.testing.assert_array_equal, [u["block_0"] for u in one], [u["block_0"] for u in plain])
    assert np.all(plain[0]["rho"] != 0)


def test_unknown_names_and_groups() -> None:
    with pytest.raises(InputError, match="Did you mean 'muon'"):
        build_optimizer("muonn", defaults, STEPS)
    with pytest.raises(InputError, match="must be one of"):
        build_optimizer("adamw", defaults, STEPS, lambda path: "matricks").describe(small_params())


def test_settings_gather_for_every_pair() -> None:
    for optimizer in optimizers.names():
        for schedule in ("auto", "constant", "wsd", "cosine", "sgdr", "trapezoid", "rewarm"):
            schema = gather(*settings_classes(optimizer, schedule))
            assert "optimization/weight_decay" in schema.settings
    assert settings_classes(None, None) == ()
    keys = gather(*settings_classes("muon")).settings
    for word in ("matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr", "weight_decay", "adam_beta1", "preset"):
        assert f"optimization/{word}" in keys
    assert {"training/warmup_pct", "training/decay_pct", "optimization/warmdown_ratio"} <= set(keys)
