"""grpo.curriculum: which prompts a rollout may draw, by their difficulty.

    a column       the easiest share c of each source, by a number in each row (smaller is easier):
                   c = start + (1 − start) · step / grpo.curriculum_steps, until all are drawn from
    pass_rate      all but the prompts whose completions had a mean reward outside of
                   (grpo.pass_rate_low, grpo.pass_rate_high) when they were last sampled, at most
                   grpo.pass_rate_rest rollouts ago

A prompt that the plan draws and that is left out is replaced by another of its source, in an order keyed by (seed,
rollout); where none is left, it stays. So the prompts of a rollout are a pure function of (data, seed, rollout) and,
with pass_rate, of the measured rates, which are part of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bessemer.data import key_of, permute
from bessemer.errors import InputError, StorageError
from bessemer.rl.environments.base import Row
from bessemer.rl.rollout import GRPOTrainerConfig
from bessemer.storage.files import PASS_RATES
from bessemer.storage.weights import WeightFile, to_bytes

PASS_RATE = "pass_rate"


class Source(Protocol):
    """Prompts of one source (rl/prompts.py). `places`: the row of each prompt in its source."""

    number: int
    name: str
    columns: list[Row]
    places: list[int]

    def __len__(self) -> int: ...


class Curriculum(Protocol):
    """Which prompts rollout `number` may draw."""

    def allowed(self, source: Source, number: int) -> np.ndarray:
        """Return a bool per prompt of the source, (n,)."""


class ByColumn:
    """The easiest prompts at first. rollouts: after how many all prompts are drawn from."""

    def __init__(self, column: str, start: float, rollouts: float, sources: Sequence[Source]):
        self.start, self.rollouts = start, rollouts
        self.ranks: dict[int, np.ndarray] = {}
        for source in sources:
            values = [difficulty(row, column, f"{source.name} row {place}") for row, place in _rows(source)]
            ranks = np.empty(len(values), np.int64)
            ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
            self.ranks[source.number] = ranks

    def share(self, number: int) -> float:
        return min(1.0, self.start + (1 - self.start) * number / self.rollouts)

    def allowed(self, source: Source, number: int) -> np.ndarray:
        return self.ranks[source.number] < math.ceil(self.share(number) * len(source))


class ByPassRate:
    """Prompts that are neither solved nor hopeless, as last measured. `rates`: mean reward of a group of each prompt
    (n,) by source, NaN if it was never sampled; `when`: the rollout of it."""

    def __init__(self, low: float, high: float, rest: int, sources: Sequence[Source]):
        self.low, self.high, self.rest = low, high, rest
        self.sizes = {source.number: len(source) for source in sources}
        self.forget()

    def forget(self) -> None:
        self.rates = {number: np.full(size, np.nan) for number, size in self.sizes.items()}
        self.when = {number: np.zeros(size, np.int64) for number, size in self.sizes.items()}

    def allowed(self, source: Source, number: int) -> np.ndarray:
        rates, when = self.rates[source.number], self.when[source.number]
        settled = (rates <= self.low) | (rates >= self.high)  # NaN is neither
        return ~(settled & (number - when <= self.rest))

    def measure(
        self, number: int, chosen: Sequence[tuple[Source, int]], rewards: np.ndarray, kept: np.ndarray | None = None
    ) -> None:
        """Note the rewards of rollout `number`, (prompts · G,), group by group. kept: (prompts · G,) bool, those that
        were earned; a prompt without one is not measured. None: all."""
        grouped = rewards.reshape(len(chosen), -1)
        counted = np.ones(grouped.shape, bool) if kept is None else kept.reshape(grouped.shape)
        for (source, place), values, counts in zip(chosen, grouped, counted, strict=True):
            if counts.any():
                self.rates[source.number][place] = values[counts].mean()
                self.when[source.number][place] = number

    def to_bytes(self) -> bytes:
        """Return what is measured as safetensors."""
        arrays = {f"rates/{number}": values for number, values in self.rates.items()}
        return to_bytes(arrays | {f"when/{number}": values for number, values in self.when.items()}, {})

    def load(self, folder: Path) -> bool:
        """Continue with what a checkpoint holds; return False if it holds nothing for these prompts."""
        self.forget()
        path = PASS_RATES.path(folder)
        if not path.is_file():
            return False
        try:
            file = WeightFile(path)
            rates = {number: np.array(file.read(f"rates/{number}")) for number in self.sizes}
            when = {number: np.array(file.read(f"when/{number}")) for number in self.sizes}
        except (InputError, StorageError, ValueError, KeyError) as error:
            raise StorageError(f"the pass rates {path} cannot be read ({error}).") from error
        for number, found in rates.items():
            if found.dtype != np.float64 or when[number].dtype != np.int64 or found.ndim != 1:
                raise StorageError(f"the pass rates {path} of source {number} are {found.dtype} {found.shape}.")
            if when[number].shape != found.shape:
                raise StorageError(f"the pass rates {path} name {when[number].shape} rollouts for {found.shape} rates.")
        if any(len(rates[number]) != size for number, size in self.sizes.items()):
            return False
        self.rates, self.when = rates, when
        return True


def replaced(
    curriculum: Curriculum, chosen: Sequence[tuple[Any, int]], number: int, seed: int
) -> tuple[list[tuple[Any, int]], int]:
    """Return the prompts of rollout `number` with those left out replaced by others of their source, and how many."""
    kept, count = list(chosen), 0
    for source in {one.number: one for one, _ in chosen}.values():
        allowed = curriculum.allowed(source, number)
        places = [slot for slot, (one, _) in enumerate(chosen) if one is source]
        used = {chosen[slot][1] for slot in places}
        order = permute(np.arange(len(source)), len(source), key_of(seed, "curriculum", source.number, number))
        free = (int(place) for place in order if allowed[place] and place not in used)
        for slot in places:
            if not allowed[chosen[slot][1]]:
                other = next(free, None)
                if other is not None:
                    kept[slot], count = (source, other), count + 1
    return kept, count


def build_curriculum(
    settings: GRPOTrainerConfig, sources: Sequence[Source], steps: int, rollout_steps: int
) -> Curriculum | None:
    """Return the run's curriculum. steps: of the run; rollout_steps: of a rollout."""
    if settings.curriculum == "none":
        return None
    if settings.curriculum == PASS_RATE:
        if settings.pass_rate_low >= settings.pass_rate_high:
            raise InputError(
                f"grpo.pass_rate_low={settings.pass_rate_low:g} must be below grpo.pass_rate_high="
                f"{settings.pass_rate_high:g}."
            )
        return ByPassRate(settings.pass_rate_low, settings.pass_rate_high, settings.pass_rate_rest, sources)
    until = settings.curriculum_steps or max(1, steps // 2)
    return ByColumn(settings.curriculum, settings.curriculum_start, until / rollout_steps, sources)


def difficulty(row: Row, column: str, where: str) -> float:
    """Return the number in the column of a row."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        found = "lacks it" if column not in row else f"has {value!r:.40}"
        raise InputError(
            f"grpo.curriculum={column} needs a finite number in the column '{column}' of every row, and {where} "
            f"{found}. Add it, or use grpo.curriculum=pass_rate, which measures."
        )
    return float(value)


def _rows(source: Source) -> list[tuple[Row, int]]:
    return list(zip(source.columns, source.places, strict=True))
