"""Adafactor (Shazeer & Stern 2018): the second moment of a matrix as a row and a column."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import optax

from bessemer.config import field
from bessemer.optim.schedules import Schedule
from bessemer.optim.transform import GroupOf, MatrixDecay, apply_rate, in_float32, is_decayed
from bessemer.registry import optimizers


@dataclass(frozen=True)
class AdafactorSettings(MatrixDecay):
    """The update is scaled by each tensor's own root mean square, so the rate is a relative one."""

    lr: float = field("optimization/lr", default=1e-2, minimum=0.0, help="peak learning rate, relative")
    weight_decay: float = field(
        "optimization/weight_decay", default=0.0, minimum=0.0, help="decoupled decay, on matrices only"
    )
    decay_rate: float = field(
        "optimization/decay_rate",
        default=0.8,
        minimum=0.0,
        maximum=1.0,
        help="β2 at update t is 1 - t^-decay_rate",
    )
    clip: float = field(
        "optimization/clip", default=1.0, above=0.0, help="largest root mean square of an update"
    )
    factor_from: int = field(
        "optimization/factor_from",
        default=128,
        minimum=1,
        help="matrices with both sides at least this are factored",
    )


@optimizers.register("adafactor", settings=(AdafactorSettings,))
def adafactor(
    settings: AdafactorSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None
) -> optax.GradientTransformationExtraArgs:
    """Factored rms scaling → clip each tensor's rms → times the parameter's rms (≥ 1e-3) → rate and decay."""
    return in_float32(
        optax.chain(
            optax.scale_by_factored_rms(
                decay_rate=settings.decay_rate, min_dim_size_to_factor=settings.factor_from
            ),
            optax.clip_by_block_rms(settings.clip),
            optax.scale_by_param_block_rms(),
            apply_rate(
                lambda step: settings.lr * schedule(step),
                settings.weight_decay,
                partial(is_decayed, group_of=group_of),
            ),
        )
    )
