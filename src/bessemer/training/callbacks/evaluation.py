"""Registered evaluations during training (eval.evaluations=[bpb]): with each validation, the last one included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.evaluate import Evaluator, check_tasks
from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop
from bessemer.training.outcome import doing


@callbacks.register("evaluation")
@dataclass
class Evaluation(Callback):
    """Results go to RUN/eval and, as eval/TASK, into the metrics. The final save comes before the last one."""

    tasks: list[str] = field(
        "eval/evaluations", default_factory=list, help="evaluations run with each validation"
    )
    limit: int = field(
        "eval/limit", default=500, minimum=1, help="examples of one evaluation during training"
    )
    enabled: bool = field("training/evaluate", default=True, help="run the evaluations of eval.evaluations")

    def on_train_begin(self, loop: Loop) -> None:
        if self.tasks:
            check_tasks(self.tasks)
            if not loop.trainer.validates:
                raise InputError(
                    "eval.evaluations run with each validation, but this run has none: set training.validation=true "
                    "and give held-out data, or eval.evaluations=[]."
                )

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        for task in self.tasks if self.enabled else ():
            remedy = f"Lower eval.limit={self.limit}, or leave it out of eval.evaluations"
            with doing(loop.trainer, f"the evaluation '{task}' at step {row['step']}", remedy):
                results = Evaluator.from_trainer(loop.trainer, tasks=[task], limit=self.limit).run()
            row[f"eval/{task}"] = results[task]["value"]
