"""Distillation losses as torch computes them. `python tests/reference/distill_torch.py` writes distill_torch.json.

Written with torch 2.13.0 on 2026-11-15. The tensors are drawn by numpy from a seed, so only results are stored;
tests/objectives/test_objectives_distill.py draws the same and, where torch is installed, runs this file again.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SHAPE = (3, 7, 29)
CASES = [{"alpha": 0.5, "temperature": 2.0}, {"alpha": 1.0, "temperature": 1.0}, {"alpha": 0.2, "temperature": 4.0}]


def tensors() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Student and teacher logits (B, T, V) in float64, targets (some −1) and weights (B, T)."""
    random = np.random.default_rng(11)
    student, teacher = 3 * random.standard_normal((2, *SHAPE))
    targets = random.integers(0, SHAPE[-1], SHAPE[:2])
    targets[0, :2] = -1
    weights = (random.random(SHAPE[:2]) > 0.2).astype(np.float64) * (targets >= 0)
    return student, teacher, targets, weights


def compute() -> list[dict[str, object]]:
    import torch
    import torch.nn.functional as F

    student, teacher, targets, weights = (torch.from_numpy(x) for x in tensors())
    found: list[dict[str, object]] = []
    for case in CASES:
        alpha, t = case["alpha"], case["temperature"]
        z = student.clone().requires_grad_()
        kl = F.kl_div(F.log_softmax(z / t, -1), F.log_softmax(teacher / t, -1), reduction="none", log_target=True).sum(
            -1
        )
        ce = F.cross_entropy(z.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none").view(targets.shape)
        loss = (weights * (alpha * t * t * kl + (1 - alpha) * ce)).sum()
        loss.backward()
        sums = {"loss": loss, "kl": (weights * kl).sum(), "nll": (weights * ce).sum()}
        found.append({**case, **{name: value.item() for name, value in sums.items()}, "gradient": z.grad.tolist()})
    return found


if __name__ == "__main__":
    file = Path(__file__).with_suffix(".json")
    rounded = json.loads(json.dumps(compute()), parse_float=lambda text: float(f"{float(text):.9g}"))
    file.write_text(json.dumps(rounded) + "\n", encoding="utf-8")
