"""AdamW (Loshchilov & Hutter 2019) with decay on matrices only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import optax

from bessemer.config import field
from bessemer.optim.schedules import Schedule
from bessemer.optim.transform import GroupOf, MatrixDecay, apply_rate, in_float32, is_decayed
from bessemer.registry import optimizers


@dataclass(frozen=True)
class AdamWSettings(MatrixDecay):
    lr: float = field("optimization/lr", default=3e-4, minimum=0.0, help="peak learning rate")
    weight_decay: float = field(
        "optimization/weight_decay", default=0.01, minimum=0.0, help="decoupled decay, on matrices only"
    )
    beta1: float = field("optimization/beta1", default=0.9, minimum=0.0, below=1.0, help="decay of the mean")
    beta2: float = field(
        "optimization/beta2", default=0.95, minimum=0.0, below=1.0, help="decay of the square"
    )
    eps: float = field("optimization/eps", default=1e-8, minimum=0.0, help="added to the root of the square")

    def betas(self) -> tuple[float, ...]:
        return (self.beta1, self.beta2)


@optimizers.register("adamw", settings=(AdamWSettings,))
def adamw(
    settings: AdamWSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None
) -> optax.GradientTransformationExtraArgs:
    """p -= lr·(m̂ / (√v̂ + ε) + wd·p). Bias correction counts updates made: a skipped step is none."""
    return in_float32(
        optax.chain(
            optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps),
            apply_rate(
                lambda step: settings.lr * schedule(step),
                settings.weight_decay,
                partial(is_decayed, group_of=group_of),
            ),
        )
    )
