"""AdamW, Lion, SGD and Adafactor: one learning rate for all parameters, weight decay on matrices only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import optax

from bessemer.config import field
from bessemer.optim.schedules import Schedule
from bessemer.optim.state import STATE_DTYPE_HELP, STATE_DTYPES, store_moments
from bessemer.optim.transform import CAUTIOUS_HELP, Group, GroupOf, apply_rate, in_float32, is_decayed
from bessemer.registry import optimizers


def _decay(default: float) -> float:
    return field("optimization/weight_decay", default=default, minimum=0.0, help="decoupled decay, on matrices only")


@dataclass(frozen=True)
class MatrixDecay:
    """Settings of an optimizer with one rate for all parameters and decay on matrices only."""

    default_schedule: ClassVar[str] = "wsd"
    lr: float = field("optimization/lr", default=3e-4, minimum=0.0, help="peak learning rate")
    weight_decay: float = _decay(0.01)
    cautious: str = field(
        "optimization/cautious",
        default="none",
        choices=("none", "matrices"),
        help=CAUTIOUS_HELP + "of matrices or none",
    )

    def betas(self) -> tuple[float, ...]:
        return ()

    def groups(self, width: int | None = None) -> tuple[Group, ...]:
        return (Group("matrices", self.lr, self.weight_decay, self.betas()), Group("rest", self.lr, 0.0, self.betas()))

    def label(self, path: tuple[str, ...], leaf: Any, group_of: GroupOf | None) -> str:
        return "matrices" if is_decayed(path, leaf, group_of) else "rest"

    def chain(
        self, schedule: Schedule, group_of: GroupOf | None, *parts: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Return `parts`, then the scheduled rate and the decay, all in float32."""
        rate = apply_rate(
            lambda step: self.lr * schedule(step),
            self.weight_decay,
            partial(is_decayed, group_of=group_of),
            cautious=self.cautious == "matrices",
        )
        return in_float32(optax.chain(*parts, rate))


@dataclass(frozen=True)
class AdamWSettings(MatrixDecay):
    beta1: float = field("optimization/beta1", default=0.9, minimum=0.0, below=1.0, help="decay of the mean")
    beta2: float = field("optimization/beta2", default=0.95, minimum=0.0, below=1.0, help="decay of the square")
    eps: float = field("optimization/eps", default=1e-8, minimum=0.0, help="added to the root of the square")
    state_dtype: str = field("optimization/state_dtype", default="float32", choices=STATE_DTYPES, help=STATE_DTYPE_HELP)

    def betas(self) -> tuple[float, ...]:
        return (self.beta1, self.beta2)


@optimizers.register("adamw", settings=(AdamWSettings,))
def adamw(
    settings: AdamWSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """p -= lr·(m̂ / (√v̂ + ε) + wd·p) (Loshchilov & Hutter 2019). Bias correction counts only updates made."""
    adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)
    return settings.chain(schedule, group_of, store_moments(adam, settings.state_dtype, seed, "mu", "nu"))


@dataclass(frozen=True)
class LionSettings(MatrixDecay):
    """Lion moves every coordinate by the full rate, so it needs a smaller rate than Adam, and more decay."""

    lr: float = field("optimization/lr", default=1e-4, minimum=0.0, help="peak learning rate")
    weight_decay: float = _decay(0.1)
    beta1: float = field("optimization/beta1", default=0.9, minimum=0.0, below=1.0, help="weight of the momentum")
    beta2: float = field("optimization/beta2", default=0.99, minimum=0.0, below=1.0, help="decay of the momentum")
    state_dtype: str = field("optimization/state_dtype", default="float32", choices=STATE_DTYPES, help=STATE_DTYPE_HELP)

    def betas(self) -> tuple[float, ...]:
        return (self.beta1, self.beta2)


@optimizers.register("lion", settings=(LionSettings,))
def lion(
    settings: LionSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """p -= lr·(sign(β1·m + (1-β1)·g) + wd·p), then m ← β2·m + (1-β2)·g (Chen et al. 2023). Half of Adam's memory."""
    sign = optax.scale_by_lion(settings.beta1, settings.beta2)
    return settings.chain(schedule, group_of, store_moments(sign, settings.state_dtype, seed, "mu"))


@dataclass(frozen=True)
class SgdSettings(MatrixDecay):
    lr: float = field("optimization/lr", default=0.1, minimum=0.0, help="peak learning rate")
    weight_decay: float = _decay(0.0)
    momentum: float = field("optimization/momentum", default=0.9, minimum=0.0, below=1.0, help="decay of the sum")
    nesterov: bool = field("optimization/nesterov", default=False, help="look one step ahead")
    state_dtype: str = field("optimization/state_dtype", default="float32", choices=STATE_DTYPES, help=STATE_DTYPE_HELP)

    def betas(self) -> tuple[float, ...]:
        return (self.momentum,)


@optimizers.register("sgd", settings=(SgdSettings,))
def sgd(
    settings: SgdSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """m ← μ·m + g; p -= lr·(m + wd·p). Momentum 0 keeps no state."""
    if not settings.momentum:
        return settings.chain(schedule, group_of, optax.identity())
    trace = optax.trace(settings.momentum, settings.nesterov)
    return settings.chain(schedule, group_of, store_moments(trace, settings.state_dtype, seed, "trace"))


@dataclass(frozen=True)
class AdafactorSettings(MatrixDecay):
    """The update is scaled by each tensor's own root mean square, so the rate is a relative one."""

    lr: float = field("optimization/lr", default=1e-2, minimum=0.0, help="peak learning rate, relative")
    weight_decay: float = _decay(0.0)
    decay_rate: float = field(
        "optimization/decay_rate", default=0.8, minimum=0.0, maximum=1.0, help="β2 at update t is 1 - t^-decay_rate"
    )
    clip: float = field("optimization/clip", default=1.0, above=0.0, help="largest root mean square of an update")
    factor_from: int = field(
        "optimization/factor_from", default=128, minimum=1, help="matrices with both sides at least this are factored"
    )


@optimizers.register("adafactor", settings=(AdafactorSettings,))
def adafactor(
    settings: AdafactorSettings, schedule: Schedule, steps: int, group_of: GroupOf | None = None
) -> optax.GradientTransformationExtraArgs:
    """Factored rms scaling → clip each tensor's rms → times the parameter's rms (≥ 1e-3) → rate and decay.

    The second moment of a matrix is kept as a row and a column (Shazeer & Stern 2018).
    """
    return settings.chain(
        schedule,
        group_of,
        optax.scale_by_factored_rms(decay_rate=settings.decay_rate, min_dim_size_to_factor=settings.factor_from),
        optax.clip_by_block_rms(settings.clip),
        optax.scale_by_param_block_rms(),
    )
