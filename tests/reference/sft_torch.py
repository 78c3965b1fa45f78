"""Numbers of torch for the supervised loss: `python tests/reference/sft_torch.py` writes sft_torch.json beside it.

What Hugging Face trainers compute: cross-entropy over shifted tokens with ignore_index −100, summed, divided by the
number of tokens that count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".json")


def tensors() -> tuple[np.ndarray, np.ndarray]:
    """logits (3, 7, 11) float32, targets (3, 7) with −100 for 13 of the 21; one row has a single target."""
    rng = np.random.default_rng(7)
    logits = (3 * rng.standard_normal((3, 7, 11))).astype(np.float32)
    targets = rng.integers(0, 11, (3, 7))
    kept = np.array([[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 0, 0, 1]], bool)
    return logits, np.where(kept, targets, -100)


def numbers() -> dict[str, Any]:
    import torch

    logits, targets = tensors()
    given = torch.tensor(logits, requires_grad=True)
    total = torch.nn.functional.cross_entropy(
        given.reshape(-1, 11), torch.tensor(targets).reshape(-1), ignore_index=-100, reduction="sum"
    )
    count = int((targets >= 0).sum())
    (total / count).backward()
    return {
        "torch": torch.__version__,
        "sum": float(total.detach()),
        "count": count,
        "gradient": given.grad.numpy().round(8).tolist(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(numbers()) + "\n", encoding="utf-8")
