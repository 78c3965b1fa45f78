"""What else changes with the step under Muon: its momentum and the weight decay of the matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from bessemer.optim.schedule import Schedule, StepFunction, as_float

if TYPE_CHECKING:
    from bessemer.optim.muon_settings import MuonSettings


def momentum_schedule(settings: MuonSettings, schedule: Schedule, steps: int) -> StepFunction:
    """start → peak over the first steps (0 steps: peak from the start); to the final value over the schedule's decay.

    In a run so short that both overlap the smaller of the two holds, so the momentum never jumps.
    """
    start, peak, ramp, final = settings.momentum_values()
    fade = max(steps - schedule.decay_start, 1)

    def momentum(step: jax.typing.ArrayLike) -> jax.Array:
        i = as_float(step)
        risen = jnp.minimum(i / ramp, 1.0) if ramp else 1.0
        up = start + (peak - start) * risen
        down = peak + (final - peak) * jnp.clip((i - schedule.decay_start) / fade, 0.0, 1.0)
        return jnp.minimum(up, down)

    return momentum


def decay_schedule(settings: MuonSettings, steps: int) -> StepFunction:
    """Weight decay of the matrices, from its full value at step 0 to 0 at N: linear, or half a cosine."""
    wd, shape = settings.decay_values()

    def weight_decay(step: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.clip(as_float(step) / steps, 0.0, 1.0)
        return wd * (1.0 - progress if shape == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))

    return weight_decay
