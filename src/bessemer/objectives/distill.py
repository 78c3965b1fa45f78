"""Distillation: a student learns from a teacher's distribution over the next token, on given text or on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array

from bessemer.config import field
from bessemer.losses.cross_entropy import target_weights
from bessemer.losses.distillation import TopTokens, distillation_loss
from bessemer.objectives import Apply, Batch, Sums, run_model
from bessemer.objectives.grpo import TOKENS, SampledSettings
from bessemer.registry import objectives

TOP_IDS, TOP_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Columns of a batch that holds a stored teacher, (B, T, K) each."""


@dataclass(frozen=True)
class TaughtSettings:
    """Settings of every objective with the trait `teacher`."""

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
        help="weight of the teacher's loss; the data's has 1 − α",
    )
    temperature: float = field(
        "distill/temperature", default=2.0, minimum=0.01, help="τ: both distributions are softened by it"
    )
    top_k: int = field(
        "distill/top_k",
        default=0,
        minimum=0,
        help="store the teacher's k most likely tokens before training, and train without it; 0: live",
    )
    tail: str = field(
        "distill/tail",
        default="bucket",
        choices=("bucket", "renormalize"),
        help="probability beyond the stored tokens: one outcome of its own, or left out",
    )


@objectives.register("distill", settings=(DistillSettings,), teacher=True, rate_share=1.0)
def distill(
    apply: Apply,
    params: Any,
    batch: Batch,
    key: Array | None,
    settings: DistillSettings,
    reference: Any = None,
    teacher: Apply | None = None,
) -> Sums:
    """Σ w·[α·τ²·KL(p_τ ‖ q_τ) + (1−α)·(−log q(target))], Σ w, and the sums of KL and nll.

    p is the teacher's distribution, q the student's, both at temperature τ in the first term; τ² keeps its gradient as
    large as that of the second whatever τ is. `teacher` applies the teacher to its parameters `reference`; without it
    the batch holds what was stored of it. Source: Hinton, Vinyals and Dean 2015.
    """
    student = run_model(apply, params, batch, key, "projection")
    if teacher is None:
        against: Any = TopTokens(batch[TOP_IDS], batch[TOP_LOGPROBS])
    else:
        against = teacher(reference, batch, method="projection")
    weights = target_weights(batch)
    loss, kl, nll = distillation_loss(
        student,
        against,
        batch["target_ids"],
        weights,
        alpha=settings.alpha,
        temperature=settings.temperature,
        renormalize=settings.tail == "renormalize",
    )
    return loss, weights.sum(), {"kl": kl, "nll": nll}


@dataclass(frozen=True)
class OnPolicySettings(SampledSettings, TaughtSettings):
    direction: str = field(
        "distill/direction",
        default="reverse",
        choices=("reverse", "forward"),
        help="reverse: KL(student ‖ teacher), mode-seeking; forward: KL(teacher ‖ student), mode-covering",
    )
    soften: float = field(
        "distill/temperature",
        default=1.0,
        minimum=0.01,
        help="τ: both distributions are softened by it in the divergence; sampling has grpo.temperature",
    )
    top_k: ClassVar[int] = 0  # live: what the student will write cannot be stored beforehand


@objectives.register(
    "on-policy-distill",
    settings=(OnPolicySettings,),
    teacher=True,
    rollouts=True,
    chat=True,
    own_validation=True,
    rate_share=1.0,
)
def on_policy_distill(
    apply: Apply,
    params: Any,
    batch: Batch,
    key: Array | None,
    settings: OnPolicySettings,
    reference: Any = None,
    teacher: Apply | None = None,
) -> Sums:
    """Σ w·τ²·D, Σ w, and sums of D (`kl`) and of the student's nll of its own tokens.

    D = KL(student ‖ teacher) (reverse) or KL(teacher ‖ student) (forward) over the whole vocabulary, at every token
    of a completion. The student samples the completions (rl/sampler.py); they are data to the gradient, which goes
    through its distributions alone. batch, (B, T) each: input_ids, target_ids, loss_mask (w: 1 on completion tokens and
    the end). Sources: Agarwal et al. 2023 (GKD, arXiv 2306.13649, with every batch on-policy), Lu et al. 2025.
    """
    assert teacher is not None, "found before training begins"
    student = run_model(apply, params, batch, key, "projection")
    against = teacher(reference, batch, method="projection")
    weights = target_weights(batch)
    loss, kl, nll = distillation_loss(
        student,
        against,
        batch["target_ids"],
        weights,
        alpha=1.0,
        temperature=settings.soften,
        reverse=settings.direction == "reverse",
    )
    return loss, weights.sum(), {TOKENS: weights.sum(), "kl": kl, "nll": nll}
