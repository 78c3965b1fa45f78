"""Objectives over pairs of answers: the DPO family, which needs no reward model, and the reward model.

    dpo     L = −log σ(β·Δ),   Δ = [log π(y_w) − log π_ref(y_w)] − [log π(y_l) − log π_ref(y_l)]
    reward  L = −log σ(r_w − r_l − margin)

per pair, then the mean over pairs. log π(y) sums the log-probabilities of the answer's tokens alone, in float32; r is
the value head's output at the answer's last token. DPO is by Rafailov et al. 2023; its relatives change the function of
the two answers, never what it is averaged over. `dpo/sft_alpha` adds −α·log π(y_w)/|y_w| per pair (Pang et al. 2024).
`reward/center` adds c·(r_w + r_l)², which keeps rewards around 0, as the loss alone knows only differences. Sources:
Bradley and Terry 1952; Ouyang et al. 2022; margin, Touvron et al. 2023; centering, Eisenstein et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import log_sigmoid, relu, sigmoid

from bessemer.config import field
from bessemer.data.rows.rows import DatasetStyle
from bessemer.errors import InputError
from bessemer.losses.cross_entropy import target_weights
from bessemer.objectives import Apply, Batch, Sums, run_model
from bessemer.registry import objectives

# -- sums over the responses of CONTRASTIVE rows (data/rows/build.py) ---------------------------------------------


def real_pairs(batch: Batch) -> Array:
    """(B, P) float32: 1 where the row has a pair."""
    if "pair_ids" not in batch:
        raise InputError(
            "this objective compares answers, so its rows must hold pairs: use preference data in the style "
            "CONTRASTIVE, as in training.dataset=pairs.jsonl:CONTRASTIVE."
        )
    return (batch["pair_ids"] >= 0).astype(jnp.float32)


def by_response(batch: Batch, values: Array) -> Array:
    """Σ of values (B, T) over each response: (B, P, 2), chosen and rejected. Plain sums, so that they are repeatable
    on every device, which scattered additions are not."""
    rows, pairs = batch["pair_ids"].shape
    segments = jnp.arange(1, 2 * pairs + 1, dtype=jnp.int32)
    mine = batch["segment_ids"][:, :, None] == segments  # (B, T, 2P)
    return jnp.where(mine, values[:, :, None], 0.0).sum(axis=1).reshape(rows, pairs, 2)


def answer_tokens(batch: Batch) -> Array:
    """Tokens of each answer, (B, P, 2)."""
    return by_response(batch, target_weights(batch))


def answer_logps(apply: Apply, params: Any, batch: Batch, key: Array | None = None) -> Array:
    """log p(answer | prompt) = Σ log p(token) over the tokens of each answer, (B, P, 2) in float32."""
    logps = run_model(apply, params, batch, key, "token_logprobs")
    return by_response(batch, logps.astype(jnp.float32) * target_weights(batch))


def margins(rewards: Array) -> dict[str, Array]:
    """Metrics of rewards (B, P, 2), each (B, P)."""
    margin = rewards[..., 0] - rewards[..., 1]
    return {
        "margin": margin,
        "pref_acc": (margin > 0).astype(jnp.float32),
        "reward/chosen": rewards[..., 0],
        "reward/rejected": rewards[..., 1],
    }


def over_pairs(real: Array, loss: Array, metrics: dict[str, Array]) -> Sums:
    """Return the sums over real pairs. real, loss, metrics: (B, P) each."""
    sums = {name: jax.lax.stop_gradient((real * value).sum()) for name, value in metrics.items()}
    return (real * loss).sum(), real.sum(), sums


# -- the DPO family: (B, P) from the log-probabilities (B, P, 2) of both answers ---------------------------------------
#
# With r_w, r_l the log-ratios log π(y)/π_ref(y), Δ = r_w − r_l, n the tokens of an answer, m the mean log π
# per token:
#
# | name | per pair | source |
# |---|---|---|
# | sigmoid | −(1−ε)·log σ(βΔ) − ε·log σ(−βΔ) | DPO, Rafailov 2023; ε: Mitchell 2023 |
# | robust | [−(1−ε)·log σ(βΔ) + ε·log σ(−βΔ)] / (1 − 2ε) | Ray Chowdhury 2024 |
# | hinge | max(0, 1 − βΔ) | SLiC, Zhao 2023; RSO, Liu 2023 |
# | ipo | (r_w/n_w − r_l/n_l − 1/(2β))² | IPO, Azar 2023, per token as its authors ran it |
# | kto | ½[1 − σ(β(r_w − z))] + ½[1 − σ(β(z − r_l))] | KTO, Ethayarajh 2024 |
# | apo_zero | 1 − σ(βr_w) + σ(βr_l) | APO, D'Oosterlinck 2024 |
# | apo_down | σ(βr_w) + 1 − σ(βΔ) | APO |
# | simpo | −log σ(β(m_w − m_l) − γ), smoothed as sigmoid | SimPO, Meng 2024 |
# | cpo | −log σ(β(log π(y_w) − log π(y_l))), smoothed as sigmoid, + SFT | CPO, Xu 2024 |
# | orpo | −β·log σ(log odds(y_w) − log odds(y_l)), odds = p/(1−p), p = exp m, + SFT | ORPO, Hong 2024 |
#
# KTO's z is the mean log-ratio of all answers of the row, at least 0 and without gradient. A row is what is
# never split, so z, and with it the loss, does not depend on micro-batches or devices.


class Answers(NamedTuple):
    """Both answers of every pair, chosen then rejected in the last axis. Where `real` is 0 there is no pair."""

    logps: Array  # (B, P, 2) log π(y)
    reference: Array | None  # (B, P, 2) log π_ref(y)
    tokens: Array  # (B, P, 2)
    real: Array  # (B, P)

    @property
    def ratios(self) -> Array:
        """log π(y)/π_ref(y); log π(y) itself without a reference."""
        return self.logps if self.reference is None else self.logps - self.reference

    @property
    def delta(self) -> Array:
        ratios = self.ratios
        return ratios[..., 0] - ratios[..., 1]

    @property
    def mean_logps(self) -> Array:
        return self.per_token(self.logps)

    def per_token(self, values: Array) -> Array:
        return values / jnp.maximum(self.tokens, 1.0)


def _smoothed(logit: Array, epsilon: float) -> Array:
    return -(1 - epsilon) * log_sigmoid(logit) - epsilon * log_sigmoid(-logit)


def _sigmoid(answers: Answers, s: DpoSettings) -> Array:
    return _smoothed(s.beta * answers.delta, s.label_smoothing)


def _robust(answers: Answers, s: DpoSettings) -> Array:
    logit, epsilon = s.beta * answers.delta, s.label_smoothing
    return (-(1 - epsilon) * log_sigmoid(logit) + epsilon * log_sigmoid(-logit)) / (1 - 2 * epsilon)


def _hinge(answers: Answers, s: DpoSettings) -> Array:
    return relu(1 - s.beta * answers.delta)


def _ipo(answers: Answers, s: DpoSettings) -> Array:
    ratios = answers.per_token(answers.ratios)
    return (ratios[..., 0] - ratios[..., 1] - 1 / (2 * s.beta)) ** 2


def _kto(answers: Answers, s: DpoSettings) -> Array:
    ratios, real = answers.ratios, answers.real[..., None]
    mean = (real * ratios).sum((1, 2)) / jnp.maximum(2 * real.sum((1, 2)), 1.0)
    z = jax.lax.stop_gradient(relu(mean))[:, None]
    return 0.5 * (sigmoid(-s.beta * (ratios[..., 0] - z)) + sigmoid(-s.beta * (z - ratios[..., 1])))


def _apo_zero(answers: Answers, s: DpoSettings) -> Array:
    ratios = s.beta * answers.ratios
    return sigmoid(-ratios[..., 0]) + sigmoid(ratios[..., 1])


def _apo_down(answers: Answers, s: DpoSettings) -> Array:
    return sigmoid(s.beta * answers.ratios[..., 0]) + sigmoid(-s.beta * answers.delta)


def _simpo(answers: Answers, s: DpoSettings) -> Array:
    means = answers.mean_logps
    return _smoothed(s.beta * (means[..., 0] - means[..., 1]) - s.gamma, s.label_smoothing)


def _orpo(answers: Answers, s: DpoSettings) -> Array:
    means = jnp.minimum(answers.mean_logps, -1e-6)  # an answer of probability 1 has no odds
    log_odds = means - jnp.log(-jnp.expm1(means))
    return -s.beta * log_sigmoid(log_odds[..., 0] - log_odds[..., 1])


LOSSES: dict[str, Callable[[Answers, DpoSettings], Array]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "simpo": _simpo,
    "orpo": _orpo,
    "cpo": _sigmoid,  # without a reference the ratios are the log-probabilities
    "kto": _kto,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
REFERENCE_FREE = ("simpo", "orpo", "cpo")
WITH_SFT = ("cpo", "orpo")
SMOOTHED = ("sigmoid", "robust", "simpo", "cpo")


@dataclass(frozen=True)
class DpoSettings:
    loss: str = field(
        "dpo/loss", default="sigmoid", choices=tuple(LOSSES), help="member of the family; sigmoid is DPO itself"
    )
    beta: float = field(
        "dpo/beta", default=0.1, above=0, help="β: how far a preference may move the policy; larger keeps it closer"
    )
    label_smoothing: float = field(
        "dpo/label_smoothing",
        default=0.0,
        minimum=0.0,
        maximum=0.5,
        help=f"ε: share of pairs labeled the wrong way around ({', '.join(SMOOTHED)})",
    )
    gamma: float = field("dpo/gamma", default=0.5, minimum=0.0, help="γ: target margin of simpo")
    sft_alpha: float | None = field(
        "dpo/sft_alpha",
        default=None,
        minimum=0.0,
        help="α: weight of the chosen answers' likelihood; none: 1 for cpo and orpo, 0 for the others",
    )
    reference: str = field(
        "dpo/reference",
        default="cached",
        choices=("cached", "live"),
        help="log π_ref: computed once and kept on disk, or by frozen weights at every step",
    )

    def __post_init__(self) -> None:
        if self.beta <= 0:  # a loss called from Python has seen no configuration
            raise InputError(f"dpo.beta is {self.beta}; it must be above 0.")
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise InputError(
                f"dpo.label_smoothing is used by {', '.join(SMOOTHED)}, and dpo.loss is {self.loss}: leave it at 0."
            )
        if self.loss == "robust" and self.label_smoothing >= 0.5:
            raise InputError("dpo.loss=robust needs dpo.label_smoothing below 0.5: at 0.5 labels say nothing.")

    @property
    def compares(self) -> bool:
        """Whether the loss looks at a reference at all."""
        return self.loss not in REFERENCE_FREE

    @property
    def alpha(self) -> float:
        return float(self.loss in WITH_SFT) if self.sft_alpha is None else self.sft_alpha


@objectives.register(
    "dpo",
    settings=(DpoSettings,),
    own_validation=True,
    style=DatasetStyle.CONTRASTIVE,
    document_mask=True,
    chat=True,
    rate_share=1 / 15,  # Tülu 3 8B: 5e-7 for DPO, 5e-6 for SFT (arXiv:2411.15124)
    reference=lambda settings: settings.compares and settings.reference == "live",
    reference_logps=lambda settings: settings.compares and settings.reference == "cached",
)
def dpo(
    apply: Apply, params: Any, batch: Batch, key: Array | None, settings: DpoSettings, reference: Any = None
) -> Sums:
    """Σ over pairs of L, the number of pairs, and Σ over pairs of what is logged.

    log π_ref: `reference_logps` (B, P, 2) of the batch, or of the weights `reference`. Without a key (evaluation)
    there is no dropout; the reference never has any.
    """
    real = real_pairs(batch)
    against = reference_of(apply, batch, settings, reference)
    answers = Answers(answer_logps(apply, params, batch, key), against, answer_tokens(batch), real)
    loss = LOSSES[settings.loss](answers, settings)
    metrics = logged(answers, settings)
    if settings.alpha:
        likelihood = -answers.mean_logps[..., 0]
        loss = loss + settings.alpha * likelihood
        metrics["sft_loss"] = likelihood
    return over_pairs(real, loss, metrics)


def reference_of(apply: Apply, batch: Batch, settings: DpoSettings, reference: Any) -> Array | None:
    """log π_ref of each answer, (B, P, 2); None for a loss that has no reference."""
    if not settings.compares:
        return None
    if "reference_logps" in batch:
        return batch["reference_logps"]
    assert reference is not None, "dpo.reference=live: the step brings the reference weights"
    return jax.lax.stop_gradient(answer_logps(apply, reference, batch))


def logged(answers: Answers, settings: DpoSettings) -> dict[str, Array]:
    """Per pair (B, P). A reward is β·log π/π_ref; β·log π without a reference (per token where the loss is)."""
    rewards = settings.beta * (answers.mean_logps if settings.loss in ("simpo", "orpo") else answers.ratios)
    return {**margins(rewards), "logps/chosen": answers.logps[..., 0], "logps/rejected": answers.logps[..., 1]}


# -- the reward model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardSettings:
    margin: float = field(
        "reward/margin", default=0.0, minimum=0.0, help="by how much the chosen answer's reward must be larger"
    )
    center: float = field("reward/center", default=0.0, minimum=0.0, help="c: weight of (r_w + r_l)²; 0.01 is usual")


@objectives.register(
    "reward",
    settings=(RewardSettings,),
    own_validation=True,
    style=DatasetStyle.CONTRASTIVE,
    document_mask=True,
    rate_share=0.5,
)
def reward(apply: Apply, params: Any, batch: Batch, key: Array | None, settings: RewardSettings) -> Sums:
    """Σ over pairs of L, the number of pairs, and Σ over pairs of what is logged. The model is one with `values`."""
    values = run_model(apply, params, batch, key, "values")  # (B, T)
    rewards = by_response(batch, jnp.where(last_of_response(batch), values, 0.0))  # (B, P, 2)
    real, margin = real_pairs(batch), rewards[..., 0] - rewards[..., 1]
    loss = -log_sigmoid(margin - settings.margin) + settings.center * rewards.sum(-1) ** 2
    return over_pairs(real, loss, margins(rewards))


def last_of_response(batch: Batch) -> Array:
    """(B, T) bool: the position after which another segment begins."""
    segments = batch["segment_ids"]
    following = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return (segments > 0) & (segments != following)
