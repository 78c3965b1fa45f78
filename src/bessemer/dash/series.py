"""Charts and curves of the page: one metric against an axis, smoothed, cut to the visible range, thinned without losing
spikes.

smoothed_t = m_t / (1 - s^t),  m_t = s·m_{t-1} + (1 - s)·y_t        (debiased, over all points before thinning)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from bessemer.dash.columns import Columns
from bessemer.report.summary import ALL_STEPS, OLDER_NAMES


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
