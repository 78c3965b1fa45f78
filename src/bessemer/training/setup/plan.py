"""RunPlan: what setup resolves a recipe into. The compiled functions are built from it and from StepHooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.training.context import RunContext
from bessemer.training.setup.data import DataParts
from bessemer.training.setup.model import ModelParts, Teacher
from bessemer.training.stages import Stage
from bessemer.training.state import TrainState


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before the first array is made."""

    context: RunContext[Any]
    model: ModelParts
    data: DataParts
    teacher: Teacher | None
    stages: tuple[Stage, ...]

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * int(self.context.settings.block_size)

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.data.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """FLOPs of the run by the model's own formula."""
        return self.model.flops_per_token * self.tokens_per_step * self.data.steps


@dataclass(frozen=True)
class StepHooks:
    """The members of a trainer that the compiled side calls and that a subclass may override."""

    batch: Callable[..., Mapping[str, Any]]
    train_step: Callable[..., Any]
    val_step: Callable[..., Any]
    sharded_init: Callable[..., tuple[Any, Any]]
    optimizer: Callable[[], Any]
    schedule: Callable[[], Any]
    wants_reference: Callable[[], bool]
    state_class: type[TrainState]
    rolls_out: bool
    owner: str  # the class, named in errors
