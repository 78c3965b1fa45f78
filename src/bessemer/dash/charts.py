"""What the page draws: curves of metrics, and histograms of parameters.

Charts and curves show one metric against an axis, smoothed, cut to the visible range, thinned without losing spikes.

    smoothed_t = m_t / (1 - s^t),  m_t = s·m_{t-1} + (1 - s)·y_t        (debiased, over all points before thinning)

Histograms of parameters over steps come from weights.jsonl of callbacks=[weight_distribution]. Memory does not grow
with the file: of each parameter every `stride`-th row and the newest are kept, and the stride doubles whenever
`MOST_STEPS` is reached. Invalid lines are counted; an invalid number is a gap.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.dash.files import Folder, parsed
from bessemer.dash.metrics import Columns, Growing
from bessemer.report.summary import ALL_STEPS, OLDER_NAMES, is_number

# --- curves ---


@dataclass(frozen=True)
class Group:
    """A chart: its title, the metrics drawn in it (* matches any), and its axis."""

    title: str
    names: tuple[str, ...]
    unit: str = ""
    log: bool = False
    smooth: bool = True  # whether the page's smoothing applies
    fold: bool = False  # for several runs: one chart with a choice of the metric, not one per metric
    alike: bool = False  # curves of one shape: a choice of the metric for one run, too

    def document(self, names: list[str], section: str = "Details") -> dict[str, Any]:
        several = len(names) > 1
        return {
            **asdict(self),
            "names": names,
            "fold": self.fold and several,
            "alike": self.alike and several,
            "section": section,
        }


SECTIONS = ("Results", "Optimization", "Speed and memory", "Details")
"""Headings of the page, in order. A chart that no group knows is a detail."""

GROUPS = {
    "Results": (
        Group("Loss", ("loss", "loss_smooth", "val_loss"), "nats per token"),
        Group("Bits per byte", ("val_bpb",), "held-out text", smooth=False),
        Group("CORE", ("core_metric",), smooth=False),
        Group("Reward", ("reward", "val_reward", "reward/*", "val_reward/*")),
        Group("Pairs ranked correctly", ("pref_acc", "val_pref_acc"), "share of pairs"),
        Group("Margin", ("margin", "val_margin"), "chosen minus rejected"),
        Group("KL to the reference", ("kl", "kl_nll", "val_kl"), "nats per token"),
        Group("Completion length", ("completion_len", "val_completion_len"), "tokens"),
    ),
    "Optimization": (
        Group("Gradient norm", ("grad_norm",), "before clipping", log=True),
        Group("Clipped gradients", ("clip_share",), "share of steps so far"),
        Group("Entropy", ("entropy",), "nats"),
        Group("Reward spread", ("reward_std",), "standard deviation within a group"),
        Group("Groups without signal", ("flat_groups",), "share of groups whose rewards are all equal"),
        Group("Truncated completions", ("truncated",), "share of completions"),
        Group("Clipped ratios", ("clip_frac",), "share of tokens"),
        Group("Skipped steps", ("skipped_steps",), smooth=False),
        Group("Learning rate", ("lr", "lr/*"), smooth=False, fold=True, alike=True),
    ),
    "Speed and memory": (
        Group("Throughput", ("time/tok_per_s",), "tokens per second"),
        Group("MFU", ("time/mfu", "time/mfu_causal"), "share of the peak"),
        Group("Memory", ("mem/peak_gib",), "peak GiB of a device", smooth=False),
        Group("Step time", ("time/step_ms",), "milliseconds"),
        Group(
            "Parts of a step", ("time/rollout_s", "time/score_s", "time/reward_s", "time/train_s"), "seconds", fold=True
        ),
        Group("Waiting for data", ("time/data_wait_pct",), "% of the time"),
        Group("Goodput", ("time/goodput",), "share of the wall clock spent training"),
    ),
    "Details": (
        Group("Log-probabilities", ("logps/*", "val_logps/*"), "nats per answer", fold=True),
        Group("Sampler against trainer", ("logprob_gap", "logprob_gap_max"), "nats per token"),
        Group("Experts replayed that the trainer would not choose", ("routed_apart",), "share of tokens and layers"),
        Group("Importance ratios", ("ratio_p01", "ratio_p50", "ratio_p99"), "trainer's probability over the sampler's"),
        Group("Effective sample size", ("ess", "importance_capped"), "share of tokens"),
        Group("Token loss", ("nll",), "nats per token, auxiliary losses left out"),
    ),
}
"""Section → its charts."""

HIDDEN = (
    "step",
    "tokens",
    "target_tokens",
    "epoch",
    "total_training_flops",
    "time/total",
    "time/all_steps",
    "time/eta",
    "lrm",
    "min_val_bpb",
    "val_bpb_se",
)
"""Not drawn by themselves: they grow with the step, or repeat another chart."""


def charts_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts of metrics with these names: known groups first, then one chart for each other name."""
    left = [name for name in sorted(set(names)) if name not in HIDDEN]
    charts = []
    of_pairs = not {"pref_acc", "reward"}.isdisjoint(left)  # then the loss is not per token
    for section in SECTIONS:
        for group in GROUPS[section]:
            if of_pairs and group.title == "Loss":
                group = replace(group, unit="of the objective")
            own = [name for form in group.names for name in left if fnmatchcase(name, form)]
            if own:
                charts.append(group.document(own, section))
                left = [name for name in left if name not in own]
    return [*charts, *(Group(name, (name,)).document([name]) for name in left)]


AXES = {"step": "step", "tokens": "tokens", "time": ALL_STEPS, "flops": "total_training_flops"}
MOST_POINTS = 4000
MOST_SMOOTHING = 0.999


@dataclass(frozen=True)
class View:
    """What is drawn: the axis, its range (None: all), maximum points, and the smoothing."""

    axis: str = "step"
    low: float | None = None
    high: float | None = None
    points: int = 800
    smoothing: float = 0.0


def curve(columns: Columns, name: str, view: View) -> dict[str, Any] | None:
    """Return {"x", "y"} and, with smoothing, {"smooth": {"x", "y"}}; None if the run has no such metric or axis."""
    x = axis_of(columns, AXES[view.axis])
    if name not in columns or x is None:
        return None
    y = columns[name]
    known = np.isfinite(y) & np.isfinite(x)
    x, y = x[known], y[known].astype(np.float64)
    smooth = smoothed(y, view.smoothing) if view.smoothing else None
    part = _range(x, view)
    found: dict[str, Any] = _points(x[part], y[part], view.points)
    if smooth is not None:
        found["smooth"] = _points(x[part], smooth[part], view.points)
    return found


def axis_of(columns: Columns, name: str) -> np.ndarray | None:
    """Return an axis without gaps; a row without it has its older name's value, if any. None: the run has neither."""
    found = [columns[known] for known in (name, OLDER_NAMES.get(name, name)) if known in columns]
    if not found:
        return None
    return carried(np.where(np.isfinite(found[0]), found[0], found[-1]))


def points_of(columns: Columns, name: str) -> list[tuple[float, float]]:
    """Return (step, value) of a metric, thinned; [] if the run does not have it."""
    found = curve(columns, name, View())
    return [] if found is None else list(zip(found["x"], found["y"], strict=True))


def carried(x: np.ndarray) -> np.ndarray:
    """Return an axis without gaps: a row without a value (a validation's) has that of the row before it."""
    known = np.isfinite(x)
    if known.all():
        return x
    last = np.maximum.accumulate(np.where(known, np.arange(len(x)), -1))
    return np.where(last >= 0, x[np.maximum(last, 0)], np.nan)


def smoothed(y: np.ndarray, share: float) -> np.ndarray:
    """Apply the formula above one block at a time. Within a block the recursion is a cumulative sum of y over powers of
    the share; blocks are short enough that these do not underflow (e^-300)."""
    share = min(share, MOST_SMOOTHING)
    block = max(1, min(1 << 16, int(-300 / np.log(share))))
    powers = share ** np.arange(1, block + 1)
    result, mean = np.empty_like(y), 0.0
    for start in range(0, len(y), block):
        part = y[start : start + block]
        power = powers[: len(part)]
        result[start : start + len(part)] = power * (mean + np.cumsum(part / power) * (1 - share))
        mean = float(result[start + len(part) - 1])
    return result / -np.expm1(np.arange(1, len(y) + 1) * np.log(share))


def _range(x: np.ndarray, view: View) -> slice:
    """Return the points in the range and one on each side, so that the line reaches the edges."""
    inside = np.ones(len(x), bool)
    if view.low is not None:
        inside &= x >= view.low
    if view.high is not None:
        inside &= x <= view.high
    places = np.flatnonzero(inside)
    if not len(places):
        return slice(0, 0)
    return slice(max(0, int(places[0]) - 1), int(places[-1]) + 2)


def thinned(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `points`: the least and greatest of points/2 - 1 equal pieces, the first, and the last."""
    if len(y) <= points:
        return x, y
    pieces = max(1, points // 2 - 1)
    size = -(-len(y) // pieces)
    starts = np.arange(0, len(y), size)
    padded = np.concatenate([y, np.full(size * len(starts) - len(y), y[-1])]).reshape(len(starts), size)
    chosen = np.concatenate([[0], starts + padded.argmin(1), starts + padded.argmax(1), [len(y) - 1]])
    chosen = np.unique(np.minimum(chosen, len(y) - 1))
    return x[chosen], y[chosen]


def _points(x: np.ndarray, y: np.ndarray, points: int) -> dict[str, list[float]]:
    x, y = thinned(x, y, min(max(points, 10), MOST_POINTS))
    return {"x": _short(x, 12), "y": _short(y, 7)}


def _short(values: np.ndarray, digits: int) -> list[float]:
    """Return values with as many digits as float32 holds: a third of the bytes."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


# --- histograms of parameters ---


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
