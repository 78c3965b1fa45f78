"""Which numbers a setting takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bessemer.config.values import Mismatch


@dataclass(frozen=True)
class Range:
    """minimum ≤ x ≤ maximum and above < x < below, each where it is given; and the values in `also`.

    `also` is for a number that stands for a word, such as -1 for "derive it" beside a count of at least 1.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()

    @property
    def is_free(self) -> bool:
        return all(limit is None for limit in (self.minimum, self.maximum, self.above, self.below))

    def holds(self, number: float) -> bool:
        return number in self.also or not (
            (self.minimum is not None and number < self.minimum)
            or (self.maximum is not None and number > self.maximum)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        )

    def check(self, number: float) -> None:
        """Mismatch, in words, for a number outside; a setting with a range is a quantity, and so finite."""
        if not self.holds(number):
            raise Mismatch(f"expected {self.describe()}, got {number}")
        if self.is_free:
            return
        if math.isinf(number) if isinstance(number, float) else abs(number) >= 2**63:
            raise Mismatch(f"expected a number that 64 bits can hold, got {number}")

    def describe(self) -> str:
        """`at least 0 and below 1`; `at least 1, or -1`."""
        words = {
            "at least": self.minimum,
            "above": self.above,
            "at most": self.maximum,
            "below": self.below,
        }
        limits = " and ".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)
        return ", or ".join([limits, *map(str, self.also)])

    def intersect(self, other: Range) -> Range:
        """The numbers that both take."""

        def tightest(choose: Any, *limits: float | None) -> float | None:
            return choose((limit for limit in limits if limit is not None), default=None)

        return Range(
            minimum=tightest(max, self.minimum, other.minimum),
            maximum=tightest(min, self.maximum, other.maximum),
            above=tightest(max, self.above, other.above),
            below=tightest(min, self.below, other.below),
            also=tuple(word for word in self.also + other.also if self.holds(word) and other.holds(word)),
        )

    def json_schema(self, scalar: dict[str, Any]) -> dict[str, Any]:
        """The JSON Schema `scalar` of a number, with these limits."""
        names = {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "exclusiveMinimum": self.above,
            "exclusiveMaximum": self.below,
        }
        limited = scalar | {name: limit for name, limit in names.items() if limit is not None}
        return {"anyOf": [limited, {"enum": list(self.also)}]} if self.also else limited
