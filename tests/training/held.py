"""An objective that compares with reference weights, for the tests of those."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bessemer.registry import objectives


@objectives.register("held", reference=True)
def held(apply: Any, params: Any, batch: Any, key: Any, settings: Any, reference: Any = None) -> Any:
    """Cross-entropy + Σ_θ (θ − θ_ref)²; logged: how far θ has gone."""
    loss, weight, _ = apply(params, batch, 0.0, 0.0, True, method="loss")
    apart = sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (params, reference)), strict=True))
    return loss + weight * apart, weight, {"apart": weight * apart}
