"""How steps are shown: a rich bar on a terminal, plain lines in a file, JSON rows for programs, or tqdm."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bessemer.console import compact, duration
from bessemer.training.setup.compiled import Programs, programs_so_far


class ProgressBar(Protocol):
    """What `create_progress_bar` returns."""

    def update(self, step: int, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ShowsActivity(Protocol):
    """A progress bar that can also show activity besides the steps; optional."""

    def note(self, text: str) -> None: ...


def clock(seconds: float | None) -> str:
    """75 -> 1:15, 3675 -> 1:01:15."""
    if seconds is None:
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def facts(row: dict[str, Any]) -> str:
    """Return the numbers worth a glance, without unknown ones (MFU on an unknown chip); for a row that is not a
    step's, its first numbers under their own names."""
    if "loss" not in row:
        return "  ".join(f"{name} {compact(value)}" for name, value in numbers(row).items())
    parts = [f"loss {float(row.get('loss_smooth') or row['loss']):.4f}"]
    if row.get("reward") is not None:
        parts.append(f"reward {float(row['reward']):.3f}")
    if row.get("time/tok_per_s") is not None:
        parts.append(f"{compact(row['time/tok_per_s'])} tok/s")
    if row.get("time/mfu") is not None:
        parts.append(f"MFU {row['time/mfu']:.1%}")
    if row.get("mem/peak_gib") is not None:
        parts.append(f"{row['mem/peak_gib']:.1f} GiB")
    if "time/eta" in row:
        parts.append(f"left {clock(row['time/eta'])}")
    return "  ".join(parts)


SHOWN = 4
"""Numbers of a row without a loss that a bar has room for."""


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the first few values of a row that are single numbers, also of a device."""
    found = {
        name: float(value)
        for name, value in row.items()
        if name != "step" and (isinstance(value, int | float) or getattr(value, "size", 0) == 1)
    }
    return dict(list(found.items())[:SHOWN])


def as_json(value: Any) -> Any:
    """Return an array as numbers; what JSON has no form for as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class NoBar:
    def update(self, step: int, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class RichBar:
    """One line that fits 80 columns."""

    def __init__(self, console: Console, total: int, description: str):
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self.task = self.progress.add_task(description, total=total, facts="")
        self.facts = ""
        self.progress.start()

    def update(self, step: int, row: dict[str, Any]) -> None:
        self.facts = facts(row) if row else self.facts
        self.progress.update(self.task, completed=step, facts=self.facts)

    def note(self, text: str) -> None:
        """Show `text` in place of the facts, until the next step."""
        self.progress.update(self.task, facts=text)

    def close(self) -> None:
        self.progress.stop()


class PlainLines(NoBar):
    """One line per report: for files, pipes and continuous integration."""

    PATIENCE = 10.0  # seconds without a line after which an activity gets one

    def __init__(self, say: Callable[[str], None], total: int, description: str):
        self.say, self.total, self.description = say, total, description
        self._last = time.monotonic()

    def update(self, step: int, row: dict[str, Any]) -> None:
        if row:
            self._line(f"{self.description} {step:>6}/{self.total}  {facts(row)}")

    def note(self, text: str) -> None:
        if time.monotonic() - self._last >= self.PATIENCE:
            self._line(f"           {text}")

    def _line(self, text: str) -> None:
        self._last = time.monotonic()
        self.say(text)


class JsonLines(NoBar):
    """One line of JSON per report, on stdout."""

    def update(self, step: int, row: dict[str, Any]) -> None:
        if row:
            print(json.dumps(row, default=as_json), flush=True)


class TqdmBar:
    def __init__(self, total: int, description: str):
        from tqdm import tqdm

        self.bar = tqdm(total=total, desc=description, file=sys.stderr)

    def update(self, step: int, row: dict[str, Any]) -> None:
        if row:
            self.bar.set_postfix_str(facts(row), refresh=False)
        self.bar.update(step - self.bar.n)

    def note(self, text: str) -> None:
        self.bar.set_postfix_str(text)

    def close(self) -> None:
        self.bar.close()


def make_progress(kind: str, console: Console, say: Callable[[str], None], total: int, desc: str) -> ProgressBar:
    """`kind` is the setting logging/progress; auto looks at the terminal."""
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "rich":
        return RichBar(console, total, desc)
    if kind == "tqdm":
        return TqdmBar(total, desc)
    if kind == "json":
        return JsonLines()
    return PlainLines(say, total, desc) if kind == "plain" else NoBar()


SLOW = 2.0
"""Seconds of a first step that a forecast is made from; a shorter one is mostly one-time work."""


class StartUp:
    """Where the time before the first step goes: `lap(name)` adds the time since the last lap to a part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.compiled = Programs()
        self.done = False
        self.elsewhere = 0.0  # seconds that the run of `init=recipe:NAME` took before this trainer was made
        self._made = self._last = self._first = time.monotonic()
        self._programs = programs_so_far()

    def began(self, moment: float) -> None:
        """Record that the program began at `moment` (of time.monotonic), before the trainer was made."""
        self._first = moment
        self.parts = {"imports and devices": max(0.0, self._made - moment - self.elsewhere), **self.parts}

    @property
    def age(self) -> float:
        """Seconds since the program began, or, if that is unknown, since the trainer was made."""
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
        """Return a note if `steps` like the first would take more than an hour: reports may be many minutes apart."""
        one = self.parts.get("first step", 0.0)
        if one < SLOW or one * steps < 3600:
            return None
        return (
            f"at the pace of the first step the run takes {duration(one * steps)} ({steps:,} steps of {one:.0f} s). "
            "Fewer training.steps, a smaller model.depth or a shorter architecture.block_size take less; "
            "`bessemer plan` with the same arguments estimates it beforehand"
        )

    def facts(self) -> dict[str, Any] | None:
        """Return the parts for facts.json; None until the first step is done."""
        if not self.done:
            return None
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        return {"seconds": round(self.seconds, 3), "parts": parts, "cache": self.compiled.words}
