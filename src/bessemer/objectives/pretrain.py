"""Pretraining: next-token cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax import Array

from bessemer.config import field
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
def pretrain(
    apply: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Array],
    key: Array | None,
    settings: PretrainSettings,
) -> tuple[Array, Array, dict[str, Array]]:
    """Σ_t w_t · [(1−ε)·(−log p(target_t)) + ε·mean_v(−log p(v)) + ζ·logsumexp²], its weight Σ w, and Σ w·nll.

    w is `loss_mask`, and 0 where the target is −1. Without a key (evaluation) there is no dropout. Sources: label
    smoothing, Szegedy et al. 2016; z-loss, de Brébisson and Vincent 2016, PaLM 2022.
    """
    return apply(
        params,
        batch,
        settings.label_smoothing,
        settings.z_loss,
        key is None,
        method="loss",
        rngs=None if key is None else {"dropout": key},
    )
