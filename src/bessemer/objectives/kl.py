"""Cross-entropy with a KL penalty for leaving the distribution of a frozen reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.losses.cross_entropy import target_weights
from bessemer.losses.divergence import ESTIMATORS, kl_regularized_loss
from bessemer.objectives import Apply, Batch, Sums, run_model
from bessemer.objectives.pretrain import NextTokenSettings, next_token_loss
from bessemer.registry import objectives


@dataclass(frozen=True)
class KLConfig(NextTokenSettings):
    """Settings of objective `kl`: the penalty of each stage for moving away from the frozen reference."""

    beta: tuple[float, ...] = field(
        "optimization/kl/beta",
        default=(0.1,),
        minimum=0.0,
        help="weight of the KL penalty, one per stage; a single one applies to all stages after the first (0 there)",
    )
    estimator: str = field(
        "optimization/kl/estimator",
        default="nll",
        choices=ESTIMATORS,
        help="exact: KL(policy ‖ reference); reverse: KL(reference ‖ policy); nll: difference of the losses",
    )
    refresh: tuple[bool, ...] = field(
        "optimization/kl/refresh",
        default=(False,),
        help="take a new reference when a stage begins, one value per stage; the first penalized one always does",
    )

    def __post_init__(self) -> None:
        """KLConfig(beta=0.2) is KLConfig(beta=(0.2,)), as optimization.kl.beta=0.2 is."""
        for name in ("beta", "refresh"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list | tuple) else (value,))


def compares(settings: KLConfig) -> bool:
    return any(beta > 0 for beta in settings.beta)


@objectives.register("kl", settings=(KLConfig,), reference=compares)
def kl(
    apply: Apply,
    params: Any,
    batch: Batch,
    key: Array | None,
    settings: KLConfig,
    reference: Any = None,
    beta: Array | float | None = None,
) -> Sums:
    """Σ_t w_t · [loss_t + β · D_t] with D by estimator:

        exact    Σ_v p (log p − log q)              KL(policy ‖ reference)
        reverse  Σ_v q (log q − log p)              KL(reference ‖ policy)
        nll      loss_t − stop_gradient(loss_t of the reference)

    p is the policy's distribution at the token, q the reference's (without dropout), loss as in `next_token_loss`. The
    gradient of `nll` is (1 + β)·∇loss, independent of the reference. Without a reference this is
    `next_token_loss`. β is the stage's; None: the only one of the settings. kl (exact) and kl_nll are always logged.
    Source: KL control, Jaques et al. 2017; exact sums instead of samples, as in distillation (Hinton et al. 2015).
    """
    if reference is None:
        return next_token_loss(apply, params, batch, key, settings)
    weight = only_beta(settings) if beta is None else beta
    policy = run_model(apply, params, batch, key, "projection")
    frozen = apply(jax.lax.stop_gradient(reference), batch, True, method="projection")
    w = target_weights(batch)
    sums = kl_regularized_loss(
        policy,
        frozen,
        batch["target_ids"],
        w,
        weight,
        estimator=settings.estimator,
        label_smoothing=settings.label_smoothing,
        z_loss=settings.z_loss,
    )
    logged = {"nll": sums.nll, "kl": sums.kl, "kl_nll": sums.kl_nll}
    if settings.estimator == "reverse":
        logged["kl_reverse"] = sums.reverse
    return sums.loss, jnp.sum(w), logged


def only_beta(settings: KLConfig) -> float:
    if len(settings.beta) > 1:
        raise InputError(
            "optimization.kl.beta has one weight per stage, which only job=KLDivergenceTrainer takes: set a single one."
        )
    return settings.beta[0]
