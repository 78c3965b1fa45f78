"""Which prompts a rollout trains on: by their difficulty (grpo.curriculum), and redrawn in place of flat groups.

grpo.curriculum says which prompts a rollout may draw:

    a column       the easiest share c of each source, by a number in each row (smaller is easier):
                   c = start + (1 − start) · step / grpo.curriculum_steps, until all are drawn from
    pass_rate      all but the prompts whose completions had a mean reward outside of
                   (grpo.pass_rate_low, grpo.pass_rate_high) when they were last sampled, at most
                   grpo.pass_rate_rest rollouts ago

A prompt that the plan draws and that is left out is replaced by another of its source, in an order keyed by (seed,
rollout); where none is left, it stays. So the prompts of a rollout are a pure function of (data, seed, rollout) and,
with pass_rate, of the measured rates, which are part of a checkpoint.

Dynamic sampling (DAPO, arXiv 2503.14476): groups of equal rewards are replaced by groups of other prompts. Round r of
rollout n draws as many prompts as groups are still flat, from a stream that is a pure function of (data, seed, n, r),
without those that the rollout has drawn already. A new group that is not flat takes the place of the first flat one.
After `grpo.resample` rounds the groups that are still flat stay: their advantages are 0, and they count in the
denominator. Rewards are those that process 0 computed, so all processes decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from bessemer.data import key_of, permute
from bessemer.errors import InputError, StorageError
from bessemer.generate import Result, Sample
from bessemer.objectives.grpo import GrpoSettings, SampledSettings
from bessemer.rl.environments.base import Row
from bessemer.rl.rollout import GRPOTrainerConfig
from bessemer.storage.files import PASS_RATES
from bessemer.storage.weights import WeightFile, to_bytes

# --- curriculum ---


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


# --- dynamic sampling ---


S = TypeVar("S", bound=Source)


class Groups(NamedTuple):
    """Groups of completions with their rewards. `results`: of each group; `rewards`: by name, (groups, G); `flat`:
    which groups have equal rewards, (groups,)."""

    results: list[list[Result]]
    rewards: dict[str, np.ndarray]
    flat: np.ndarray

    @property
    def samples(self) -> list[Sample]:
        return [sample for results in self.results for result in results for sample in result.samples]


@dataclass
class Resampled:
    """The groups of a rollout after all rounds, and what they cost: groups drawn and rounds in all, and the sum of the
    rewards of all groups drawn."""

    groups: Groups
    drawn: int
    rounds: int
    reward_sum: float

    @property
    def metrics(self) -> dict[str, float]:
        """`resample/reward` is the policy's mean reward, before flat groups are left out."""
        size = self.groups.rewards["reward"].shape[1]
        return {
            "flat_groups": float(self.groups.flat.mean()),
            "resample/rounds": float(self.rounds),
            "resample/drawn": float(self.drawn),
            "resample/discarded": float(self.drawn - len(self.groups.results)),
            "resample/reward": self.reward_sum / (self.drawn * size),
        }


def check_resampling(rounds: int, policy: SampledSettings) -> None:
    """Raise InputError where flat groups cannot be replaced, or teach something."""
    if rounds == 0:
        return
    if not isinstance(policy, GrpoSettings):
        raise InputError(
            "grpo.resample replaces groups of equal rewards, and with a teacher no reward is trained on: leave it out."
        )
    if policy.offline != "no":
        raise InputError(
            f"grpo.resample samples further prompts, and grpo.offline={policy.offline} trains on stored completions: "
            "leave it out."
        )
    if policy.baseline not in ("group", "leave_one_out"):
        raise InputError(
            f"grpo.resample replaces groups of equal rewards because their advantages are 0; with "
            f"grpo.baseline={policy.baseline} they are not. Set grpo.baseline=group or leave_one_out, or leave it out."
        )


def replace_flat(
    first: Groups,
    chosen: Sequence[tuple[S, int]],
    rounds: int,
    prompts: Callable[[int], list[tuple[S, int]]],
    draw: Callable[[int, list[tuple[S, int]]], Groups],
) -> Resampled:
    """Return the groups of a rollout with flat ones replaced, over at most `rounds` rounds.

    chosen: the prompts of `first`; prompts: round -> those of its stream, in order; draw: (round, prompts) -> one group
    of each prompt, sampled and rewarded.
    """
    results, flat = list(first.results), first.flat.copy()
    rewards = {name: values.copy() for name, values in first.rewards.items()}
    used = {_place(one) for one in chosen}
    made = Resampled(Groups(results, rewards, flat), len(results), 0, float(rewards["reward"].sum()))
    for turn in range(1, rounds + 1):
        places = np.flatnonzero(flat)
        others = unused(prompts(turn), used, len(places))
        if not others:  # every group teaches something, or every prompt was drawn
            break
        found = draw(turn, others)
        made.drawn += len(others)
        made.rounds = turn
        made.reward_sum += float(found.rewards["reward"].sum())
        for place, group in zip(places, np.flatnonzero(~found.flat), strict=False):
            results[place], flat[place] = found.results[group], False
            for name, values in rewards.items():
                values[place] = found.rewards[name][group]
    return made


def unused(prompts: Sequence[tuple[S, int]], used: set[tuple[int, int]], count: int) -> list[tuple[S, int]]:
    """Return the first `count` prompts that are not in `used`, to which they are added."""
    found: list[tuple[S, int]] = []
    for one in prompts:
        if len(found) == count:
            break
        if _place(one) not in used:
            used.add(_place(one))
            found.append(one)
    return found


def _place(one: tuple[Source, int]) -> tuple[int, int]:
    source, index = one
    return source.number, index
