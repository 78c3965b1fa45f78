"""Which steps are bad, decided inside the compiled step, and what is said about them.

A step is bad when its loss or gradient is not finite, or, with guard.spike_sigma > 0, when its loss spikes:

    loss > m + sigma · sqrt(v)

m and v are running mean and variance of the accepted losses: over the first `window` of them exactly, then with
weight 1/window for the newest. Nothing is a spike before `window` losses were accepted, nor until then again after a
stage of other data began. The statistics are part of the state, so a resumed run judges as the undisturbed one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bessemer.errors import TrainingError
from bessemer.training.settings import GuardSettings

Statistics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class SpikeRule:
    """What the compiled step must know. `stages`: data steps at which other data begins."""

    sigma: float
    window: int
    skip: bool
    stages: tuple[int, ...] = ()


def spike_rule(settings: GuardSettings, stages: Sequence[int] = ()) -> SpikeRule | None:
    """None with guard.spike_sigma=0: nothing is added to the step or to the state.

    `rollback` leaves the update out too: what is saved or shown before the spike is read is never poisoned.
    """
    if settings.spike_sigma == 0:
        return None
    skip = settings.spike_action != "warn"
    return SpikeRule(settings.spike_sigma, settings.spike_window, skip, tuple(stages))


def fresh_statistics() -> Statistics:
    return {
        "mean": jnp.zeros((), jnp.float32),
        "variance": jnp.zeros((), jnp.float32),
        "count": jnp.zeros((), jnp.int32),
        "stage": jnp.zeros((), jnp.int32),
    }


def judge(
    rule: SpikeRule | None, statistics: Statistics | None, loss: jax.Array, finite: jax.Array, data_step: Any
) -> tuple[jax.Array, Statistics | None, dict[str, jax.Array]]:
    """(is the update applied, the statistics after this step, what the log will want to read).

    All of it is a pure function of replicated scalars: every process decides the same at the same step.
    """
    if rule is None or statistics is None:
        return finite, None, {}
    stage = jnp.sum(data_step >= jnp.asarray(rule.stages, jnp.int32), dtype=jnp.int32)
    count = jnp.where(stage == statistics["stage"], statistics["count"], 0)
    mean, variance = statistics["mean"], statistics["variance"]
    limit = jnp.where(count >= rule.window, mean + rule.sigma * jnp.sqrt(variance), jnp.inf)
    spike = finite & (loss > limit)
    applied = finite & ~spike if rule.skip else finite
    weight = 1.0 / jnp.minimum(count + 1, rule.window)
    distance = loss - mean
    learned = {
        "mean": mean + weight * distance,
        "variance": (1 - weight) * (variance + weight * distance**2),
        "count": jnp.minimum(count + 1, rule.window),
    }
    known = {"mean": mean, "variance": variance, "count": count}
    after = {name: jnp.where(applied, learned[name], known[name]) for name in known}
    return applied, {**after, "stage": stage}, {"spike": spike, "spike_limit": limit}


WEIGHTS_FINITE = "weights_finite"
"""In a step's meta: whether the weights after the step are finite. A finite loss and gradient do not promise it (an
update can overflow), and the damage need not show in the next loss: a token's embedding matters when it occurs."""


def all_finite(tree: Any) -> jax.Array:
    """Return whether no floating-point leaf holds NaN or infinity, as one replicated scalar."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all() if leaves else jnp.ones((), bool)


class Unstable(TrainingError):
    """The run must not go on from `step` as it is. `rows` are the reports of the steps before it."""

    def __init__(self, step: int, what: str, rows: Sequence[dict[str, Any]] = ()):
        self.step = step
        self.rows = list(rows)
        super().__init__(what)


def final_problem(non_finite_steps: int, validation: float | None) -> str | None:
    """Return why a final model with finite weights must not be called done, or None.

    Weights can be finite and so large that computing with them overflows. The final validation (its loss or reward;
    None: there was none) decides; without one, so does the last step.
    """
    if validation is not None:
        return None if math.isfinite(validation) else f"the final validation gave {validation}"
    if non_finite_steps == 0:
        return None
    steps = "step" if non_finite_steps == 1 else f"{non_finite_steps} steps"
    return f"the last {steps} had no finite loss and gradient, and there is no validation to judge the weights by"


def described(loss: float, finite: bool, limit: float | None) -> str:
    """What is wrong with a bad step's loss, to go after "the loss is"."""
    if math.isnan(loss):
        return "not a number"
    if math.isinf(loss):
        return "infinite"
    if not finite:
        return f"{loss:.5g}, but its gradient is not finite"
    return f"{loss:.5g}, a spike above {limit:.5g} (guard.spike_sigma)"
