"""Dynamic sampling (DAPO, arXiv 2503.14476): groups of equal rewards are replaced by groups of other prompts.

Round r of rollout n draws as many prompts as groups are still flat, from a stream that is a pure function of (data,
seed, n, r), without those that the rollout has drawn already. A new group that is not flat takes the place of the first
flat one. After `grpo.resample` rounds the groups that are still flat stay: their advantages are 0, and they count in
the denominator. Rewards are those that process 0 computed, so all processes decide the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bessemer.errors import InputError
from bessemer.generate import Result, Sample
from bessemer.objectives.grpo import GrpoSettings, SampledSettings
from bessemer.rl.prompts import Chosen, PromptRows

Prompts = Callable[[int], Chosen]
"""The prompts of a round's stream, in order."""


class Groups(NamedTuple):
    """Groups of completions with their rewards. `results`: of each group; `rewards`: by name, (groups, G); `flat`:
    which groups have equal rewards, (groups,)."""

    results: list[list[Result]]
    rewards: dict[str, np.ndarray]
    flat: np.ndarray

    @property
    def samples(self) -> list[Sample]:
        return [sample for results in self.results for result in results for sample in result.samples]


Draw = Callable[[int, Chosen], Groups]
"""(round, prompts) -> one group of each prompt, sampled and rewarded."""


@dataclass
class Resampled:
    """The groups of a rollout after all rounds, and what they cost: groups drawn and rounds in all, and the sum of the
    rewards of all groups drawn."""

    groups: Groups
    drawn: int
    rounds: int
    reward_sum: float

    @property
    def metrics(self) -> dict[str, float]:
        """`resample/reward` is the policy's mean reward, before flat groups are left out."""
        size = self.groups.rewards["reward"].shape[1]
        return {
            "flat_groups": float(self.groups.flat.mean()),
            "resample/rounds": float(self.rounds),
            "resample/drawn": float(self.drawn),
            "resample/discarded": float(self.drawn - len(self.groups.results)),
            "resample/reward": self.reward_sum / (self.drawn * size),
        }


def check_resampling(rounds: int, policy: SampledSettings) -> None:
    """Raise InputError where flat groups cannot be replaced, or teach something."""
    if rounds == 0:
        return
    if not isinstance(policy, GrpoSettings):
        raise InputError(
            "grpo.resample replaces groups of equal rewards, and with a teacher no reward is trained on: leave it out."
        )
    if policy.offline != "no":
        raise InputError(
            f"grpo.resample samples further prompts, and grpo.offline={policy.offline} trains on stored completions: "
            "leave it out."
        )
    if policy.baseline not in ("group", "leave_one_out"):
        raise InputError(
            f"grpo.resample replaces groups of equal rewards because their advantages are 0; with "
            f"grpo.baseline={policy.baseline} they are not. Set grpo.baseline=group or leave_one_out, or leave it out."
        )


def replace_flat(first: Groups, chosen: Chosen, rounds: int, prompts: Prompts, draw: Draw) -> Resampled:
    """Return the groups of a rollout with flat ones replaced, over at most `rounds` rounds. chosen: the prompts of
    `first`."""
    results, flat = list(first.results), first.flat.copy()
    rewards = {name: values.copy() for name, values in first.rewards.items()}
    used = {_place(one) for one in chosen}
    made = Resampled(Groups(results, rewards, flat), len(results), 0, float(rewards["reward"].sum()))
    for turn in range(1, rounds + 1):
        places = np.flatnonzero(flat)
        others = unused(prompts(turn), used, len(places))
        if not others:  # every group teaches something, or every prompt was drawn
            break
        found = draw(turn, others)
        made.drawn += len(others)
        made.rounds = turn
        made.reward_sum += float(found.rewards["reward"].sum())
        for place, group in zip(places, np.flatnonzero(~found.flat), strict=False):
            results[place], flat[place] = found.results[group], False
            for name, values in rewards.items():
                values[place] = found.rewards[name][group]
    return made


def unused(prompts: Chosen, used: set[tuple[int, int]], count: int) -> Chosen:
    """Return the first `count` prompts that are not in `used`, to which they are added."""
    found: Chosen = []
    for one in prompts:
        if len(found) == count:
            break
        if _place(one) not in used:
            used.add(_place(one))
            found.append(one)
    return found


def _place(one: tuple[PromptRows, int]) -> tuple[int, int]:
    source, index = one
    return source.number, index
