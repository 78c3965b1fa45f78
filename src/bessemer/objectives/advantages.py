"""How much better a completion was than expected: what its tokens are weighted with."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-4
"""Added to a group's standard deviation: a group of equal rewards has advantages of 0, not 0/0."""


def group_advantages(rewards: np.ndarray, baseline: str = "group", scale: bool = True) -> np.ndarray:
    """A = (r − b) / (s + ε) in float64. rewards: (groups, G) → (groups, G).

    b: "group" mean of the group; "leave_one_out" mean of the others in it; "rollout" mean of all; "none" 0.
    s: standard deviation of the group (n − 1 below), with `scale`; otherwise nothing is divided.
    """
    rewards = np.asarray(rewards, np.float64)
    size = rewards.shape[1]
    if baseline == "group":
        centred = rewards - rewards.mean(axis=1, keepdims=True)
    elif baseline == "leave_one_out":
        others = (rewards.sum(axis=1, keepdims=True) - rewards) / max(1, size - 1)
        centred = rewards - others
    elif baseline == "rollout":
        centred = rewards - rewards.mean()
    else:
        centred = rewards
    if not scale:
        return centred
    deviation = rewards.std(axis=1, ddof=1, keepdims=True) if size > 1 else np.zeros((len(rewards), 1))
    return centred / (deviation + EPSILON)
