"""The prefix cache: what the slots hold, and which of it a new prompt can begin with.

A row that ends leaves its keys and values in its slot until another row needs the slot, the longest free first. So the
cache has as many entries as the engine has slots, and no memory of its own. A prompt that continues a free slot moves
into it; one that shares a beginning with a slot gets a copy of that, if the rest then fits a narrower program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bessemer.models.protocol import Shortening

STEP = 4  # widths of programs that continue a prefix: NARROWEST, 4 times that, …: few programs, at most 4 times padded


@dataclass(frozen=True)
class Held:
    """The tokens in the cache of a slot. routes: their experts, if the engine records them."""

    ids: np.ndarray
    adapter: int = 0
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class Prefix:
    """The first `length` tokens that `slot` holds begin a prompt. whole: it holds no others, and no row is in it."""

    slot: int
    length: int
    whole: bool
    routes: np.ndarray | None = None


class PrefixCache:
    """What is known of the slots. `free` and `ended` keep it; `find` reads it."""

    def __init__(self, model: Any, routes: bool = False):
        self.routes = routes
        self.most_shortened = model.most_rewound if isinstance(model, Shortening) else 0
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, slot: int) -> bool:
        return slot in self._held

    def put(self, slot: int, held: Held) -> None:
        if len(held.ids) and (not self.routes or (held.routes is not None and len(held.routes) == len(held.ids))):
            self._held[slot] = held
        else:
            self.drop(slot)

    def drop(self, slot: int) -> None:
        self._held.pop(slot, None)

    def clear(self) -> None:
        self._held.clear()

    def find(self, prompt: Sequence[int], adapter: int, lengths: Mapping[int, int]) -> Prefix | None:
        """Return the longest usable beginning of the prompt, at most all tokens but the last.

        lengths: the tokens now in the cache of the slots in use, which have more than they were known with.
        """
        ids = np.asarray(prompt, np.int32)[:-1]
        best: Prefix | None = None
        for slot, held in self._held.items():
            if held.adapter != adapter or not len(ids) or held.ids[0] != ids[0]:
                continue
            most = min(len(ids), len(held.ids))
            if best is not None and most < best.length:
                continue
            differs = held.ids[:most] != ids[:most]
            shared = int(differs.argmax()) if differs.any() else most
            total = lengths.get(slot, len(held.ids))
            whole = slot not in lengths and shared == total
            if not whole and shared < total and total > self.most_shortened:
                continue  # a window has lost keys that the shorter text needs
            if best is None or (shared, whole) > (best.length, best.whole):
                routes = None if held.routes is None else held.routes[:shared]
                best = Prefix(slot, shared, whole, routes)
        return best


def continued_width(size: int, most: int) -> int:
    """Return the width of the program that appends `size` tokens to a prefix."""
    width = 16 if jax.default_backend() == "cpu" else 64  # an accelerator computes 64 tokens in the time of 16
    while width < size:
        width *= STEP
    return min(width, most)
