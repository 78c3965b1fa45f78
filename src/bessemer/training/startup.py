"""Where the time before the first step goes: laps of one clock, so that the parts add up to the whole."""

from __future__ import annotations

import time
from typing import Any

from bessemer.report.table import duration
from bessemer.training.cache import Programs, programs_so_far

SLOW = 2.0
"""Seconds of a first step; in shorter ones much is what only the first has."""


class StartUp:
    """`lap(name)` gives the time since the last lap to a part. The clock stands still once the first step is done."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.compiled = Programs()
        self.done = False
        self.elsewhere = (
            0.0  # seconds before there was a trainer that another run took: one that is started from
        )
        self._made = self._last = self._first = time.monotonic()
        self._programs = programs_so_far()

    def began(self, moment: float, name: str = "imports and devices") -> None:
        """The program began at `moment` (of time.monotonic), before there was a trainer to be timed."""
        self._first = moment
        self.parts = {name: max(0.0, self._made - moment - self.elsewhere), **self.parts}

    @property
    def age(self) -> float:
        """Seconds since the program began, or since the trainer was made where nobody said when it did."""
        return time.monotonic() - self._first

    def lap(self, name: str) -> None:
        if self.done:
            return
        now, programs = time.monotonic(), programs_so_far()
        self.parts[name] = self.parts.get(name, 0.0) + now - self._last
        if name == "compile":
            self.compiled = programs - self._programs
        self._last, self._programs = now, programs

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def line(self) -> str:
        """first step after 21.3 s: imports and devices 4.1, …, compile 9.8 (cache miss), …"""
        notes = {"compile": f" ({self.compiled.words})"}
        parts = [f"{name} {seconds:.1f}{notes.get(name, '')}" for name, seconds in self.parts.items()]
        return f"first step after {self.seconds:.1f} s: {', '.join(parts)}"

    def forecast(self, steps: int) -> str | None:
        """A word where `steps` like the first would take more than an hour: reports may be many minutes apart."""
        one = self.parts.get("first step", 0.0)
        if one < SLOW or one * steps < 3600:
            return None
        return (
            f"at the pace of the first step the run takes {duration(one * steps)} ({steps:,} steps of {one:.0f} s). "
            "Fewer training.steps, a smaller model.depth or a shorter architecture.block_size take less; "
            "`bessemer plan` with the same words says it beforehand"
        )

    def facts(self) -> dict[str, Any] | None:
        """For facts.json; None until the first step is done."""
        if not self.done:
            return None
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        return {"seconds": round(self.seconds, 3), "parts": parts, "cache": self.compiled.words}
