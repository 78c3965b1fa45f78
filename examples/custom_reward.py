"""A reward and an environment of your own, for reinforcement learning.

    bessemer train quickstart training.dataset=my.txt --name base
    bessemer train grpo init=runs/base training.dataset=prompts.jsonl --name near \
        grpo.rewards=[examples/custom_reward.py:near]
    bessemer train grpo init=runs/base training.dataset=prompts.jsonl --name hints \
        grpo.environment=examples/custom_reward.py:Hints grpo.max_turns=4

prompts.jsonl has rows such as {"prompt": "Add 17 and 25", "answer": "42"}; every column reaches rewards and
environments. Start from a model that is right now and then: where all completions of a group get the same reward, there
is nothing to learn (`flat_groups` in the metrics).
"""

from __future__ import annotations

import re
from typing import Any

from bessemer.rl.environments.base import Completion, Environment, Row

NUMBER = re.compile(r"-?\d{1,9}")


def near(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for the right number, less the further off it is, 0 for no number: one finite value per completion."""
    return [closeness(completion, right) for completion, right in zip(completions, answer, strict=True)]


def closeness(completion: str, answer: str) -> float:
    """Return 1 / (1 + |found − answer|)."""
    found = NUMBER.search(completion)
    return 0.0 if found is None else 1 / (1 + abs(int(found[0]) - int(answer)))


class Hints(Environment):
    """One episode: the model guesses until it is right, and is told in which direction it is wrong.

    Instances live in worker processes, and a call that fails is repeated by replaying the episode. What happens must
    follow from the row, the seed and the completions alone: no clock, no global random numbers.
    """

    def __init__(self, bonus: float = 0.5):
        self.bonus, self.turns, self.answer = bonus, 0, 0

    def reset(self, row: Row, seed: int) -> str:
        self.turns, self.answer = 0, int(row["answer"])
        return str(row["prompt"])

    def step(self, completion: Completion) -> tuple[str | None, float, bool]:
        """Return (observation, reward, whether the episode is over). Observations are never trained on."""
        self.turns += 1
        found = NUMBER.search(completion.text)
        if found is None:
            return "Write a number.", 0.0, False
        if int(found[0]) == self.answer:
            return None, 1.0 + self.bonus / self.turns, True
        return "More." if int(found[0]) < self.answer else "Less.", 0.0, False
