"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import optax

from bessemer.config import field
from bessemer.optim.schedules import Schedule
from bessemer.optim.transform import GroupOf, MatrixDecay, apply_rate, in_float32, is_decayed
from bessemer.registry import optimizers


@dataclass(frozen=True)
class SgdSettings(MatrixDecay):
    lr: float = field("optimization/lr", default=0.1, minimum=0.0, help="peak learning rate")
    weight_decay: float = field(
        "optimization/weight_decay", default=0.0, minimum=0.0, help="decoupled decay, on matrices only"
    )
    momentum: float = field(
        "optimization/momentum", default=0.9, minimum=0.0, below=1.0, help="decay of the sum"
    )
    nesterov: bool = field("optimization/nesterov", default=False, help="look one step ahead")

    def betas(self) -> tuple[float, ...]:
        return (self.momentum,)


@optimizers.register("sgd", settings=(SgdSettings,))
def sgd(
    settings: SgdSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None
) -> optax.GradientTransformationExtraArgs:
    """m ← μ·m + g; p -= lr·(m + wd·p). Momentum 0 keeps no state."""
    trace = optax.trace(settings.momentum, settings.nesterov) if settings.momentum else optax.identity()
    return in_float32(
        optax.chain(
            trace,
            apply_rate(
                lambda step: settings.lr * schedule(step),
                settings.weight_decay,
                partial(is_decayed, group_of=group_of),
            ),
        )
    )
