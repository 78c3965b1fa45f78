"""Schedules: pure functions of the optimizer step that multiply a peak learning rate.

They never count: they read the number of the step being taken (`TrainState.step`, from 0). So a skipped step moves the
schedule on although the optimizer's moments stand still, and a resumed run is where it was. Muon's is in muon.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.registry import schedules

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
    """Return the horizon as an int of at least one step."""
    if steps < 1:
        raise InputError(f"a schedule needs at least one step, got {steps}; set training.steps or training.tokens.")
    return int(steps)


def as_float(step: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(step).astype(jnp.float32)


def ramp_up(step: jax.Array, length: int) -> jax.Array:
    """(i+1)/W for i < W, then 1: never 0, so no step is wasted; W = 0 means no warmup."""
    return jnp.minimum((step + 1.0) / max(length, 1), 1.0)


def half_cosine(progress: jax.Array, floor: float) -> jax.Array:
    """From 1 at progress 0 to `floor` at 1: floor + (1 - floor)·(1 + cos πt)/2. Interpolated, not clipped."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


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
class WarmupSettings:
    warmup_pct: float = field(
        "training/warmup_pct", default=0.01, minimum=0.0, maximum=1.0, help="share of the horizon spent warming up"
    )


@dataclass(frozen=True)
class CosineSettings(WarmupSettings):
    min_rate: float = field(
        "optimization/min_rate", default=0.1, minimum=0.0, maximum=1.0, help="share of the peak rate at the end"
    )


@schedules.register("cosine", settings=(CosineSettings,))
def cosine(settings: CosineSettings, steps: int) -> Schedule:
    """(i+1)/W for i < W; then from 1 at W along half a cosine to min_rate at N."""
    steps = check_steps(steps)
    warmup = round(settings.warmup_pct * steps)

    def multiplier(step: jax.typing.ArrayLike) -> jax.Array:
        i = as_float(step)
        progress = jnp.clip((i - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        return jnp.where(i < warmup, ramp_up(i, warmup), half_cosine(progress, settings.min_rate))

    return Schedule(multiplier, steps, warmup, (warmup, steps))


@dataclass(frozen=True)
class SgdrSettings(CosineSettings):
    first_cycle: float = field(
        "optimization/first_cycle", default=0.1, minimum=0.0, maximum=1.0, help="first cycle, as a share of the horizon"
    )
    t_mult: float = field(
        "optimization/t_mult", default=2.0, minimum=1.0, help="each cycle is this many times as long as the one before"
    )


@schedules.register("sgdr", settings=(SgdrSettings,))
def sgdr(settings: SgdrSettings, steps: int) -> Schedule:
    """Warmup as `cosine`; then cycles, each half a cosine from 1 toward min_rate, of length C, C·t, C·t², …

    The starts of the cycles are whole steps computed here once, so no floating-point logarithm decides at
    which step a restart happens.
    """
    steps = check_steps(steps)
    warmup = round(settings.warmup_pct * steps)
    first = max(1, round(settings.first_cycle * steps))
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


FLOOR = 0.01
"""Warmup starts and decay ends at this share of the peak."""

SHAPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda t: 1.0 - (1.0 - FLOOR) * t,
    "cosine": lambda t: half_cosine(t, FLOOR),
    "sqrt": lambda t: 1.0 - (1.0 - FLOOR) * jnp.sqrt(t),
}
"""From 1 at t = 0 to FLOOR at t = 1; "sqrt" is the 1 - sqrt(t) decay."""


@dataclass(frozen=True)
class WsdSettings(WarmupSettings):
    decay_pct: float = field(
        "training/decay_pct", default=0.1, minimum=0.0, maximum=1.0, help="share of the horizon spent decaying"
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
    warmup = round(settings.warmup_pct * steps)
    return warmup, min(round(settings.decay_pct * steps), steps - warmup)


def _shape(i: jax.Array, steps: int, warmup: int, decay: int, shape: str) -> jax.Array:
    """FLOOR→1 over [0, W], 1 until N-D, then down to FLOOR at N. i: float step within the stage."""
    up = FLOOR + (1.0 - FLOOR) * jnp.minimum(i / max(warmup, 1), 1.0)
    down = SHAPES[shape](jnp.clip((i - (steps - decay)) / max(decay, 1), 0.0, 1.0))
    return jnp.where(i < warmup, up, down)


@schedules.register("wsd", settings=(WsdSettings,))
def wsd(settings: WsdSettings, steps: int) -> Schedule:
    """Linear from .01 to 1 over warmup_pct, flat, then down to .01 over decay_pct (linear, cosine or 1 - sqrt)."""
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
    """`wsd` over each stage on its own, times the stage's peak. boundaries: first step of each stage, from 0."""
    steps = check_steps(steps)
    starts = [int(start) for start in boundaries]
    edges = [*starts, steps]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise InputError(f"stage boundaries {starts} must start at 0 and increase below the {steps} steps of the run.")
    if not settings.stage_peaks:
        raise InputError("optimization.stage_peaks is empty; give one peak per stage, or [1.0].")
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

    corners = [start + at for start, n, (w, d) in zip(starts, lengths, parts, strict=True) for at in (0, w, n - d)]
    return Schedule(multiplier, steps, steps - parts[-1][1], (*corners, steps))
