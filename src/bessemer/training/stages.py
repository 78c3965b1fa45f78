"""Stages: one run through several mixtures, each with its own number of tokens.

Stage k makes the updates start+1 … end. Data and its cross-fades follow from the batch's number (data/plan/batches.py),
schedules from the step (optim/schedules.py: `rewarm`). At the end of a stage the run validates and saves a checkpoint
that retention never deletes. The next stage may begin with fresh optimizer moments, another weight of the penalty, and
a new reference: the parameters as they are at that step.

No state of its own is saved: a restart at a stage's first step begins the stage again, anywhere else it has begun. A
stage without a reference runs a program that knows of none, so it never pays for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import jax
import numpy as np

from bessemer.errors import InputError
from bessemer.job.directory import step_name
from bessemer.training.state import TrainState, added_fields

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """Steps `start` to `end`. reference: the step whose parameters regularize it; None: no reference."""

    number: int
    start: int
    end: int
    beta: float = 0.0
    reference: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the checkpoint at its end."""
        return f"stage-{self.number}"


def plan(
    starts: Sequence[int],
    steps: int,
    *,
    referred: bool = False,
    betas: Sequence[float] = (),
    refresh: Sequence[bool] = (),
) -> tuple[Stage, ...]:
    """Return the stages that begin at `starts`. referred: all are compared with the start; betas: those above 0 are,
    with the parameters at the first of them, or at their own start where `refresh` is set."""
    made: list[Stage] = []
    taken: int | None = None
    for number, (start, end) in enumerate(pairwise([*starts, steps]), 1):
        if not betas:
            made.append(Stage(number, start, end, reference=0 if referred else None))
            continue
        beta = betas[number - 1]
        if beta > 0 and (taken is None or refresh[number - 1]):
            taken = start
        made.append(Stage(number, start, end, beta, taken if beta > 0 else None))
    return tuple(made)


def one_each(setting: str, values: Sequence[T], stages: int, first: T) -> list[T]:
    """Return a list with one entry per stage; a single value applies to all stages but the first."""
    if len(values) == stages:
        return list(values)
    if len(values) == 1:
        return [first] + list(values) * (stages - 1)
    raise InputError(
        f"{setting} has {len(values)} entries but the run has {stages} stages (training.tokens): give one per "
        "stage, or a single one for all stages but the first."
    )


def begins(stages: Sequence[Stage], step: int) -> bool:
    """Return whether the update after `step` is the first of a stage other than the first."""
    return any(stage.end == step for stage in stages[:-1])


def current(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage of update number `step`, and so of a state saved at `step`."""
    return next(stage for stage in stages if step <= stage.end or stage is stages[-1])


def weighted(state: TrainState, stage: Stage, replicated: Any) -> TrainState:
    """Return the state with the stage's β, if it has one."""
    if "beta" not in added_fields(type(state)):
        return state
    return state.replace(beta=jax.device_put(np.float32(stage.beta), replicated))


def with_fresh_moments(state: TrainState, placed: Any) -> TrainState:
    """Return the state with the optimizer's state as at the start; `placed`: its shardings."""
    return state.replace(opt_state=jax.jit(state.tx.init, out_shardings=placed)(state.params))


def described(stages: Sequence[Stage], tokens_per_step: int) -> list[dict[str, Any]]:
    """Return the content of RUN/stages.json: each stage, and the checkpoint at its end."""
    return [
        {
            "name": stage.name,
            **dataclasses.asdict(stage),
            "tokens": (stage.end - stage.start) * tokens_per_step,
            "checkpoint": f"checkpoints/{step_name(stage.end)}",
        }
        for stage in stages
    ]
