"""Every schedule at its corners, against the formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import InputError
from bessemer.optim import Schedule, build_schedule
from bessemer.optim.muon import TrapezoidSettings, trapezoid
from bessemer.optim.schedules import (
    ConstantSettings,
    CosineSettings,
    RewarmSettings,
    SgdrSettings,
    WsdSettings,
    constant,
    cosine,
    rewarm,
    sgdr,
    wsd,
)
from bessemer.registry import schedules


def values(schedule: Schedule, *steps: int) -> list[float]:
    return [float(x) for x in schedule(np.array(steps, np.int32))]


def test_all_are_registered_and_jit_with_a_traced_step() -> None:
    assert schedules.names() == ["constant", "cosine", "rewarm", "sgdr", "trapezoid", "wsd"]
    for name in schedules.names():
        schedule = build_schedule(name, lambda cls: cls(), 50)
        traced = jax.jit(schedule)
        for i in (0, 1, 25, 49, 50):
            out = traced(jnp.int32(i))
            assert out.dtype == jnp.float32 and 0.0 <= float(out) <= 1.0
        assert traced._cache_size() == 1


def test_constant() -> None:
    assert values(constant(ConstantSettings(), 10), 0, 5, 10) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.505), ("cosine", 0.505), ("sqrt", 1 - 0.99 * math.sqrt(0.5))]
)
def test_wsd(shape: str, middle: float) -> None:
    schedule = wsd(WsdSettings(warmup_pct=0.1, decay_pct=0.2, decay_shape=shape), 100)
    assert schedule.decay_start == 80
    got = values(schedule, 0, 5, 10, 50, 80, 90, 100, 110)
    np.testing.assert_allclose(got, [0.01, 0.505, 1, 1, 1, middle, 0.01, 0.01], rtol=1e-6)


def test_wsd_without_warmup_or_decay_and_overlap() -> None:
    assert values(wsd(WsdSettings(warmup_pct=0.0, decay_pct=0.0), 10), 0, 9, 10) == [1.0, 1.0, 1.0]
    with pytest.raises(InputError, match="sum at most 1"):
        wsd(WsdSettings(warmup_pct=0.6, decay_pct=0.5), 10)


def test_cosine_is_interpolated_not_floored() -> None:
    schedule = cosine(CosineSettings(warmup_pct=0.1, min_rate=0.1), 100)
    got = values(schedule, 0, 8, 9, 10, 55, 100, 120)
    np.testing.assert_allclose(got, [0.1, 0.9, 1, 1, 0.55, 0.1, 0.1], rtol=1e-5)
    late = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 85 / 90))
    np.testing.assert_allclose(values(schedule, 95), [late], rtol=1e-5)


def test_sgdr_restarts_at_whole_steps() -> None:
    schedule = sgdr(SgdrSettings(warmup_pct=0.0, min_rate=0.1, first_cycle=0.1, t_mult=2.0), 100)
    assert schedule.corners == (0, 10, 30, 70)
    got = values(schedule, 0, 5, 10, 20, 30, 50, 70)
    np.testing.assert_allclose(got, [1, 0.55, 1, 0.55, 1, 0.55, 1], rtol=1e-5)
    assert values(schedule, 9)[0] < 0.15
    long = sgdr(SgdrSettings(warmup_pct=0.0, first_cycle=0.1, t_mult=1e300), 1000)  # no step is so late
    assert float(long(99)) < 0.11 and float(long(999)) == pytest.approx(1.0)
    equal = sgdr(SgdrSettings(warmup_pct=0.02, first_cycle=0.1, t_mult=1.0), 100)
    assert equal.corners == tuple(range(2, 100, 10))
    np.testing.assert_allclose(values(equal, 0, 1, 2, 12), [0.5, 1, 1, 1], rtol=1e-6)


def nanochat_trapezoid(i: int, n: int, warmup: float, warmdown: float, final: float) -> float:
    w, d = round(warmup * n), round(warmdown * n)
    if i < w:
        return (i + 1) / w
    if i <= n - d:
        return 1.0
    p = (n - i) / d
    return p + (1 - p) * final


@settings(max_examples=30)
@given(
    n=st.integers(1, 400),
    warmup=st.sampled_from([0.0, 0.03, 0.25]),
    warmdown=st.sampled_from([0.0, 0.2, 0.5]),
    final=st.sampled_from([0.0, 0.05]),
)
def test_trapezoid_is_the_formula(n: int, warmup: float, warmdown: float, final: float) -> None:
    schedule = trapezoid(TrapezoidSettings(warmup_ratio=warmup, warmdown_ratio=warmdown, final_lr_frac=final), n)
    expected = [nanochat_trapezoid(i, n, warmup, warmdown, final) for i in range(n + 1)]
    got = np.asarray(schedule(np.arange(401, dtype=np.int32)))  # one shape: the operations compile once
    np.testing.assert_allclose(got[: n + 1], expected, atol=1e-6)


def test_trapezoid_defaults_preset_and_precedence() -> None:
    assert values(trapezoid(TrapezoidSettings(), 100), 0, 50, 75, 100) == [1.0, 1.0, 0.5, 0.0]
    july = trapezoid(TrapezoidSettings(preset="july2026"), 1000)
    assert july.corners == (40, 350, 1000)
    np.testing.assert_allclose(values(july, 0, 39, 350, 675, 1000), [1 / 40, 1, 1, 0.525, 0.05], rtol=1e-6)
    assert TrapezoidSettings(warmup_pct=0.2, decay_pct=0.1).parts(100) == (20, 10, 0.0)
    both = TrapezoidSettings(warmup_steps=7, warmup_ratio=0.1, warmup_pct=0.2, warmdown_ratio=0.3, decay_pct=0.1)
    assert both.parts(100) == (7, 30, 0.0)


def test_rewarm_warms_up_in_every_stage() -> None:
    stages = RewarmSettings(warmup_pct=0.1, decay_pct=0.1, stage_peaks=(1.0, 0.5))
    schedule = rewarm(stages, 200, boundaries=(0, 100))
    got = values(schedule, 0, 10, 90, 100, 110, 190, 200)
    np.testing.assert_allclose(got, [0.01, 1, 1, 0.005, 0.5, 0.5, 0.005], rtol=1e-6)
    np.testing.assert_allclose(values(rewarm(RewarmSettings(), 100), 0, 50, 100), [0.01, 1, 0.01], rtol=1e-6)
    assert build_schedule("rewarm", lambda cls: cls(), 100, boundaries=(0, 40)).corners[3] == 40
    for bad in ((), (5,), (0, 100, 100), (0, 300)):
        with pytest.raises(InputError, match="boundaries"):
            rewarm(stages, 200, boundaries=bad)


def test_optax_schedule_gives_the_rate_itself() -> None:
    schedule = build_schedule(lambda step: 0.004 * step, lambda cls: cls(), 10, peak=0.02)
    assert values(schedule, 5) == pytest.approx([1.0])
    assert build_schedule(None, lambda cls: cls(), 10)(3) == 1.0
    with pytest.raises(InputError, match="unknown schedule 'wsb'"):
        build_schedule("wsb", lambda cls: cls(), 10)
    with pytest.raises(InputError, match="at least one step"):
        build_schedule("wsd", lambda cls: cls(), 0)


def test_trapezoid_starts_at_the_peak_and_ends_near_zero() -> None:
    multipliers = trapezoid(TrapezoidSettings(), 1000)(jnp.array([0, 999]))
    assert multipliers[0] == 1.0 and multipliers[1] == pytest.approx(0.002)
