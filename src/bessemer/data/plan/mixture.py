"""Mixtures: `Sampling` names a source, `Shares` counts the rows drawn of each."""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from bessemer.data.rows.rows import DatasetStyle
from bessemer.errors import InputError, nearest


@dataclass(frozen=True)
class Sampling:
    """One source of a mixture. `name`: a registered dataset, a store directory, or a file or glob; `rate`: its weight
    beside the others; `style`: None is the objective's, PMD where it has none; `suffix` names a variant of the store
    (appended to a store directory's name)."""

    name: str
    rate: float = 1.0
    style: DatasetStyle | None = None
    suffix: str = ""

    @classmethod
    def from_string(cls, text: str) -> Sampling:
        """`name` or `name:STYLE`."""
        name, colon, style = text.rpartition(":")
        if colon and style.upper() in DatasetStyle.__members__:
            return cls(name, style=DatasetStyle[style.upper()])
        close = nearest(style.upper(), list(DatasetStyle.__members__), 0.7) if colon else None
        if close and style.isupper():
            raise InputError(f"dataset '{text}': unknown style '{style}'. Did you mean '{close}'?")
        return cls(text)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Return what identifies the stream of rows: equal for samplings that differ only in their rate."""
        return (self.name, self.row_style.name, self.suffix)

    @property
    def row_style(self) -> DatasetStyle:
        """Return the row style, with the default applied."""
        return self.style or DatasetStyle.PMD


def shares_of(mixture: Sequence[Sampling]) -> list[float]:
    """Return the share of each source in the mixture: its rate over the sum of all. Rates that sum to 1 are themselves,
    to the bit, so that a run is named as before."""
    total = math.fsum(sampling.rate for sampling in mixture)
    normal = abs(total - 1) <= 1e-6
    return [sampling.rate if normal else sampling.rate / total for sampling in mixture]


def check_mixture(mixture: Sequence[Sampling]) -> None:
    """Raise InputError unless all rates are above 0 and no source occurs twice."""
    if not mixture:
        raise InputError("training.dataset is empty: name at least one dataset.")
    for sampling in mixture:
        if not sampling.name.strip():
            raise InputError(
                "training.dataset names nothing: give a text file, a glob, a prepared directory or a registered name "
                "such as python-stdlib."
            )
        if not (math.isfinite(sampling.rate) and sampling.rate > 0):
            raise InputError(f"dataset '{sampling.name}' has rate {sampling.rate}; rates are above 0.")
    seen: set[tuple[str, str, str]] = set()
    for sampling in mixture:
        if sampling.identity in seen:
            raise InputError(f"dataset '{sampling.name}' appears twice in one mixture; add its rates up.")
        seen.add(sampling.identity)


# How many rows of each source are drawn before any step.
#
# With rates r_s(t) and B rows per step, the ideal count is x_s(t) = B Σ_{u<t} r_s(u). The counts C_s(t) are integers
# that never decrease, sum to tB, and are floor(x_s) or ceil(x_s) at every step. Rounding by largest remainder may
# shrink a count, so the remainder is scheduled: row j of a source may be drawn once x_s > j − 1 and must be once
# x_s >= j; of those that may, the ones due first are. Earliest-deadline-first meets every deadline if any order does.
#
# All numbers are integers (rates over a common denominator), so nothing drifts. Constant rates repeat after a period,
# so any step is found at once; elsewhere a table is extended up to the step asked for.


GRID = 1 << 24  # resolution of a cross-fade
FOREVER = 1 << 62


class Span:
    """Steps [start, stop) during which a mixture holds, or fades from `before` to `after`.

    `before`, `after`: integer weight of each source, of the same sum; `fades`: for each step the part of
    `after`, of GRID, None = constant.
    """

    def __init__(self, start: int, stop: int, before: list[int], after: list[int], fades: list[int] | None) -> None:
        self.start, self.stop = start, stop
        self.base: list[int] = []  # ideal counts at `start`, in units of 1 / denominator
        self.constant = [w * GRID for w in before] if fades is None else None
        self.sums: list[list[int]] = []  # of a fade: ideal counts of each source at each step since start
        if fades is not None:
            for old, new in zip(before, after, strict=True):
                sums = [0]
                for part in fades:
                    sums.append(sums[-1] + old * (GRID - part) + new * part)
                self.sums.append(sums)

    def weight(self, source: int, step: int) -> int:
        """Return the weight of the source at one step."""
        if self.constant is not None:
            return self.constant[source]
        sums, at = self.sums[source], step - self.start
        return sums[at + 1] - sums[at]

    def ideal(self, source: int, step: int, batch: int) -> int:
        passed = step - self.start
        gained = self.constant[source] * passed if self.constant is not None else self.sums[source][passed]
        return self.base[source] + batch * gained


class _Table:
    """Counts before each step from `begin` on, as far as they have been asked for."""

    def __init__(self, begin: int, counts: list[int]) -> None:
        self.begin, self.last = begin, counts
        self.flat = array("q", counts)


class Shares:
    """Cumulative counts of each source for mixtures over time.

    stages: rates of all sources in each stage (0 = absent), each summing to 1; boundaries: the steps at which
    a next stage begins; fade: name of the shape, or "none"; share: width of a fade, as a share of the shorter
    neighbor; last: the step at which the last stage ends, when known (it bounds the last fade).
    """

    def __init__(
        self,
        stages: Sequence[Sequence[float]],
        boundaries: Sequence[int],
        batch_size: int,
        fade: str = "none",
        share: float = 0.0,
        last: int | None = None,
    ) -> None:
        self.batch = batch_size
        weights, total = _common(stages)
        self.denominator = total * GRID
        self.sources = len(weights[0])
        self.spans = _spans(weights, list(boundaries), fade, share, last)
        self.spans[0].base = [0] * self.sources
        for earlier, later in zip(self.spans, self.spans[1:], strict=False):
            later.base = [earlier.ideal(s, later.start, batch_size) for s in range(self.sources)]
        self.period = self._period()
        self._lock = threading.Lock()  # the prefetching thread and the loop both ask
        stop = self.spans[0].stop
        self._head = _Table(0, [0] * self.sources)
        self._tail = self._head  # after the last whole period of the first span
        if not self.period:
            self._begin = 0
        elif stop == FOREVER:
            self._begin = FOREVER
        else:
            self._begin = stop - stop % self.period
            counts = [self._ideal(s, self._begin) // self.denominator for s in range(self.sources)]
            self._tail = _Table(self._begin, counts)

    def rates(self, step: int) -> np.ndarray:
        """(sources,) the mixture at one step."""
        span = self._span(step)
        return np.array([span.weight(s, step) / self.denominator for s in range(self.sources)])

    def before(self, step: int) -> np.ndarray:
        """(sources,) int64: rows drawn of each source before the step."""
        if self.sources == 1:
            return np.array([step * self.batch], np.int64)
        if step >= self._begin:
            return self._read(self._tail, step)
        whole, within = divmod(step, self.period)
        counts = self._read(self._head, within)
        return counts + whole * self._read(self._head, self.period) if whole else counts

    def _read(self, table: _Table, step: int) -> np.ndarray:
        at = (step - table.begin) * self.sources
        with self._lock:
            while len(table.flat) <= at:
                table.last = self._next(table.last, table.begin + len(table.flat) // self.sources)
                table.flat.extend(table.last)
            return np.array(table.flat[at : at + self.sources], np.int64)

    def _period(self) -> int:
        """Return the steps after which all ideal counts of the first span are integers, so the dealing repeats."""
        assert self.spans[0].constant is not None
        gains = [self.batch * w for w in self.spans[0].constant]
        period = math.lcm(*(self.denominator // math.gcd(self.denominator, g) for g in gains))
        return period if period < self.spans[0].stop else 0

    def _span(self, step: int) -> Span:
        return next(span for span in self.spans if step < span.stop)

    def _ideal(self, source: int, step: int) -> int:
        return self._span(step).ideal(source, step, self.batch)

    def _next(self, previous: list[int], step: int) -> list[int]:
        """Counts before `step`, from those before `step − 1`."""
        span = self._span(step)
        ideal = [span.ideal(s, step, self.batch) for s in range(self.sources)]
        counts = [max(c, x // self.denominator) for c, x in zip(previous, ideal, strict=True)]
        spare = step * self.batch - sum(counts)
        if spare:
            may = [s for s in range(self.sources) if counts[s] * self.denominator < ideal[s]]
            if len(may) > spare:
                may.sort(key=lambda s: (self._due(s, counts[s] + 1, step), s))
            for source in may[:spare]:
                counts[source] += 1
        return counts

    def _due(self, source: int, count: int, step: int) -> int:
        """Return the first step before which the source's `count`-th row must have been drawn."""
        wanted = count * self.denominator
        for span in self.spans:
            if span.stop <= step or (span.stop < FOREVER and span.ideal(source, span.stop, self.batch) < wanted):
                continue
            if span.constant is not None:
                gain = span.constant[source] * self.batch
                return span.start - (span.base[source] - wanted) // gain if gain else FOREVER
            sums = span.sums[source]
            return span.start + bisect_left(sums, -((span.base[source] - wanted) // self.batch))
        return FOREVER


def _common(stages: Sequence[Sequence[float]]) -> tuple[list[list[int]], int]:
    """Return the rates as integer weights over one denominator; via `str`, so 0.1 is 1/10."""
    exact = [[Fraction(str(float(rate))) for rate in stage] for stage in stages]
    normal = [[rate / sum(stage) for rate in stage] for stage in exact]
    total = math.lcm(*(rate.denominator for stage in normal for rate in stage))
    return [[int(rate * total) for rate in stage] for stage in normal], total


def _spans(weights: list[list[int]], boundaries: list[int], fade: str, share: float, last: int | None) -> list[Span]:
    edges = [0, *boundaries, FOREVER if last is None else max(last, boundaries[-1] if boundaries else 0)]
    spans: list[Span] = []
    begun = 0
    for stage, boundary in enumerate(boundaries):
        shorter = min(boundary - edges[stage], edges[stage + 2] - boundary)
        width = 0 if fade == "none" else int(share * shorter)
        start = boundary - width // 2
        spans.append(Span(begun, start, weights[stage], weights[stage], None))
        begun = start
        if width:
            fades = [round(GRID * fade_at(fade, (i + 0.5) / width)) for i in range(width)]
            spans.append(Span(start, start + width, weights[stage], weights[stage + 1], fades))
            begun = start + width
    spans.append(Span(begun, FOREVER, weights[-1], weights[-1], None))
    return [span for span in spans if span.stop > span.start]


FADES = ("none", "linear", "cosine", "sigmoid")


def fade_at(shape: str, u: float) -> float:
    """Return the weight of the later mixture at u in [0, 1] of the fade: 0 at 0, 1/2 in the middle, 1 at 1."""
    if shape == "linear":
        return u
    if shape == "cosine":
        return (1 - math.cos(math.pi * u)) / 2
    edge = 1 / (1 + math.exp(6))  # sigmoid over ±6, stretched to reach 0 and 1
    return (1 / (1 + math.exp(-12 * (u - 0.5))) - edge) / (1 - 2 * edge)
