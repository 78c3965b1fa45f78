"""The plain schedules: `constant`, `cosine`, and `sgdr` (cosine with warm restarts, Loshchilov & Hutter
2017)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bessemer.config import field
from bessemer.optim.schedule import Schedule, as_float, check_steps, half_cosine, ramp_up, share_of
from bessemer.registry import schedules

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
