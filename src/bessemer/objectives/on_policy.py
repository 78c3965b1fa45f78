"""On-policy distillation: the teacher grades what the student writes itself, token by token.

    L = Σ_t τ²·D_t / tokens,     D_t =  reverse  KL(student ‖ teacher)     at every token t of a completion,
                                        forward  KL(teacher ‖ student)     prompts and padding apart

over the whole vocabulary. The completions are sampled from the student as it is (rl/sampler.py) and are data to
the gradient, which goes through the student's distributions alone. So the student is taught where it goes, not where
a text went. Sources: Agarwal et al. 2023 (GKD, arXiv 2306.13649, with every batch on-policy), Lu et al. 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array

from bessemer.config import field
from bessemer.losses.cross_entropy import target_weights
from bessemer.losses.distillation import distillation_loss
from bessemer.objectives.distill import TaughtSettings
from bessemer.objectives.grpo import TOKENS, SampledSettings
from bessemer.registry import objectives


@dataclass(frozen=True)
class OnPolicySettings(SampledSettings, TaughtSettings):
    direction: str = field(
        "distill/direction",
        default="reverse",
        choices=("reverse", "forward"),
        help="reverse: KL(student ‖ teacher), one good way is enough; forward: KL(teacher ‖ student), all of them",
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
    apply: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Array],
    key: Array | None,
    settings: OnPolicySettings,
    reference: Any = None,
    teacher: Callable[..., Any] | None = None,
) -> tuple[Array, Array, dict[str, Array]]:
    """(Σ w·τ²·D, Σ w, sums) of the module's formula; `kl` is D, `nll` that of the student for its own tokens.

    batch, (B, T) each: input_ids, target_ids, loss_mask (w: 1 on completion tokens and their end).
    """
    assert teacher is not None, "found before training begins"
    rngs = None if key is None else {"dropout": key}
    student = apply(params, batch, key is None, method="projection", rngs=rngs)
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
