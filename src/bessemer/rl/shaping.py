"""The soft penalty of long completions (DAPO, arXiv 2503.14476): a reward of its own beside those of grpo.rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bessemer.errors import InputError
from bessemer.objectives.grpo import GrpoSettings, SampledSettings

OVERLONG = "overlong_penalty"
"""Its name among the rewards."""


def overlong_penalty(lengths: Sequence[int], longest: int, buffer: int) -> np.ndarray:
    """Return 0 up to longest − buffer tokens, −1 at `longest`, and a straight line between; float64 (n,)."""
    return np.clip((longest - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


def check_penalty(policy: SampledSettings, rewards: Sequence[str], has_environment: bool) -> None:
    """Raise InputError where the penalty cannot be applied. rewards: the labels of grpo.rewards."""
    if not isinstance(policy, GrpoSettings):
        return
    longest = policy.max_completion_length
    if policy.overlong_penalty == 0:
        if policy.overlong_buffer is not None:
            raise InputError("grpo.overlong_buffer is where grpo.overlong_penalty begins: set that too, such as 1.")
        return
    if policy.buffer > longest:
        raise InputError(
            f"grpo.overlong_buffer={policy.buffer} is more than grpo.max_completion_length={longest}: lower it."
        )
    if policy.offline != "no":
        raise InputError(
            f"grpo.overlong_penalty shapes rewards of sampled completions, and with grpo.offline={policy.offline} "
            "rewards are stored: leave it out, or store shaped rewards."
        )
    if has_environment:
        raise InputError(
            "grpo.overlong_penalty is about one completion, and an episode has several: leave it out, and add "
            "length_penalty to grpo.rewards, which counts all sampled tokens, or a reward of the environment's own."
        )
    if OVERLONG in rewards:
        raise InputError(f"a reward is named {OVERLONG}, as that of grpo.overlong_penalty is: rename yours.")
