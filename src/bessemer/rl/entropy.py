"""A target for the policy's entropy (grpo.entropy_target): the coefficient of the bonus follows it, step by step.

    c ← clip(c + rate · (target − H), 0, most)        H: mean entropy over the trained tokens of the step

It is computed inside the compiled step, and what was added to grpo.entropy_coef is part of the train state, so a
resumed run continues with the same bits. A step whose loss or gradient is not finite leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from bessemer.config import Config, dotted
from bessemer.errors import InputError
from bessemer.objectives.grpo import GrpoSettings, SampledSettings
from bessemer.training.state import TrainState


class EntropyState(TrainState):
    """entropy_offset: added to grpo.entropy_coef so far."""

    entropy_offset: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.float32))

    def against(self) -> dict[str, Any]:
        return {**super().against(), "entropy_offset": self.entropy_offset}


def follow_target(step: Callable[..., Any], policy: GrpoSettings, state: EntropyState, *args: Any, **named: Any) -> Any:
    """Return what the training step `step` does, and move the coefficient, which the metrics show as it was used."""
    offset, target = state.entropy_offset, policy.entropy_target
    assert target is not None
    new, loss, meta = step(state, *args, **named)
    entropy, used = meta["entropy"], policy.entropy_coef + offset
    moved = jnp.clip(used + policy.entropy_rate * (target - entropy), 0.0, policy.entropy_coef_max)
    known = meta["finite"] & jnp.isfinite(entropy)
    new = new.replace(entropy_offset=jnp.where(known, moved - policy.entropy_coef, offset))
    return new, loss, {**meta, "entropy_coef": used}


def check_entropy(policy: SampledSettings, config: Config) -> None:
    """Raise InputError for settings that contradict each other or have no effect."""
    if not isinstance(policy, GrpoSettings):
        return
    if policy.entropy_target is None:
        for key in ("grpo/entropy_rate", "grpo/entropy_coef_max"):
            if config.is_set(key):
                raise InputError(f"{dotted(key)} adapts the coefficient to grpo.entropy_target: set that too.")
    elif policy.entropy_coef > policy.entropy_coef_max:
        raise InputError(
            f"grpo.entropy_coef={policy.entropy_coef:g} is above grpo.entropy_coef_max={policy.entropy_coef_max:g}, "
            "the most that grpo.entropy_target may lead to: lower the one or raise the other."
        )
