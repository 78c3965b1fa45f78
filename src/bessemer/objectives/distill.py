"""Distillation: a student learns from a teacher's distribution over the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax import Array

from bessemer.config import field
from bessemer.losses.cross_entropy import target_weights
from bessemer.losses.distillation import TopTokens, distillation_loss
from bessemer.registry import objectives

TOP_IDS, TOP_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Columns of a batch that holds a stored teacher, (B, T, K) each."""


@dataclass(frozen=True)
class TaughtSettings:
    """What every objective with the trait `teacher` says."""

    teacher: str | None = field(
        "distill/teacher", default=None, help="the run to learn from; of any depth and width, same tokenizer"
    )


@dataclass(frozen=True)
class DistillSettings(TaughtSettings):
    alpha: float = field(
        "distill/alpha",
        default=0.5,
        minimum=0.0,
        maximum=1.0,
        help="share of the teacher; 1 − α is of the data",
    )
    temperature: float = field(
        "distill/temperature", default=2.0, minimum=0.01, help="τ: both distributions are softened by it"
    )
    top_k: int = field(
        "distill/top_k",
        default=0,
        minimum=0,
        help="store the teacher's k likeliest tokens before training, and train without it; 0: live",
    )
    tail: str = field(
        "distill/tail",
        default="bucket",
        choices=("bucket", "renormalise"),
        help="probability beyond the stored tokens: one outcome of its own, or left out",
    )


@objectives.register("distill", settings=(DistillSettings,), teacher=True, rate_share=1.0)
def distill(
    apply: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Array],
    key: Array | None,
    settings: DistillSettings,
    reference: Any = None,
    teacher: Callable[..., Any] | None = None,
) -> tuple[Array, Array, dict[str, Array]]:
    """Σ w·[α·τ²·KL(p_τ ‖ q_τ) + (1−α)·(−log q(target))], Σ w, and the sums of KL and nll.

    p is the teacher's distribution, q the student's, both at temperature τ in the first term; τ² keeps its gradient as
    large as that of the second whatever τ is. `teacher` applies the teacher to its parameters `reference`; without it
    the batch holds what was stored of it. Source: Hinton, Vinyals and Dean 2015.
    """
    rngs = None if key is None else {"dropout": key}
    student = apply(params, batch, key is None, method="projection", rngs=rngs)
    against = (
        TopTokens(batch[TOP_IDS], batch[TOP_LOGPROBS])
        if teacher is None
        else teacher(reference, batch, method="projection")
    )
    weights = target_weights(batch)
    loss, kl, nll = distillation_loss(
        student,
        against,
        batch["target_ids"],
        weights,
        alpha=settings.alpha,
        temperature=settings.temperature,
        renormalise=settings.tail == "renormalise",
    )
    return loss, weights.sum(), {"kl": kl, "nll": nll}
