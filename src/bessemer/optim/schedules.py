"""The plain schedules: `constant`, `cosine`, and `sgdr` (cosine with warm restarts, Loshchilov & Hutter
2017).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.registry import schedules

# What a schedule is here: a pure function of the optimizer step that multiplies a peak learning rate.
#
# Schedules never count by themselves. They read the number of the step being taken (`TrainState.step`, from
# 0), so a skipped step moves the schedule on although the optimizer's moments stand still, and a resumed run
# is where it was.


StepFunction = Callable[[jax.typing.ArrayLike], jax.Array]
"""step (int scalar or array, traced or not) -> float32 of the same shape."""


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the multiplier of the peak rate; `decay_start` is where the final decay begins.

    Muon's momentum fades in that last part, so it has to know; `steps` says "nowhere". `corners` are the
    steps at which the shape changes: tests and plots look there.
    """

    multiplier: StepFunction
    steps: int
    decay_start: int
    corners: tuple[int, ...] = ()

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        return self.multiplier(step)


def check_steps(steps: int) -> int:
    """The horizon as an int of at least one step."""
    if steps < 1:
        raise InputError(
            f"a schedule needs at least one step, got {steps}; set training.steps or training.tokens."
        )
    return int(steps)


def share_of(share: float, steps: int) -> int:
    """round(share · steps): how many steps a share of the horizon is."""
    return round(share * steps)


def as_float(step: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(step).astype(jnp.float32)


def ramp_up(step: jax.Array, length: int) -> jax.Array:
    """(i+1)/W for i < W, then 1: never 0, so no step is wasted; W = 0 means no warmup."""
    return jnp.minimum((step + 1.0) / max(length, 1), 1.0)


def half_cosine(progress: jax.Array, floor: float) -> jax.Array:
    """From 1 at progress 0 to `floor` at 1: floor + (1 - floor)·(1 + cos πt)/2. Interpolated, not clipped."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def sample_schedule(schedule: StepFunction, steps: int, points: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """(steps, multipliers) at up to `points` evenly spaced steps, first and last included, for plots."""
    at = np.unique(np.linspace(0, check_steps(steps) - 1, min(points, steps)).round().astype(np.int32))
    return at, np.asarray(jax.jit(schedule)(jnp.asarray(at)))


LAST = 2**31 - 1
"""Steps are counted in 32 bits: a cycle that would end later is cut there, long after the run has ended."""


@dataclass(frozen=True)
class ConstantSettings:
    """A constant rate has nothing to set."""


@schedules.register("constant", settings=(ConstantSettings,))
def constant(settings: ConstantSettings, steps: int) -> Schedule:
    """1 at every step."""
    steps = check_steps(steps)
    return Schedule(lambda step: jnp.ones_like(as_float(step)), steps, steps)


@dataclass(frozen=True)
class CosineSettings:
    warmup_pct: float = field(
        "training/warmup_pct",
        default=0.01,
        minimum=0.0,
        maximum=1.0,
        help="share of the horizon spent warming up",
    )
    min_rate: float = field(
        "optimization/min_rate",
        default=0.1,
        minimum=0.0,
        maximum=1.0,
        help="share of the peak rate at the end",
    )


@schedules.register("cosine", settings=(CosineSettings,))
def cosine(settings: CosineSettings, steps: int) -> Schedule:
    """(i+1)/W for i < W; then from 1 at W along half a cosine to min_rate at N."""
    steps = check_steps(steps)
    warmup = share_of(settings.warmup_pct, steps)

    def multiplier(step: jax.typing.ArrayLike) -> jax.Array:
        i = as_float(step)
        progress = jnp.clip((i - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        return jnp.where(i < warmup, ramp_up(i, warmup), half_cosine(progress, settings.min_rate))

    return Schedule(multiplier, steps, warmup, (warmup, steps))


@dataclass(frozen=True)
class SgdrSettings(CosineSettings):
    first_cycle: float = field(
        "optimization/first_cycle",
        default=0.1,
        minimum=0.0,
        maximum=1.0,
        help="first cycle, as a share of the horizon",
    )
    t_mult: float = field(
        "optimization/t_mult",
        default=2.0,
        minimum=1.0,
        help="each cycle is this many times as long as the one before",
    )


@schedules.register("sgdr", settings=(SgdrSettings,))
def sgdr(settings: SgdrSettings, steps: int) -> Schedule:
    """Warmup as `cosine`; then cycles, each half a cosine from 1 towards min_rate, of length C, C·t, C·t², …

    The starts of the cycles are whole steps computed here once, so no floating-point logarithm decides at
    which step a restart happens.
    """
    steps = check_steps(steps)
    warmup = share_of(settings.warmup_pct, steps)
    first = max(1, share_of(settings.first_cycle, steps))
    starts = [warmup]
    while starts[-1] < steps and len(starts) <= steps:
        length = max(1, round(first * settings.t_mult ** (len(starts) - 1)))
        starts.append(min(starts[-1] + length, LAST))

    def multiplier(step: jax.typing.ArrayLike) -> jax.Array:
        i, edges = jnp.asarray(step), jnp.asarray(starts, jnp.int32)
        cycle = jnp.clip(jnp.searchsorted(edges, i, side="right") - 1, 0, max(len(starts) - 2, 0))
        start, end = edges[cycle], edges[jnp.minimum(cycle + 1, len(starts) - 1)]
        progress = jnp.clip((i - start) / jnp.maximum(end - start, 1), 0.0, 1.0)
        return jnp.where(i < warmup, ramp_up(as_float(i), warmup), half_cosine(progress, settings.min_rate))

    last = starts[-2] if len(starts) > 1 else steps
    return Schedule(multiplier, steps, last, tuple(start for start in starts if start < steps))
