"""The preference losses, each a function of one pair's two answers: (B, P) from (B, P, 2) log-probabilities.

With r_w, r_l the log-ratios log π(y)/π_ref(y), Δ = r_w − r_l, n the tokens of an answer, m the mean log π per token:

| name | per pair | source |
|---|---|---|
| sigmoid | −(1−ε)·log σ(βΔ) − ε·log σ(−βΔ) | DPO, Rafailov 2023; ε: Mitchell 2023 |
| robust | [−(1−ε)·log σ(βΔ) + ε·log σ(−βΔ)] / (1 − 2ε) | Ray Chowdhury 2024 |
| hinge | max(0, 1 − βΔ) | SLiC, Zhao 2023; RSO, Liu 2023 |
| ipo | (r_w/n_w − r_l/n_l − 1/(2β))² | IPO, Azar 2023, per token as its authors ran it |
| kto | ½[1 − σ(β(r_w − z))] + ½[1 − σ(β(z − r_l))] | KTO, Ethayarajh 2024 |
| apo_zero | 1 − σ(βr_w) + σ(βr_l) | APO, D'Oosterlinck 2024 |
| apo_down | σ(βr_w) + 1 − σ(βΔ) | APO |
| simpo | −log σ(β(m_w − m_l) − γ), smoothed as sigmoid | SimPO, Meng 2024 |
| cpo | −log σ(β(log π(y_w) − log π(y_l))), smoothed as sigmoid, + SFT | CPO, Xu 2024 |
| orpo | −β·log σ(log odds(y_w) − log odds(y_l)), odds = p/(1−p), p = exp m, + SFT | ORPO, Hong 2024 |

KTO's z is the mean log-ratio of all answers of the row, at least 0 and without gradient. A row is what is never split,
so z, and with it the loss, does not depend on micro-batches or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import log_sigmoid, relu, sigmoid

if TYPE_CHECKING:
    from bessemer.objectives.dpo import DpoSettings


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
