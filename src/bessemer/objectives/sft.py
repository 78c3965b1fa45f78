"""Supervised fine-tuning: cross-entropy of the assistant's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array

from bessemer.config import field
from bessemer.data.rows.rows import DatasetStyle
from bessemer.objectives import Apply, Batch, Sums
from bessemer.registry import objectives


@dataclass(frozen=True)
class SftSettings:
    neftune_alpha: float = field(
        "sft/neftune_alpha",
        default=0.0,
        minimum=0.0,
        help="α of NEFTune: noise on the embeddings while training, uniform in ±α/√(T·D); 0 = off, 5 is usual",
    )


@objectives.register(
    "sft",
    settings=(SftSettings,),
    style=DatasetStyle.PACKED,
    document_mask=True,
    chat=True,
    rate_share=1.0,
    own_epochs=2,
)
def sft(apply: Apply, params: Any, batch: Batch, key: Array | None, settings: SftSettings) -> Sums:
    """Σ_t w_t · (−log p(target_t)), its weight Σ w, and Σ w·nll.

    w is `loss_mask`, and 0 where the target is below 0 (−1 here, −100 elsewhere): prompts, tool outputs and padding
    weigh nothing, also in the denominator, which is the number of supervised tokens of the whole global batch. With α
    the embeddings get ε ~ U(−1, 1)·α/√(T·D), never in evaluation (no key). Source of the noise: NEFTune, Jain et al.
    2023, arXiv 2310.05914.
    """
    if key is None:
        return apply(params, batch, method="loss")
    noise = {"embedding_noise": settings.neftune_alpha} if settings.neftune_alpha > 0 else {}
    return apply(params, batch, deterministic=False, method="loss", rngs={"dropout": key}, **noise)
