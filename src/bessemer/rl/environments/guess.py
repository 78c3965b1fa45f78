"""`guess`: find a number; each wrong guess is answered with "higher" or "lower".

Columns: `low`, `high`, and `secret` (without it: drawn from the seed). The reward is 1 for the number, and 0 for
everything else.
"""

from __future__ import annotations

import random
import re

from bessemer.errors import InputError
from bessemer.registry import environments
from bessemer.rl.environments.base import Completion, Environment, Row

NUMBER = re.compile(r"-?\d+")


@environments.register("guess")
class Guess(Environment):
    """low, high: the range where a row has none."""

    def __init__(self, low: int = 1, high: int = 100):
        if low > high:
            raise InputError(f"low={low} is above high={high}.")
        self.low, self.high = low, high
        self.secret = low

    def reset(self, row: Row, seed: int) -> str:
        low, high = int(row.get("low", self.low)), int(row.get("high", self.high))
        self.secret = int(row.get("secret", random.Random(seed).randint(low, high)))
        return f"Guess {low} to {high}"

    def step(self, completion: Completion) -> tuple[str | None, float, bool]:
        found = NUMBER.fullmatch(completion.text.strip())
        if found is None:
            return "a number", 0.0, False
        guess = int(found.group()[:20])
        if guess == self.secret:
            return None, 1.0, True
        return "higher" if guess < self.secret else "lower", 0.0, False
