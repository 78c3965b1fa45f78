"""Stages: one run through several mixtures, each with its own number of tokens.

Stage k makes the updates start+1 … end. Data and its cross-fades follow from the batch's number (data/plan/batches.py),
schedules from the step (optim/wsd.py: `rewarm`). At the end of a stage the run validates and keeps a checkpoint, which
no retention deletes. Then the next one begins: perhaps with fresh optimizer moments, another weight of the penalty,
and a reference, which is the parameters as they are at that step.

Nothing of this is carried: a restart at a stage's first step begins it again, and anywhere else finds it begun. A
stage without a reference runs a program that knows of none, so it never pays for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from bessemer.errors import InputError
from bessemer.training.state import TrainState, added_fields

if TYPE_CHECKING:
    from bessemer.training.setup.compiled import Functions
    from bessemer.training.trainer import BaseTrainer

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """reference: the step whose parameters it is held against; None: nothing."""

    number: int
    start: int
    end: int
    beta: float = 0.0
    reference: int | None = None

    @property
    def name(self) -> str:
        """Of the checkpoint at its end."""
        return f"stage-{self.number}"


def plan(
    starts: Sequence[int],
    steps: int,
    *,
    referred: bool = False,
    betas: Sequence[float] = (),
    refresh: Sequence[bool] = (),
) -> tuple[Stage, ...]:
    """Every stage from its first step. referred: all are held against the start; betas: those above 0 are, against the
    parameters at the first of them, or at their own start where `refresh` says so."""
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
    """A list with an entry a stage; a single one holds for all stages but the first."""
    if len(values) == stages:
        return list(values)
    if len(values) == 1:
        return [first] + list(values) * (stages - 1)
    raise InputError(
        f"{setting} has {len(values)} entries but the run has {stages} stages (training.tokens): give one a stage, "
        "or a single one for all stages but the first."
    )


def followed(trainer: BaseTrainer) -> tuple[Stage, ...]:
    """The stages after which another one comes."""
    return trainer.stages[:-1]


def begins(trainer: BaseTrainer, step: int) -> bool:
    """Whether the update after `step` is the first of a stage, and not of the run."""
    return any(stage.end == step for stage in followed(trainer))


def current(trainer: BaseTrainer, step: int) -> Stage:
    """The stage that made update number `step`, so the one a state saved at `step` is of."""
    return next(stage for stage in trainer.stages if step <= stage.end or stage is trainer.stages[-1])


def select(trainer: BaseTrainer, step: int) -> None:
    """Take up the program that a state of `step` goes with."""
    use(trainer, current(trainer, step))


def use(trainer: BaseTrainer, stage: Stage) -> None:
    """There are two programs at most: with a reference, and without one. What is compiled stays compiled."""
    now = trainer.functions
    if (now.abstract_state.reference is None) == (stage.reference is None):
        return
    trainer.functions = trainer.other_functions or without_reference(trainer)
    trainer.other_functions = now


def without_reference(trainer: BaseTrainer) -> Functions:
    """The same steps over a state that has none."""
    from bessemer.training.setup.compiled import jit_train_step, jit_val_step

    functions = trainer.functions
    placed = functions.state_shardings.replace(reference=None)
    return functions._replace(
        abstract_state=functions.abstract_state.replace(reference=None),
        state_shardings=placed,
        train_step=jit_train_step(trainer, placed, functions.accumulate_steps),
        val_step=jit_val_step(trainer),
        compiled=False,
    )


def ready(trainer: BaseTrainer) -> None:
    """Before the first update of a process: what the initial state does not have yet."""
    from bessemer.training.persistence import frozen

    if trainer.step == 0:
        trainer.state = weighted(trainer, trainer.stages[0])
    frozen.ensure_reference(trainer)


def begin(trainer: BaseTrainer) -> None:
    """The stage whose first update comes next. Every process calls it, at the same step."""
    from bessemer.training.console import output
    from bessemer.training.persistence import frozen

    step = trainer.step
    stage = next(stage for stage in trainer.stages if stage.start == step)
    use(trainer, stage)
    words = [f"stage      {stage.number} of {len(trainer.stages)} begins after step {step:,}"]
    state = weighted(trainer, stage)
    if trainer.settings.stage_reset:
        words.append("the optimizer's moments begin anew")
        state = state.replace(opt_state=fresh_moments(trainer))
    trainer.state = state if stage.reference is not None else state.replace(reference=None)
    if stage.reference == step:
        frozen.take(trainer)
    elif stage.reference is not None and state.reference is None:
        trainer.state = state.replace(reference=frozen.restore_reference(trainer, step))
    if stage.beta > 0:
        words.append(f"β {stage.beta:g} to the parameters of step {stage.reference:,}")
    trainer.say("; ".join(words))
    output.compile_shown(trainer)


def weighted(trainer: BaseTrainer, stage: Stage) -> TrainState:
    """The state with the stage's β, where it has one."""
    state = trainer.state
    if "beta" not in added_fields(type(state)):
        return state
    return state.replace(beta=jax.device_put(np.float32(stage.beta), trainer.topology.replicated))


def fresh_moments(trainer: BaseTrainer) -> Any:
    """The optimizer's state as at the start, for the parameters as they are."""
    placed = trainer.functions.state_shardings.opt_state
    state = trainer.state
    return jax.jit(state.tx.init, out_shardings=placed)(state.params)


def described(trainer: BaseTrainer) -> list[dict[str, Any]]:
    """RUN/stages.json: what each stage is, and which checkpoint is kept from its end."""
    each = trainer.tokens_per_step
    return [
        {
            "name": stage.name,
            **dataclasses.asdict(stage),
            "tokens": (stage.end - stage.start) * each,
            "checkpoint": f"checkpoints/{trainer.checkpoint_manager.path(stage.end).name}",
        }
        for stage in trainer.stages
    ]
