"""Histograms of parameters over steps, from weights.jsonl of callbacks=[weight_distribution].

Memory does not grow with the file: of each parameter every `stride`-th row and the newest are kept, and the stride
doubles whenever `MOST_STEPS` is reached. Invalid lines are counted; an invalid number is a gap.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.dash.files import Folder, parsed
from bessemer.dash.metrics import Growing
from bessemer.report.summary import is_number

MOST_PARAMETERS, LONGEST_NAME = 400, 200
MOST_STEPS = 120
MOST_BINS = 64
LONGEST = 1 << 14  # bytes of a row: 64 bins are about 1 KiB
STATISTICS = ("mean", "std", "min", "max")


@dataclass(frozen=True)
class Row:
    """One histogram: `counts` in equal bins from min to max; empty if these are not numbers."""

    step: float
    statistics: tuple[float | None, ...]
    counts: np.ndarray

    def document(self) -> dict[str, Any]:
        step = int(self.step) if self.step.is_integer() else self.step
        numbers = dict(zip(STATISTICS, self.statistics, strict=True))
        return {"step": step, **numbers, "counts": [int(count) for count in self.counts.tolist()]}


@dataclass
class Thinned:
    """At most `MOST_STEPS` rows of one parameter, spread over all of them, and the newest."""

    rows: list[Row] = field(default_factory=list)
    newest: Row | None = None
    seen: int = 0
    stride: int = 1

    def add(self, row: Row) -> None:
        if self.seen % self.stride == 0:
            self.rows.append(row)
            if len(self.rows) >= MOST_STEPS:
                del self.rows[1::2]
                self.stride *= 2
        self.newest = row
        self.seen += 1

    @property
    def values(self) -> float:
        """The number of values of the parameter, all of which a histogram counts."""
        return float(self.rows[0].counts.sum()) if self.rows else 0.0

    def documents(self) -> list[dict[str, Any]]:
        """Return the rows by rising step; of two rows with one step, the last."""
        found = {row.step: row for row in [*self.rows, *([self.newest] if self.newest else [])]}
        return [found[step].document() for step in sorted(found)]


class RunWeights(Growing):
    """The histograms of one run; a long file is read in several looks, so that none takes long."""

    most = 16 << 20

    def forget(self) -> None:
        self.parameters: dict[str, Thinned] = {}
        self.bad = 0
        self.left_out = False

    def use(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            if not line.strip():
                continue
            found = _row(line)
            if found is None:
                self.bad += 1
            elif found[0] in self.parameters or len(self.parameters) < MOST_PARAMETERS:
                self.parameters.setdefault(found[0], Thinned()).add(found[1])
            else:
                self.left_out = True

    def too_long(self) -> None:
        self.bad += 1

    def shown(self, name: str) -> tuple[str, Callable[[], dict[str, Any]]]:
        """Return (version, document) of a parameter; of the one with the most values if there is none of this name."""
        with self.lock:
            self.look()
            version = repr((str(self.path), name, self.signature, self.left))

        def make() -> dict[str, Any]:
            with self.lock:
                names = list(self.parameters)
                largest = max(names, key=lambda one: self.parameters[one].values, default=None)
                chosen = name if name in self.parameters else largest
                rows = [] if chosen is None else self.parameters[chosen].documents()
                return {
                    "names": names,
                    "name": chosen,
                    "rows": rows,
                    "seen": 0 if chosen is None else self.parameters[chosen].seen,
                    "bad": self.bad,
                    "left_out": self.left_out,
                    "unread": self.left,
                }

        return version, make


class Distributions:
    """The histograms of recently used runs."""

    def __init__(self, folder: Folder, most: int = 4):
        self.folder, self.most = folder, most
        self._known: OrderedDict[Path, RunWeights] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> RunWeights:
        with self._lock:
            found = self._known.setdefault(path, RunWeights(self.folder, path))
            self._known.move_to_end(path)
            while len(self._known) > self.most:
                self._known.popitem(last=False)
            return found


def _row(line: bytes) -> tuple[str, Row] | None:
    """Return the parameter and histogram of a line; None if it is not such a row."""
    row = parsed(line) if len(line) <= LONGEST else None
    if not isinstance(row, dict):
        return None
    name, step, counts = row.get("name"), row.get("step"), row.get("counts")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        return None
    if not is_number(step) or abs(step) > 1 << 53:
        return None
    if not isinstance(counts, list) or not 0 < len(counts) <= MOST_BINS:
        return None
    statistics = tuple(_number(row.get(key)) for key in STATISTICS)
    low, high = statistics[2:]
    known = [_number(count) for count in counts]
    whole = [count for count in known if count is not None and count >= 0]
    if low is None or high is None or low > high or len(whole) < len(known):
        whole = []
    return name, Row(float(step), statistics, np.asarray(whole, np.float32))


def _number(value: Any) -> float | None:
    """Return a number that float32 can hold, in its digits; else None."""
    return float(f"{value:.7g}") if is_number(value) and abs(value) < 3e38 else None
