"""How many steps a round takes: all of them where nobody reads along, few where somebody does.

A short round costs the host its trouble more often and changes nothing else: rows draw by their own count of tokens,
and each token is computed over as much of the cache as in whole rounds.
"""

from __future__ import annotations

from collections.abc import Collection

import jax

from bessemer.generate.row import Row

READING = 0.075
"""Seconds of a round while somebody reads along; text that comes in fewer pieces a second seems to stutter."""
GROWTH = 3
"""A reader's next round brings three times what there is: 1, 4, 16 tokens. His first one waits for no other, and the
host is asked twice more an answer."""


def round_of() -> int:
    """Decode steps of a whole round. Between rounds an accelerator waits two milliseconds for the host, as long as two
    steps."""
    return 16 if jax.default_backend() == "cpu" else 32


class Pace:
    """Chooses each round's steps, up to `most`. `clocked`: also by the time that the round before took; several
    processes, each with a clock of its own, must choose alike and go by counts alone."""

    def __init__(self, most: int, clocked: bool):
        self.most, self.clocked = most, clocked
        self._seconds = 0.0  # a step's, at most: a prefill or a compilation in that round was counted along

    def next(self, rows: Collection[Row], unit: int) -> tuple[int, int]:
        """(steps, tokens of the longest row where a whole round would end); steps are a multiple of `unit`, as `most`.

        The second decides how much of the cache is computed with, so a round ends there at the latest.
        """
        end = max(row.length - len(row.made) % self.most for row in rows) + self.most
        steps = min(self.most, end - max(row.length for row in rows))
        read = [len(row.made) for row in rows if row.handle.request.stream]
        if read:
            steps = min(steps, GROWTH * min(read))
            steps = min(steps, int(READING / self._seconds)) if self._seconds else steps
        return max(steps // unit, 1) * unit, end

    def took(self, seconds: float, steps: int) -> None:
        """The last round made `steps` tokens of a row in this time."""
        if self.clocked:
            self._seconds = seconds / max(steps, 1)
