"""A trainer whose data is poisoned at chosen data steps: the loss of those batches is multiplied."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import bessemer as bm
from bessemer.config import field
from bessemer.models.gpt import GPT
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.registry import jobs, objectives

INFINITE = 1e39
"""A factor that is infinite in float32."""


@objectives.register("poisonable", settings=(PretrainSettings,))
def poisonable(apply: Any, params: Any, batch: Any, key: Any, settings: PretrainSettings) -> Any:
    loss, weight, metrics = pretrain(apply, params, batch, key, settings)
    return loss * batch["poison"].mean(), weight, metrics


class PoisonedPlan:
    """The plan of a run, its batches marked; `gap` = (first, count) leaves batches out, as a rollback does."""

    def __init__(self, plan: Any, poison: dict[int, float], gap: tuple[int, int] | None):
        self.plan, self.poison, self.gap = plan, poison, gap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Any]:
        if self.gap is not None and step >= self.gap[0]:
            step += self.gap[1]
        batch = dict(self.plan.batch(step, rows))
        factor = self.poison.get(step, 1.0)
        factor = np.inf if factor == INFINITE else factor
        return {**batch, "poison": np.full(batch["input_ids"].shape, factor, np.float32)}


@dataclasses.dataclass
class PoisonedConfig(bm.BaseTrainerConfig):
    poison: dict[str, float] = field("training/poison", default_factory=dict, help="data step: factor")
    gap: list[int] = field("training/gap", default_factory=list, help="first batch left out, how many")


@jobs.register("poisoned")
class PoisonedTrainer(bm.BaseTrainer[PoisonedConfig, GPT]):
    default_callbacks = ("checkpoint", "metric_logger", "validation", "preview", "time_limit")

    def configure_dataloaders(self) -> Any:
        data = super().configure_dataloaders()
        poison = {int(step): factor for step, factor in self.settings.poison.items()}
        gap = tuple(self.settings.gap) or None
        plan: Any = PoisonedPlan(data.plan, poison, gap)  # type: ignore[arg-type]
        return dataclasses.replace(data, plan=plan)
