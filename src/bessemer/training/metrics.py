"""From device values to metrics rows: read late and in bulk, one row per report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from bessemer.training.feed import fetch, start_copy
from bessemer.training.settings import GuardSettings
from bessemer.training.state import WEIGHTS_FINITE, LoopState, Unstable, described

LAG = 2
"""Steps by which a report is read late, so that the device has work queued while Python reads."""

MOST_UNREAD = 32
"""Completed steps after which values are read although no report is due, so that a bad run ends soon."""

INTERNAL = ("finite", WEIGHTS_FINITE, "clipped", "target_tokens", "spike", "spike_limit")
COUNTED = ("loss", *INTERNAL)


@dataclass
class StepLog:
    """Collects each step's device values; `drain` reads them, updates the loop state and makes the due rows."""

    loop: LoopState
    describe: Callable[[int], dict[str, Any]]
    clock: StepClock
    guard: GuardSettings
    say: Callable[[str], None]
    _pending: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _due: list[int] = field(default_factory=list)

    def add(self, step: int, meta: dict[str, Any], report: bool) -> None:
        """Keep what the loop state needs of every step, and everything of a step that is reported."""
        kept = meta if report else {name: meta[name] for name in COUNTED if name in meta}
        start_copy(kept)
        self._pending.append((step, kept))
        if report:
            self._due.append(step)

    def ready(self, step: int) -> int | None:
        """Return the step up to which values should be read now: of a due report, or when many have piled up."""
        if self._due and step >= self._due[0] + LAG:
            return self._due[0]
        return step - LAG if len(self._pending) >= MOST_UNREAD + LAG else None

    def drain(self, upto: int | None = None) -> list[dict[str, Any]]:
        """Read what is pending (of steps up to `upto`) in one `fetch`; return the rows that were due, oldest first."""
        reading = [(step, meta) for step, meta in self._pending if upto is None or step <= upto]
        if not reading:
            return []
        self._pending = self._pending[len(reading) :]
        rows: list[dict[str, Any]] = []
        for (step, _), meta in zip(reading, fetch([meta for _, meta in reading]), strict=True):
            self._take(step, meta, rows)
            if step in self._due:
                self._due.remove(step)
                rows.append(self._row(step, meta))
        return rows

    def _take(self, step: int, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Count one step and warn of a bad one. Raise Unstable if the run cannot continue from it."""
        loss, finite, spike = float(meta["loss"]), bool(meta["finite"]), bool(meta.get("spike", False))
        updated = finite and not (spike and self.guard.spike_action != "warn")
        self.loop.count(loss, float(meta["target_tokens"]), updated, bool(meta["clipped"]), spike)
        if not meta[WEIGHTS_FINITE]:
            raise Unstable(
                step,
                f"after step {step} (loss {loss:.5g}) the weights hold NaN or infinite values; they were not saved.",
                rows,
            )
        if finite and not spike:
            return
        limit = float(meta["spike_limit"]) if spike else None
        what = f"step {step}: the loss is {described(loss, finite, limit)}"
        if float(meta["target_tokens"]) == 0:
            what = f"step {step}: no token of the batch is a target (every one is masked), so there is no loss"
        if spike and self.guard.rolls_back:
            raise Unstable(step, f"{what}.", rows)
        count = self.loop.bad_steps_in_row
        if count >= self.guard.max_bad_steps:
            raise Unstable(
                step,
                f"{what}; {count} steps in a row gave no update (guard.max_bad_steps), so the weights are still "
                f"those of step {step - count}.",
                rows,
            )
        updates = f"{step - self.loop.skipped_steps} updates in {step} steps"
        self.say(f"warning: {what}" + ("" if updated else f"; its update is left out ({updates})"))

    def _row(self, step: int, meta: dict[str, Any]) -> dict[str, Any]:
        row = {"step": step, **self.describe(step)}
        row |= {name: float(value) for name, value in meta.items() if name not in INTERNAL}
        row |= {
            "loss_smooth": self.loop.loss_smooth,
            "target_tokens": self.loop.target_tokens,
            "skipped_steps": self.loop.skipped_steps,
            "clip_share": self.loop.clipped_steps / max(1, self.loop.steps_counted),
        }
        if "spike" in meta:
            row |= {"spikes": self.loop.spikes, "rollbacks": self.loop.rollbacks}
        return row | self.clock.row(step)


class Waits(NamedTuple):
    """Seconds since the loop started spent waiting for data, and for rollouts (None: there are none)."""

    data: float
    rollouts: float | None

    @classmethod
    def so_far(cls, waited: float, rollouts: float | None) -> Waits:
        """`waited`: the seconds that batches were waited for, those of rollouts included."""
        return cls(waited - (rollouts or 0.0), rollouts)


@dataclass
class StepClock:
    """Measures the time of steps, from completion to completion (time/*): outside the bit-for-bit promise.

    Steps are dispatched ahead, so the time of a dispatch means nothing. The loop waits for a step's completion anyway,
    two steps later, and marks the reported ones then. Where several short steps completed before one look, the moments
    are those of the looks, so speeds are averaged over rows that together take SPAN (not with rollouts). A row's
    time/step_ms is its own, so that rows add up to time/all_steps. The first ten steps of a process are left out of
    time/total, as they include cold caches.
    """

    WARM_UP: ClassVar = 10
    SPAN: ClassVar = 1.0  # seconds that a speed is averaged over at least: steps of 10 ms were shown at 3M tokens/s

    loop: LoopState
    tokens_per_step: int
    steps: int
    flops: Callable[[bool], float | None]  # BaseTrainer.flops_share
    wall: Callable[[], float]  # seconds of all starts so far
    _paused: float = 0.0
    _first: int = 0
    _marks: dict[int, tuple[float, Waits]] = field(default_factory=dict)
    _last: int = 0
    _rows: deque[tuple[int, float]] = field(default_factory=deque)  # steps and moments that a speed can start from

    def start(self, step: int, waits: Waits) -> None:
        """Begin to measure, `step` steps into the run."""
        self._first = self._last = step
        self.mark(step, waits)

    def pause(self, seconds: float) -> None:
        """Exclude validation, saving and evaluation from the step time."""
        self._paused += seconds

    def mark(self, step: int, waits: Waits) -> None:
        """Note that step `step` is completed."""
        self._marks[step] = (time.monotonic() - self._paused, waits)

    def row(self, step: int) -> dict[str, float | None]:
        """Return time/* over the steps since the last row. time/train_s: of a step, without its rollout."""
        (begun, before), (now, waits) = self._marks.pop(self._last), self._marks[step]
        count = step - self._last
        seconds = max(1e-9, now - begun)
        waited = waits.data - before.data
        counted = max(0, step - max(self._last, self._first + self.WARM_UP))
        self.loop.training_seconds += seconds * counted / count
        self.loop.all_seconds += seconds
        self.loop.useful_seconds += max(0.0, seconds - waited)
        if waits.rollouts is not None:
            self._rows.clear()  # steps with and without a rollout differ, and the parts of a row add up
        self._rows.append((self._last, begun))
        while len(self._rows) > 1 and now - self._rows[1][1] >= self.SPAN:
            self._rows.popleft()
        first, since = self._rows[0]
        step_seconds = max(1e-9, now - since) / (step - first)
        self._last = step
        rate = self.tokens_per_step / step_seconds
        row = {
            "time/step_ms": seconds / count * 1e3,
            "time/tok_per_s": rate,
            "time/mfu": _ratio(rate, self.flops(False)),
            "time/mfu_causal": _ratio(rate, self.flops(True)),
            "time/data_wait_pct": 100 * waited / seconds,
            "time/total": self.loop.training_seconds,
            "time/all_steps": self.loop.all_seconds,
            "time/goodput": self.loop.useful_seconds / max(self.loop.useful_seconds, self.wall(), 1e-9),
            "time/eta": step_seconds * (self.steps - step),
        }
        if waits.rollouts is not None and before.rollouts is not None:
            row["time/train_s"] = (seconds - waited - (waits.rollouts - before.rollouts)) / count
        return row


def _ratio(rate: float, flops_share: float | None) -> float | None:
    return None if flops_share is None else rate * flops_share
