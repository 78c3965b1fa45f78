"""Stored completions with their rewards, in place of rollouts: batches are again a pure function of the step.

One group per line; completions are texts or token ids, and a text gets the end token that the model would write:

    {"prompt": …, "completions": [text or ids, …], "rewards": [number, …],
     "logprobs": [[number per token, …], …], "masks": [[0 or 1 per token, …], …]}    (the last two are optional)

Without log-probabilities the ratio is to the reference (grpo.offline=reference), renewed every grpo.sync_interval.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bessemer.data import DataPlan, Sampling
from bessemer.data.rows.rows import Batch, Rows, fields_of
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.objectives.grpo import GrpoSettings, group_advantages
from bessemer.rl.prompts import (
    Horizon,
    check_groups,
    end_ids,
    longest_prompt,
    prompt_ids,
    prompt_of,
    read_rows,
)
from bessemer.rl.rollout import FIELDS, TOKEN_FIELDS, GRPOTrainerConfig, Passes, completion_rows, spread
from bessemer.training.setup.data import DataParts


class StoredGroups:
    """Groups of one source as rows of a DataPlan: entry i is a whole group, (G, T) per field.

    groups: arrays (G, T) and rewards (G,) of each.
    """

    def __init__(self, name: str, groups: Sequence[tuple[Batch, np.ndarray]], block_size: int):
        if not groups:
            raise InputError(f"{name} holds no group of completions.")
        self.block_size, self.groups = block_size, groups
        self.rewards = np.stack([rewards for _, rewards in self.groups])  # (groups, G)
        digest = hashlib.sha256()
        for group, rewards in self.groups:
            digest.update(b"".join(group[name].tobytes() for name in sorted(group)) + rewards.tobytes())
        self.fingerprint = digest.hexdigest()
        self.stats: dict[str, Any] = {"prompts": len(self.groups), "completions": self.rewards.size}
        self.fields = fields_of(self.get(np.arange(1)))

    def __len__(self) -> int:
        return len(self.groups)

    def get(self, indices: np.ndarray) -> Batch:
        """Arrays (n, G, T), and the rewards (n, G)."""
        chosen = [self.groups[int(index)][0] for index in indices]
        batch = {name: np.stack([group[name] for group in chosen]) for name in chosen[0]}
        return {**batch, "rewards": self.rewards[indices]}


class StoredPlan(DataPlan):
    """`batch(step)`: the groups of the step, one row per completion."""

    def __init__(self, mixture: Sequence[tuple[Sampling, Rows]], passes: Passes, baseline: str, scale: bool):
        super().__init__([mixture], passes.prompts, passes.seed)
        self.baseline, self.scale = baseline, scale

    def groups(self, step: int) -> Batch:
        return super().batch(step)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        found = self.groups(step)
        advantages = group_advantages(found.pop("rewards"), self.baseline, self.scale)
        found["advantages"] = np.broadcast_to(advantages[..., None], found["loss_mask"].shape).astype(
            np.float32
        )
        return {
            name: array.reshape(-1, array.shape[-1])[rows or slice(None)] for name, array in found.items()
        }

    def metrics(self, step: int) -> dict[str, float]:
        found = self.groups(step)
        lengths = (found["target_ids"] >= 0).sum(axis=-1)
        return {"reward": float(found["rewards"].mean()), "completion_len": float(lengths.mean())}


def build_stored(
    settings: GRPOTrainerConfig,
    policy: GrpoSettings,
    tokenizer: Tokenizer,
    horizon: Horizon,
    say: Callable[[str], None],
) -> tuple[DataParts, Passes]:
    """Return the data of an offline run and how its steps divide it."""
    if len(settings.datasets) != 1:
        raise InputError("training.dataset has several stages; stored completions are one mixture.")
    mixture: list[tuple[Sampling, Rows]] = []
    for sampling in settings.datasets[0]:
        name = sampling.name
        groups = [
            group_of(row, f"{name} row {number}", settings, policy, tokenizer)
            for number, row in enumerate(read_rows(name), 1)
        ]
        mixture.append((Sampling(name, sampling.rate), StoredGroups(name, groups, settings.block_size)))
    count = sum(len(rows) for _, rows in mixture) * settings.group_size
    batch_size, steps = horizon(count)
    check_groups(batch_size, settings.group_size, policy)
    for name, value in (("num_iterations", settings.num_iterations), ("mini_batches", settings.mini_batches)):
        if value > 1:
            say(f"note: grpo.{name} has no effect on stored completions: training.epochs repeats them")
    passes = Passes(batch_size, settings.group_size, seed=settings.seed)
    plan = StoredPlan(mixture, passes, policy.baseline, policy.scale)
    names = [name for name in FIELDS if name != "old_logprobs" or policy.offline == "logprobs"]
    fields = {name: ((settings.block_size,), FIELDS[name]) for name in names}
    return DataParts(plan, None, batch_size, steps, [0], 2, fields), passes


def group_of(
    row: dict[str, Any], where: str, settings: GRPOTrainerConfig, policy: GrpoSettings, tokenizer: Tokenizer
) -> tuple[Batch, np.ndarray]:
    """Return the arrays (G, T) and the rewards (G,) of one line."""
    prompt, row = prompt_of(row, where)
    size = settings.group_size
    for column in ("completions", "rewards"):
        if not isinstance(row.get(column), list) or len(row[column]) != size:
            found = f"{len(row[column])} of them" if isinstance(row.get(column), list) else "no such list"
            raise InputError(
                f"{where}: '{column}' needs grpo.group_size={size} entries, and there is {found}."
            )
    ids = prompt_ids(prompt, tokenizer, settings.chat)
    end = end_ids(tokenizer)[0]
    completions = [
        [*tokenizer.encode(one, after=ids), end] if isinstance(one, str) else [int(token) for token in one]
        for one in row["completions"]
    ]
    if any(not 0 <= token < tokenizer.vocab_size for one in completions for token in one):
        raise InputError(
            f"{where}: 'completions' has ids outside the tokenizer's {tokenizer.vocab_size} tokens."
        )
    longest = max(map(len, completions))
    if len(ids) > longest_prompt(settings, policy) or not 0 < longest <= policy.max_completion_length:
        raise InputError(
            f"{where}: {len(ids)} tokens of prompt and up to {longest} of completion; grpo.max_prompt_length and "
            f"grpo.max_completion_length={policy.max_completion_length} allow less. Raise them, or shorten it."
        )
    rewards = np.asarray(row["rewards"], np.float64)
    if rewards.shape != (size,) or not all(map(math.isfinite, rewards.tolist())):
        raise InputError(f"{where}: 'rewards' are {json.dumps(row['rewards'])[:80]}; one finite number each.")
    masks = per_token(row, "masks", completions, where) or [[1.0] * len(one) for one in completions]
    block, pad = settings.block_size, tokenizer.pad_id
    rows = completion_rows([ids] * size, completions, masks, block, pad, TOKEN_FIELDS)
    stored = per_token(row, "logprobs", completions, where)
    if policy.offline == "logprobs":
        if stored is None:
            raise InputError(
                f"{where}: no 'logprobs', which grpo.offline=logprobs needs; use grpo.offline=reference."
            )
        rows["old_logprobs"] = spread(stored, rows)
    return rows, rewards


def per_token(
    row: dict[str, Any], column: str, completions: Sequence[Sequence[int]], where: str
) -> list[list[float]] | None:
    """Return a column with one number per token of each completion; None if the row lacks it."""
    values = row.get(column)
    if values is None:
        return None
    found = [len(one) for one in values]
    wanted = [len(one) for one in completions]
    if found != wanted:
        raise InputError(
            f"{where}: '{column}' has {found} values for completions of {wanted} tokens (end included)."
        )
    return [[float(value) for value in one] for one in values]
