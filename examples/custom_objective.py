"""An objective of your own: cross-entropy that ignores the tokens the model finds least likely.

    bessemer train quickstart plugins=[examples/custom_objective.py] objective=truncated --name truncated

Texts from the web hold tokens that nobody could predict: serial numbers, typing errors, another language. Their
gradients are large and teach little. This objective leaves out every target with p < drop_below (loss truncation,
Kang and Hashimoto 2020); 0 is the usual loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

import bessemer as bm
from bessemer.registry import objectives


@dataclass(frozen=True)
class TruncatedSettings:
    """Settings are declared where they are used; `bessemer config` shows them, and a misspelled one is an error."""

    drop_below: float = bm.field(
        "training/drop_below", default=1e-4, minimum=0, below=1, help="targets less likely than this do not count"
    )


@objectives.register("truncated", settings=(TruncatedSettings,))
def truncated(apply, params, batch, key, settings):
    """Return (Σ w·k·(−log p), Σ w·k, further sums), with k = 1 where p ≥ drop_below.

    An objective returns sums over the tokens of one micro-batch, never a mean: Bessemer divides once, over the global
    batch, so that accumulation and the number of devices do not change the update.
    """
    rngs = None if key is None else {"dropout": key}
    logprobs = apply(params, batch, key is None, method="token_logprobs", rngs=rngs)  # (B, T)
    weights = jnp.where(batch["target_ids"] < 0, 0.0, batch["loss_mask"])
    floor = math.log(settings.drop_below) if settings.drop_below > 0 else -math.inf
    kept = weights * (logprobs >= floor)
    # `nll` and `dropped` become columns of metrics.jsonl, divided by the second result
    return (
        jnp.sum(-kept * logprobs),
        jnp.sum(kept),
        {"nll": -jnp.sum(weights * logprobs), "dropped": jnp.sum(weights - kept)},
    )
