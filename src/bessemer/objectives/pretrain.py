"""Pretraining: next-token cross-entropy, and of tokens further ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.losses.cross_entropy import PROGRESS, weights_at
from bessemer.objectives import Apply, Batch, Sums
from bessemer.registry import objectives


@dataclass(frozen=True)
class NextTokenSettings:
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


@dataclass(frozen=True)
class PretrainSettings(NextTokenSettings):
    mtp: tuple[float, ...] = field(
        "training/mtp",
        default=(),
        minimum=0.0,
        help="multi-token prediction: weights at step 0 of the losses of the second token ahead, the third, …",
    )
    mtp_decay: float = field(
        "training/mtp_decay",
        default=1.0,
        above=0.0,
        maximum=1.0,
        help="share of the steps after which the weights of training.mtp have fallen to 0",
    )

    def __post_init__(self) -> None:
        if not self.mtp and self.mtp_decay != 1:
            raise InputError("training.mtp_decay has no effect without weights in training.mtp; leave it out.")

    @property
    def follows_progress(self) -> bool:
        return bool(self.mtp)


@objectives.register("pretrain", aliases=("seq",), settings=(PretrainSettings,))
def pretrain(apply: Apply, params: Any, batch: Batch, key: Array | None, settings: PretrainSettings) -> Sums:
    """`next_token_loss`, to which `mtp` adds the losses of further tokens while training, with weights that fall to 0
    (`losses/cross_entropy.py`; Gloeckle et al. 2024). Their mean nll, weights left out, is `further_nll`.
    """
    if not settings.mtp or key is None:
        return next_token_loss(apply, params, batch, key, settings)
    weights = weights_at(settings.mtp, settings.mtp_decay, batch[PROGRESS])
    return next_token_loss(apply, params, batch, key, settings, further=weights)


def next_token_loss(
    apply: Apply, params: Any, batch: Batch, key: Array | None, settings: NextTokenSettings, **more: Any
) -> Sums:
    """Σ_t w_t · [(1−ε)·(−log p(target_t)) + ε·mean_v(−log p(v)) + ζ·logsumexp²], its weight Σ w, and Σ w·nll.

    w is `loss_mask`, and 0 where the target is −1. Sources: label smoothing, Szegedy et al. 2016; z-loss,
    de Brébisson and Vincent 2016, PaLM 2022.
    """
    rngs = None if key is None else {"dropout": key}
    return apply(
        params, batch, settings.label_smoothing, settings.z_loss, key is None, method="loss", rngs=rngs, **more
    )
