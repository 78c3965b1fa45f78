"""Numbers of TRL's GRPOTrainer for fixed tensors, written to grpo_trl.json beside this file.

    python tests/reference/grpo_trl.py           (needs torch and trl; last run: torch 2.13.0, trl 1.16.0)

TRL's own `_compute_loss` is called; what it would get from a model (log-probabilities) is given. Its loss types are
ours: grpo = normalization sequence, dapo = token, dr_grpo = fixed; its KL is k3. In float64.
"""

from __future__ import annotations

import collections
import json
import random
import types
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
ROWS, LENGTH, GROUP, LONGEST = 8, 6, 4, 9

CASES: list[dict[str, Any]] = [
    {"loss_type": "grpo", "level": "token", "low": 0.2, "high": 0.2, "beta": 0.0},
    {"loss_type": "grpo", "level": "token", "low": 0.2, "high": 0.28, "beta": 0.04},
    {"loss_type": "dapo", "level": "token", "low": 0.2, "high": 0.2, "beta": 0.1},
    {"loss_type": "dr_grpo", "level": "token", "low": 0.1, "high": 0.3, "beta": 0.01},
    {"loss_type": "grpo", "level": "sequence", "low": 0.03, "high": 0.04, "beta": 0.0},
    {"loss_type": "dapo", "level": "sequence", "low": 0.05, "high": 0.05, "beta": 0.2},
]


def inputs() -> dict[str, Any]:
    """Log-probabilities of three policies, masks of uneven lengths, rewards of two groups."""
    rng = random.Random(7)
    lengths = [rng.randint(1, LENGTH) for _ in range(ROWS)]
    policy = [[-rng.uniform(0.1, 3) for _ in range(LENGTH)] for _ in range(ROWS)]
    near = [[x + rng.gauss(0, 0.25) for x in row] for row in policy]
    far = [[x + rng.gauss(0, 0.5) for x in row] for row in policy]
    mask = [[float(t < n) for t in range(LENGTH)] for n in lengths]
    rewards = [round(rng.uniform(-1, 2), 3) for _ in range(ROWS)]
    return {"logprobs": policy, "old": near, "reference": far, "mask": mask, "rewards": rewards}


def trl_case(case: dict[str, Any], data: dict[str, Any], advantages: Any) -> dict[str, Any]:
    """Loss, gradient and clipped share of TRL's `_compute_loss`."""
    import torch
    from trl import GRPOTrainer

    tensor = {name: torch.tensor(data[name], dtype=torch.float64) for name in ("logprobs", "old", "reference", "mask")}
    logprobs = tensor["logprobs"].clone().requires_grad_()
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__ |= {
        "_get_per_token_logps_and_entropies": lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": case["level"],
        "beta": case["beta"],
        "loss_type": case["loss_type"],
        "epsilon_low": case["low"],
        "epsilon_high": case["high"],
        "use_vllm": False,
        "max_completion_length": LONGEST,
        "_entropy_bonus_enabled": False,
        "model": types.SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": collections.defaultdict(list)},
        "args": types.SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        "accelerator": types.SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
    }
    ids = torch.zeros((ROWS, LENGTH), dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones((ROWS, 1)),
            "completion_ids": ids,
            "completion_mask": tensor["mask"],
            "advantages": advantages,
            "old_per_token_logps": tensor["old"],
            "ref_per_token_logps": tensor["reference"],
            "num_items_in_batch": tensor["mask"].sum(),
        },
    )
    loss.backward()
    clipped = trainer._metrics["train"]["clip_ratio/region_mean"][0]
    return {**case, "loss": loss.item(), "gradient": logprobs.grad.tolist(), "clip_frac": clipped}


def main() -> None:
    import torch
    import trl
    from trl.trainer.utils import nanstd

    data = inputs()
    rewards = torch.tensor(data["rewards"], dtype=torch.float64).view(-1, GROUP)
    deviation = nanstd(rewards, dim=1).view(-1, 1)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (deviation + 1e-4)
    cases = [trl_case(case, data, advantages.flatten()) for case in CASES]
    made = {
        "versions": {"torch": torch.__version__, "trl": trl.__version__},
        "inputs": data,
        "advantages": advantages.flatten().tolist(),
        "cases": cases,
    }
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
