"""Evaluations during training: eval.evaluations=[bpb] with each validation, CORE every eval.core_interval steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.evaluate import Evaluator, check_tasks
from bessemer.evaluate.evaluator import is_file
from bessemer.evaluate.tasks import read_bundle
from bessemer.registry import callbacks, datasets
from bessemer.report.metrics import MetricsFile
from bessemer.training.callbacks.base import Callback
from bessemer.training.feed import fetch
from bessemer.training.outcome import doing

if TYPE_CHECKING:
    from bessemer.training.callbacks.base import BaseTrainer, Loop

CORE = "core_metric"


@callbacks.register("evaluation")
@dataclass
class Evaluation(Callback):
    """Runs evaluations; results go to RUN/eval and, as eval/TASK and core_metric, into the metrics.

    The final save comes before the last ones. What is compiled is kept from one evaluation to the next.
    """

    tasks: list[str] = field("eval/evaluations", default_factory=list, help="evaluations run with each validation")
    limit: int = field("eval/limit", default=500, minimum=1, help="examples of one evaluation during training")
    core_interval: int = field(
        "eval/core_interval", default=0, minimum=-1, help="steps between CORE scores; 0 = none, -1 = at the end"
    )
    core_bundle: str = field("eval/core_bundle", default="", help="directory of the CORE tasks")
    enabled: bool = field("training/evaluate", default=True, help="run the evaluations of eval.evaluations")

    @property
    def finishing(self) -> str:
        return "evaluations" if self.enabled and (self.tasks or self.core_interval) else ""

    def on_check(self, trainer: BaseTrainer) -> None:
        if self.tasks:
            check_tasks(self.tasks)
            for task, _, source in (task.partition(":") for task in self.meant(trainer)):
                if is_file(source) and not Path(source).is_file():
                    raise InputError(f"eval.evaluations={task}:{source}: there is no file '{source}'.")
            if self.enabled and self.meant(trainer) and not trainer.validates:
                raise InputError(
                    "eval.evaluations run with each validation, but this run has none: set training.validation=true "
                    "and give held-out data, or eval.evaluations=[]."
                )
        if self.core_interval and self.enabled:
            if not self.core_bundle:
                raise InputError(
                    "eval.core_interval is set, but not where the tasks of CORE are: set eval.core_bundle."
                )
            read_bundle(self.core_bundle)

    def on_train_begin(self, loop: Loop) -> None:
        self.programs: dict[str, Any] = {}
        self.on_rollback(loop)
        meant = self.meant(loop.trainer)
        if own := [task for task in self.tasks if task not in meant]:
            loop.trainer.say(f"note       the recipe's {', '.join(own)} is left out, as this run has data of its own")
        self.tasks = meant
        if self.core_interval and self.enabled:
            missing = [task.name for task in read_bundle(self.core_bundle) if task.path is None]
            if missing:
                loop.trainer.say(f"CORE: the bundle lacks {', '.join(missing)}")

    def meant(self, trainer: BaseTrainer) -> list[str]:
        """Return the tasks without a recipe's evaluation of its own dataset, if the run trains on other data."""
        evaluations = trainer.config.provenance["eval/evaluations"]
        if not evaluations.is_recipe or trainer.has_recipe_data:
            return self.tasks
        return [task for task in self.tasks if task.partition(":")[2] not in datasets]

    def on_rollback(self, loop: Loop) -> None:
        self.scored: set[int] = set()
        if self.core_interval and loop.trainer.is_process_zero and loop.step > 0:
            rows = MetricsFile(loop.trainer.run_directory.metrics).rows()
            self.scored = {row["step"] for row in rows if CORE in row and row["step"] <= loop.step}

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        if not self.enabled:
            return
        for name, result in self.evaluate(loop, self.tasks, "eval.evaluations").items():
            row[f"eval/{name}"] = result["value"]
            loop.trainer.say(f"step {loop.step:>6}  {name}  {result['metric']} {result['value']:.4f}")

    def on_batch_end(self, loop: Loop) -> None:
        if self.core_interval > 0 and loop.step % self.core_interval == 0 and loop.step < loop.steps:
            self.score_core(loop)

    def on_train_end(self, loop: Loop) -> None:
        if self.core_interval:
            self.score_core(loop)

    def score_core(self, loop: Loop) -> None:
        """One row per step: a run killed after its last one scores it again on resume, and does not write it twice."""
        if not self.enabled:
            return
        loop.flush()
        with loop.paused():
            results = self.evaluate(loop, [f"core:{self.core_bundle}"], "eval.core_interval")
        result = results.get("core")
        if result is None:  # the trainer's evaluator is None, or of another kind
            return
        loop.trainer.say(f"step {loop.step:>6}  {result['metric']} {result['value']:.4f}")
        if loop.step not in self.scored:
            self.scored.add(loop.step)
            loop.callbacks.fire("on_evaluation", loop, {"step": loop.step, CORE: result["value"]})

    def evaluate(self, loop: Loop, tasks: list[str], setting: str) -> dict[str, dict[str, Any]]:
        """Name → result of the trainer's evaluator, which may measure more than the tasks."""
        kind = loop.trainer.evaluator()
        if kind is None or (kind is Evaluator and not tasks):
            return {}
        remedy = f"Lower eval.limit={self.limit}, or leave it out of {setting}"
        named = ", ".join(tasks) or kind.__name__
        with doing(loop.trainer.run_state, f"the evaluation '{named}' at step {loop.step}", remedy):
            evaluator = kind.from_trainer(
                loop.trainer, tasks=tasks, limit=self.limit, fetch=fetch, programs=self.programs
            )
            return evaluator.run()
