"""`treasure`: a text game. The model walks a grid (north, south, east, west) and is told whether it came nearer.

Columns: `start` and `treasure`, each [x, y]; what a row lacks is drawn from the seed. The reward is 1 at the treasure,
less `cost` for every step.
"""

from __future__ import annotations

import random

from bessemer.errors import InputError
from bessemer.registry import environments
from bessemer.rl.environments.base import Completion, Environment, Row

MOVES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


@environments.register("treasure")
class Treasure(Environment):
    def __init__(self, width: int = 4, height: int = 4, cost: float = 0.0):
        if width * height < 2:
            raise InputError(f"a grid of {width} by {height} has no place for a treasure beside the start.")
        self.width, self.height, self.cost = width, height, cost
        self.place = self.treasure = (0, 0)

    def reset(self, row: Row, seed: int) -> str:
        rng = random.Random(seed)
        cells = [(x, y) for x in range(self.width) for y in range(self.height)]
        start, treasure = rng.sample(cells, 2)
        self.place, self.treasure = _cell(row.get("start"), start), _cell(row.get("treasure"), treasure)
        if self.place not in cells or self.treasure not in cells:
            raise InputError(f"start {self.place} or treasure {self.treasure} is outside the grid.")
        return (
            f"You are at {self.place[0]},{self.place[1]} of a grid of {self.width} by {self.height}. "
            "Find the treasure: say north, south, east or west."
        )

    def step(self, completion: Completion) -> tuple[str | None, float, bool]:
        move = MOVES.get(completion.text.strip().lower())
        if move is None:
            return "Say north, south, east or west.", -self.cost, False
        x, y = self.place[0] + move[0], self.place[1] + move[1]
        if not (0 <= x < self.width and 0 <= y < self.height):
            return "A wall.", -self.cost, False
        before, self.place = self.distance(), (x, y)
        if self.place == self.treasure:
            return None, 1.0 - self.cost, True
        return ("Warmer." if self.distance() < before else "Colder."), -self.cost, False

    def distance(self) -> int:
        return abs(self.place[0] - self.treasure[0]) + abs(self.place[1] - self.treasure[1])


def _cell(given: object, drawn: tuple[int, int]) -> tuple[int, int]:
    if given is None:
        return drawn
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise InputError(f"a place in the grid is [x, y]; got {given!r:.50}.")
    return int(given[0]), int(given[1])
