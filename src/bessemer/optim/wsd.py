"""`wsd` (warmup, stable, decay) and `rewarm`, the same shape once per stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.optim.schedules import Schedule, as_float, check_steps, half_cosine, share_of
from bessemer.registry import schedules

FLOOR = 0.01
"""Warmup starts and decay ends at this share of the peak."""

SHAPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda t: 1.0 - (1.0 - FLOOR) * t,
    "cosine": lambda t: half_cosine(t, FLOOR),
    "sqrt": lambda t: 1.0 - (1.0 - FLOOR) * jnp.sqrt(t),
}
"""From 1 at t = 0 to FLOOR at t = 1; "sqrt" is the 1 - sqrt(t) decay."""


@dataclass(frozen=True)
class WsdSettings:
    warmup_pct: float = field(
        "training/warmup_pct",
        default=0.01,
        minimum=0.0,
        maximum=1.0,
        help="share of the horizon spent warming up",
    )
    decay_pct: float = field(
        "training/decay_pct",
        default=0.1,
        minimum=0.0,
        maximum=1.0,
        help="share of the horizon spent decaying",
    )
    decay_shape: str = field(
        "optimization/decay_shape", default="linear", choices=tuple(SHAPES), help="shape of the final decay"
    )


def _parts(settings: WsdSettings, steps: int) -> tuple[int, int]:
    """(warmup steps, decay steps) within `steps`; shares that overlap are an error."""
    if settings.warmup_pct + settings.decay_pct > 1.0:
        raise InputError(
            f"training.warmup_pct={settings.warmup_pct} and training.decay_pct={settings.decay_pct} are "
            "together more than the whole horizon; make their sum at most 1."
        )
    warmup = share_of(settings.warmup_pct, steps)
    return warmup, min(share_of(settings.decay_pct, steps), steps - warmup)


def _shape(i: jax.Array, steps: int, warmup: int, decay: int, shape: str) -> jax.Array:
    """FLOOR→1 over [0, W], 1 until N-D, then down to FLOOR at N. i: float step within the stage."""
    up = FLOOR + (1.0 - FLOOR) * jnp.minimum(i / max(warmup, 1), 1.0)
    down = SHAPES[shape](jnp.clip((i - (steps - decay)) / max(decay, 1), 0.0, 1.0))
    return jnp.where(i < warmup, up, down)


@schedules.register("wsd", settings=(WsdSettings,))
def wsd(settings: WsdSettings, steps: int) -> Schedule:
    """Linear from .01 to 1 over warmup_pct, flat, then down to .01 over decay_pct (linear, cosine or 1 -
    sqrt)."""
    steps = check_steps(steps)
    warmup, decay = _parts(settings, steps)
    return Schedule(
        lambda step: _shape(as_float(step), steps, warmup, decay, settings.decay_shape),
        steps,
        steps - decay,
        (warmup, steps - decay, steps),
    )


@dataclass(frozen=True)
class RewarmSettings(WsdSettings):
    stage_peaks: tuple[float, ...] = field(
        "optimization/stage_peaks",
        default=(1.0,),
        minimum=0.0,
        help="peak of each stage as a share of the peak rate; the last one holds for the stages after it",
    )


@schedules.register("rewarm", settings=(RewarmSettings,))
def rewarm(settings: RewarmSettings, steps: int, boundaries: Sequence[int] = (0,)) -> Schedule:
    """`wsd` over each stage on its own, times the stage's peak. boundaries: first step of each stage, from
    0."""
    steps = check_steps(steps)
    starts = [int(start) for start in boundaries]
    edges = [*starts, steps]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise InputError(
            f"stage boundaries {starts} must start at 0 and increase below the {steps} steps of the run."
        )
    if not settings.stage_peaks:
        raise InputError("optimization.stage_peaks is empty; give one peak a stage, or [1.0].")
    peaks = [settings.stage_peaks[min(k, len(settings.stage_peaks) - 1)] for k in range(len(starts))]
    lengths = [end - start for start, end in pairwise(edges)]
    parts = [_parts(settings, length) for length in lengths]

    def multiplier(step: jax.typing.ArrayLike) -> jax.Array:
        i = as_float(step)
        value = jnp.zeros_like(i)
        for start, length, (warmup, decay), peak in zip(starts, lengths, parts, peaks, strict=True):
            stage = peak * _shape(i - start, length, warmup, decay, settings.decay_shape)
            value = jnp.where(i >= start, stage, value)
        return value

    corners = [
        start + at for start, n, (w, d) in zip(starts, lengths, parts, strict=True) for at in (0, w, n - d)
    ]
    return Schedule(multiplier, steps, steps - parts[-1][1], (*corners, steps))
