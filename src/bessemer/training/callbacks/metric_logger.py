"""metrics.jsonl: one flushed row a report, and the run's status beside it."""

from __future__ import annotations

from typing import Any

from bessemer.registry import callbacks
from bessemer.report.metrics import MetricsFile
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


@callbacks.register("metric_logger")
class MetricLogger(Callback):
    """Writes on process 0 only. Rows beyond the step a run continues from are removed first: no duplicates."""

    def on_train_begin(self, loop: Loop) -> None:
        self.file: MetricsFile | None = None
        self.validated: set[int] = set()
        if loop.trainer.is_process_zero:
            self.file = MetricsFile(loop.trainer.run_directory.metrics)
            self.file.truncate_after(loop.step if loop.step > 0 else -1)
            self.validated = {
                row["step"] for row in self.file.rows() if "val_loss" in row or "val_reward" in row
            }

    def on_rollback(self, loop: Loop) -> None:
        self.on_train_begin(loop)
        if self.file is not None:
            loop.trainer.run_directory.write_status(step=loop.step, rollbacks=loop.loop_state.rollbacks)

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.append(row)
            loop.trainer.run_directory.write_status(step=row["step"])

    def on_evaluation(self, loop: Loop, row: dict[str, Any]) -> None:
        self.on_metrics(loop, row)

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        # a run killed after its last validation is validated again on resume: same numbers, no second row
        if self.file is not None and row["step"] not in self.validated:
            self.validated.add(row["step"])
            self.file.append(row)
