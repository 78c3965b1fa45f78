"""Pretraining: next-token cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array

from bessemer.config import field
from bessemer.objectives.base import Apply, Batch, Sums
from bessemer.registry import objectives


@dataclass(frozen=True)
class PretrainSettings:
    label_smoothing: float = field(
        "training/label_smoothing",
        default=0.0,
        minimum=0.0,
        below=1.0,
        help="ε: the target keeps 1 − ε, every token gets ε / vocabulary",
    )
    z_loss: float = field(
        "training/z_loss", default=0.0, minimum=0.0, help="ζ: adds ζ · logsumexp², which keeps logits near 0"
    )


@objectives.register("pretrain", aliases=("seq",), settings=(PretrainSettings,))
def pretrain(apply: Apply, params: Any, batch: Batch, key: Array | None, settings: PretrainSettings) -> Sums:
    """Σ_t w_t · [(1−ε)·(−log p(target_t)) + ε·mean_v(−log p(v)) + ζ·logsumexp²], its weight Σ w, and Σ w·nll.

    w is `loss_mask`, and 0 where the target is −1. Sources: label smoothing, Szegedy et al. 2016; z-loss,
    de Brébisson and Vincent 2016, PaLM 2022.
    """
    rngs = None if key is None else {"dropout": key}
    return apply(params, batch, settings.label_smoothing, settings.z_loss, key is None, method="loss", rngs=rngs)
