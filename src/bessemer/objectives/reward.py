"""A reward model: learn one number for an answer, such that the chosen one of a pair gets the larger.

    L = −log σ(r_w − r_l − margin)     per pair, mean over pairs

r is the value head's output at the last token of an answer, in float32. `reward/center` adds c·(r_w + r_l)², which
keeps rewards around 0: the loss alone knows only differences. Sources: Bradley and Terry 1952; Ouyang et al. 2022;
margin, Touvron et al. 2023; centring, Eisenstein et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.data.rows.rows import DatasetStyle
from bessemer.objectives.pairs import by_response, real_pairs
from bessemer.registry import objectives


@dataclass(frozen=True)
class RewardSettings:
    margin: float = field(
        "reward/margin",
        default=0.0,
        minimum=0.0,
        help="by how much the chosen answer's reward must be larger",
    )
    center: float = field(
        "reward/center", default=0.0, minimum=0.0, help="c: weight of (r_w + r_l)²; 0.01 is usual"
    )


@objectives.register(
    "reward",
    settings=(RewardSettings,),
    own_validation=True,
    style=DatasetStyle.CONTRASTIVE,
    document_mask=True,
    rate_share=0.5,
)
def reward(
    apply: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Array],
    key: Array | None,
    settings: RewardSettings,
) -> tuple[Array, Array, dict[str, Array]]:
    """Σ over pairs of L, the number of pairs, and Σ over pairs of what is logged. The model is one with `values`."""
    rngs = None if key is None else {"dropout": key}
    values = apply(params, batch, key is None, method="values", rngs=rngs)  # (B, T)
    rewards = by_response(batch, jnp.where(last_of_response(batch), values, 0.0))  # (B, P, 2)
    real, margin = real_pairs(batch), rewards[..., 0] - rewards[..., 1]
    loss = -jax.nn.log_sigmoid(margin - settings.margin) + settings.center * rewards.sum(-1) ** 2
    logged = {
        "margin": margin,
        "pref_acc": (margin > 0).astype(jnp.float32),
        "reward/chosen": rewards[..., 0],
        "reward/rejected": rewards[..., 1],
    }
    sums = {name: jax.lax.stop_gradient((real * value).sum()) for name, value in logged.items()}
    return (real * loss).sum(), real.sum(), sums


def last_of_response(batch: Mapping[str, Array]) -> Array:
    """(B, T) bool: the position after which another segment begins."""
    segments = batch["segment_ids"]
    following = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return (segments > 0) & (segments != following)
