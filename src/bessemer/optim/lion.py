"""Lion (Chen et al. 2023): the sign of an interpolated momentum; half of Adam's memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import optax

from bessemer.config import field
from bessemer.optim.schedules import Schedule
from bessemer.optim.transform import GroupOf, MatrixDecay, apply_rate, in_float32, is_decayed
from bessemer.registry import optimizers


@dataclass(frozen=True)
class LionSettings(MatrixDecay):
    """Every coordinate moves by the full rate: so a smaller rate than Adam's, and more decay."""

    lr: float = field("optimization/lr", default=1e-4, minimum=0.0, help="peak learning rate")
    weight_decay: float = field(
        "optimization/weight_decay", default=0.1, minimum=0.0, help="decoupled decay, on matrices only"
    )
    beta1: float = field(
        "optimization/beta1", default=0.9, minimum=0.0, below=1.0, help="weight of the momentum"
    )
    beta2: float = field(
        "optimization/beta2", default=0.99, minimum=0.0, below=1.0, help="decay of the momentum"
    )

    def betas(self) -> tuple[float, ...]:
        return (self.beta1, self.beta2)


@optimizers.register("lion", settings=(LionSettings,))
def lion(
    settings: LionSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None
) -> optax.GradientTransformationExtraArgs:
    """p -= lr·(sign(β1·m + (1-β1)·g) + wd·p), then m ← β2·m + (1-β2)·g."""
    return in_float32(
        optax.chain(
            optax.scale_by_lion(settings.beta1, settings.beta2),
            apply_rate(
                lambda step: settings.lr * schedule(step),
                settings.weight_decay,
                partial(is_decayed, group_of=group_of),
            ),
        )
    )
