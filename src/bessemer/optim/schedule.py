"""What a schedule is here: a pure function of the optimizer step that multiplies a peak learning rate.

Schedules never count by themselves. They read the number of the step being taken (`TrainState.step`, from 0),
so a skipped step moves the schedule on although the optimizer's moments stand still, and a resumed run is
where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.errors import InputError

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
    corners: tuple[int, ...] = field(default=())

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
