"""Preference losses by TRL's own code, on fixed numbers. Makes preference_trl.json; run with torch and trl installed:

    python tests/reference/preference_trl.py

Nothing is trained: a trainer's loss is called with a stand-in for the model, which answers with given per-token
log-probabilities, so what is measured is TRL's arithmetic alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

OUT = Path(__file__).with_suffix(".json")
LENGTHS = [(5, 3), (2, 6), (4, 4), (1, 7), (6, 2), (3, 5)]  # answer tokens: chosen, rejected
PROMPT, WIDTH = 2, 9
BETA, GAMMA = 0.3, 0.5
DPO = {
    "sigmoid": ("sigmoid", 0.0),
    "hinge": ("hinge", 0.0),
    "ipo": ("ipo", 0.0),
    "robust": ("robust", 0.15),
    "apo_zero": ("apo_zero", 0.0),
    "apo_down": ("apo_down", 0.0),
}


def numbers() -> dict[str, Any]:
    """Per-token log-probabilities of policy and reference, (2, pairs, WIDTH) each: chosen, rejected; and the mask."""
    rng = np.random.default_rng(7)
    lengths = np.array(LENGTHS).T  # (2, pairs)
    places = np.arange(WIDTH)
    mask = (places >= PROMPT - 1) & (places < PROMPT - 1 + lengths[..., None])
    policy = -rng.uniform(0.05, 3.0, mask.shape) * mask
    reference = -rng.uniform(0.05, 3.0, mask.shape) * mask
    return {"policy": policy.round(4), "reference": reference.round(4), "mask": mask.astype(int)}


class Model:
    """Stands in for a language model: its log-probabilities are given."""

    training = True

    def __init__(self, logps: Any):
        self.logps = logps

    def __call__(self, **_: Any) -> Any:
        zeros = self.logps.detach() * 0
        return SimpleNamespace(
            log_probs=self.logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
        )


def trainer(policy: Model, reference: Model, **attributes: Any) -> Any:
    import torch

    same = lambda value: value  # noqa: E731
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same, unwrap_model=same)
    return SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=accelerator,
        beta=BETA,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        use_weighting=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        desirable_weight=1.0,
        undesirable_weight=1.0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        **attributes,
    )


def sequences(mask: Any) -> dict[str, Any]:
    """Inputs of a trainer's loss for masks (n, WIDTH) of shifted targets."""
    import torch

    completion = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], 1)
    ids = torch.ones_like(completion)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": completion}


def with_gradient(policy: Any, loss_of: Any) -> dict[str, Any]:
    """The loss and its gradient in log π of each answer (that of any of its tokens)."""
    logps = policy.clone().requires_grad_()
    loss = loss_of(logps)
    loss.backward()
    first = logps.grad[..., PROMPT - 1]
    return {"loss": loss.item(), "gradient": first.tolist()}


def dpo(n: dict[str, Any], loss: str, smoothing: float) -> dict[str, Any]:
    from trl.trainer.dpo_trainer import DPOTrainer

    def loss_of(policy: Any) -> Any:
        reference = n["reference"].sum(-1)
        both = policy.flatten(0, 1)  # TRL puts all chosen before all rejected
        made = trainer(Model(both), Model(both), loss_types=[loss], loss_weights=[1.0], label_smoothing=smoothing)
        inputs = sequences(n["mask"].flatten(0, 1))
        inputs |= {"ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
        return DPOTrainer._compute_loss(made, made.model, inputs, False)

    return with_gradient(n["policy"], loss_of)


def kto(n: dict[str, Any]) -> dict[str, Any]:
    """Both answers of each pair as examples, and all of them as the completions that the KL is estimated from."""
    import torch
    from trl.trainer.kto_trainer import KTOTrainer

    def loss_of(policy: Any) -> Any:
        both, reference = policy.flatten(0, 1), n["reference"].sum(-1).flatten()
        made = trainer(Model(both), Model(both), loss_type="kto", calculate_KL=True)
        made._compute_kl_logps = lambda model, batch: both.sum(-1).detach()
        label = torch.arange(len(both)) < len(both) // 2
        inputs = sequences(n["mask"].flatten(0, 1)) | {"label": label}
        inputs |= {"ref_logps": reference, "ref_KL_logps": reference}
        return KTOTrainer._compute_loss(made, made.model, inputs, False)

    return with_gradient(n["policy"], loss_of)


def without_reference(n: dict[str, Any], loss: str) -> dict[str, Any]:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    tokens = n["mask"].sum(-1)

    def loss_of(policy: Any) -> Any:
        made = trainer(
            Model(policy),
            Model(policy),
            alpha=0.0,
            simpo_gamma=GAMMA,
            label_smoothing=0.0,
            loss_type={"cpo": "sigmoid"}.get(loss, loss),
        )
        sums = policy.sum(-1)
        if loss == "cpo":
            return CPOTrainer.cpo_loss(made, sums[0], sums[1])[0].mean()
        means = sums / tokens
        if loss == "simpo":
            return CPOTrainer.cpo_loss(made, means[0], means[1])[0].mean()
        return -ORPOTrainer.odds_ratio_loss(made, means[0], means[1])[0].mean()

    return with_gradient(n["policy"], loss_of)


def reward(n: dict[str, Any], margin: float, center: float) -> dict[str, Any]:
    """Rewards are the sums of the policy's numbers."""
    import torch
    from trl.trainer.reward_trainer import RewardTrainer

    def loss_of(policy: Any) -> Any:
        rewards = policy.sum(-1).flatten()
        made = trainer(Model(policy), Model(policy))
        made.args.center_rewards_coefficient = center
        inputs = {**sequences(n["mask"].flatten(0, 1)), "margin": torch.full((len(rewards) // 2,), margin)}
        model = lambda **_: SimpleNamespace(logits=rewards[:, None])  # noqa: E731
        return RewardTrainer.compute_loss(made, model, inputs)

    return with_gradient(n["policy"], loss_of)


def values() -> dict[str, Any]:
    import torch
    import trl

    given = numbers()
    n = {name: torch.tensor(value) for name, value in given.items()}
    losses = {name: dpo(n, *arguments) for name, arguments in DPO.items()}
    losses["kto"] = kto(n)
    losses |= {name: without_reference(n, name) for name in ("simpo", "cpo", "orpo")}
    return {
        "made_with": {"torch": torch.__version__, "trl": trl.__version__},
        "settings": {"beta": BETA, "gamma": GAMMA, "label_smoothing": {k: e for k, (_, e) in DPO.items()}},
        **{name: value.tolist() for name, value in given.items()},
        "losses": losses,
        "reward": {"margin": 0.5, "center": 0.01, **reward(n, 0.5, 0.01)},
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(values()) + "\n")
    print(f"{OUT.name} written")
