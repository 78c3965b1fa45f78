"""On-policy distillation against its formula in float64, both directions, and its gradient by differences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.objectives.test_objectives_distill import B, T, V, example, softmax, student_of, teacher_of

from bessemer.losses.cross_entropy import Projection
from bessemer.objectives.distill import OnPolicySettings, on_policy_distill
from bessemer.objectives.grpo import TOKENS

__all__ = ["example"]  # a fixture: two models of other widths, padded heads, a softcap in the student
CAP, TAU = 4.0, 1.5


def batch_of(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Prompts of two tokens, then completions; where the mask is 0 nothing may count."""
    mask = np.ones((B, T))
    mask[:, :2] = 0
    return {"target_ids": x["targets"], "loss_mask": mask}


def expected(x: dict[str, np.ndarray], direction: str) -> tuple[float, float]:
    """(Σ w·τ²·D, Σ w) by the definition."""
    batch = batch_of(x)
    w = np.where(x["targets"] < 0, 0, batch["loss_mask"])
    p, q = softmax(student_of(x) / TAU), softmax(teacher_of(x) / TAU)
    if direction == "forward":
        p, q = q, p
    return float((w * TAU**2 * (p * (np.log(p) - np.log(q))).sum(-1)).sum()), float(w.sum())


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_it_is_its_formula_and_only_the_student_has_a_gradient(example: dict[str, np.ndarray], direction: str) -> None:
    settings = OnPolicySettings(direction=direction, soften=TAU)
    batch = {name: jnp.asarray(array) for name, array in batch_of(example).items()}

    def apply(params: Any, batch: Any, deterministic: bool, method: str, rngs: Any) -> Projection:
        return Projection(params["hidden"], params["head"], V, CAP)

    def teacher(params: Any, batch: Any, method: str) -> Projection:
        return Projection(params["hidden"], params["head"], V)

    @jax.jit
    def run(params: Any, reference: Any) -> Any:
        def loss(params: Any, reference: Any) -> Any:
            total, *rest = on_policy_distill(apply, params, batch, None, settings, reference, teacher)
            return total, rest

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, reference)

    params = {name: jnp.asarray(example[name], jnp.float32) for name in ("hidden", "head")}
    reference = {name: jnp.asarray(example[f"teacher_{name}"], jnp.float32) for name in ("hidden", "head")}
    (total, (weight, sums)), (gradient, against) = run(params, reference)
    wanted, count = expected(example, direction)
    assert float(total) == pytest.approx(wanted, rel=1e-5) and float(weight) == count == float(sums[TOKENS])
    assert float(sums["kl"]) == pytest.approx(wanted / TAU**2, rel=1e-5)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(against))
    random = np.random.default_rng(0)
    for name, slope in gradient.items():
        way, step = random.standard_normal(example[name].shape), 1e-5
        ends = [expected(example | {name: example[name] + s * step * way}, direction)[0] for s in (1, -1)]
        found = float(np.sum(np.asarray(slope, np.float64) * way))
        assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-4)
