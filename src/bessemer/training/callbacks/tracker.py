"""Rows also go to Weights & Biases (logging.wandb=true) or TensorBoard (logging.tensorboard=true); extra: track.

So do the configuration, samples, and the histograms of callbacks=[weight_distribution]. The tracker's run id is part of
the loop state, so a resumed run continues the same curve.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.errors import InputError, Stopped, to_install
from bessemer.generate import Completion
from bessemer.registry import callbacks
from bessemer.training.callbacks.base import Callback

if TYPE_CHECKING:
    from bessemer.training.callbacks.base import Loop

SAMPLES = "samples"
WEIGHTS = "weights"
DT_STRING = 7  # of TensorBoard's types.proto


def _require(module: str, setting: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{setting}=true needs the tracking extra ({error}). Install it with: {to_install('track')}"
        ) from error


def edges(row: dict[str, Any]) -> list[float]:
    """Return the edges of the histogram's bins, equal parts of min … max (± ½ if both are the same)."""
    return [float(edge) for edge in np.histogram_bin_edges([row["min"], row["max"]], len(row["counts"]))]


class WandbSink:
    """wandb drops rows whose step goes backwards, as after a rollback; so `step` is a column that curves are drawn
    against."""

    def __init__(self, loop: Loop):
        self.wandb = _require("wandb", "logging.wandb")
        trainer = loop.trainer
        try:
            self.run = self.wandb.init(
                project=trainer.spec.project,
                group=trainer.spec.group,
                name=trainer.spec.name,
                id=loop.loop_state.tracker_id,
                resume="allow",
                dir=str(trainer.run_directory.path),
                config=trainer.config.tree(),
            )
        except self.wandb.Error as error:
            raise InputError(
                f"logging.wandb=true, but wandb does not start: {error} Log in with `wandb login`, or keep the "
                "run on this machine with WANDB_MODE=offline."
            ) from error
        loop.loop_state.tracker_id = self.run.id
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, row: dict[str, Any]) -> None:
        self.run.log({name: value for name, value in row.items() if value is not None})

    def write_samples(self, step: int, lines: list[str]) -> None:
        table = self.wandb.Table(columns=["step", "sample"], data=[[step, line] for line in lines])
        self.run.log({"step": step, SAMPLES: table})

    def write_weights(self, step: int, rows: list[dict[str, Any]]) -> None:
        histograms = {
            f"{WEIGHTS}/{row['name']}": self.wandb.Histogram(np_histogram=(row["counts"], edges(row))) for row in rows
        }
        self.run.log({"step": step, **histograms})

    def go_back(self, step: int) -> None:
        """Keep the rows of undone steps; later rows count `rollbacks`."""

    def close(self, failed: bool = False) -> None:
        self.run.finish(exit_code=int(failed))


class TensorboardSink:
    def __init__(self, loop: Loop):
        writer = _require("tensorboard.summary.writer.event_file_writer", "logging.tensorboard")
        self.events = _require("tensorboard.compat.proto.event_pb2", "logging.tensorboard")
        self.summaries = _require("tensorboard.compat.proto.summary_pb2", "logging.tensorboard")
        self.writer = writer.EventFileWriter(str(loop.trainer.run_directory.path / "tensorboard"))
        self.config = "".join(f"    {line}\n" for line in loop.trainer.config.to_yaml().splitlines())
        self.go_back(loop.step)

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self.summaries.Summary(value=values)
        self.writer.add_event(self.events.Event(wall_time=time.time(), step=step, summary=summary))

    def _text(self, tag: str, text: str) -> Any:
        value = self.summaries.Summary.Value(tag=f"{tag}/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = DT_STRING
        value.tensor.string_val.append(text.encode())
        return value

    def write(self, row: dict[str, Any]) -> None:
        values = [
            self.summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "step"
        ]
        self._add(row["step"], values)

    def write_samples(self, step: int, lines: list[str]) -> None:
        self._add(step, [self._text(SAMPLES, "\n\n".join(lines))])

    def write_weights(self, step: int, rows: list[dict[str, Any]]) -> None:
        values = []
        for row in rows:
            value = self.summaries.Summary.Value(tag=f"{WEIGHTS}/{row['name']}")
            number = sum(row["counts"])
            value.histo.min, value.histo.max, value.histo.num = row["min"], row["max"], number
            value.histo.sum = row["mean"] * number
            value.histo.sum_squares = (row["std"] ** 2 + row["mean"] ** 2) * number
            value.histo.bucket_limit.extend(edges(row)[1:])
            value.histo.bucket.extend(row["counts"])
            values.append(value)
        self._add(step, values)

    def go_back(self, step: int) -> None:
        """Write a mark: readers drop what was written for that step and later ones."""
        mark = self.events.SessionLog(status=self.events.SessionLog.START)
        first = step + 1 if step > 0 else 0
        self.writer.add_event(self.events.Event(wall_time=time.time(), step=first, session_log=mark))
        if first == 0:
            self._add(0, [self._text("config", self.config)])

    def close(self, failed: bool = False) -> None:
        self.writer.close()


@callbacks.register("tracker")
class Tracker(Callback):
    def __init__(self) -> None:
        self.sinks: list[WandbSink | TensorboardSink] = []

    def on_train_begin(self, loop: Loop) -> None:
        logging = loop.trainer.logging
        self.sinks = []
        if loop.trainer.is_process_zero:
            if logging.wandb:
                self.sinks.append(WandbSink(loop))
            if logging.tensorboard:
                self.sinks.append(TensorboardSink(loop))

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)

    on_evaluation = on_validation = on_metrics

    def on_samples(self, loop: Loop, samples: Sequence[Completion]) -> None:
        for sink in self.sinks:
            sink.write_samples(loop.step, [f"{sample.prompt} ▸ {sample.text}" for sample in samples])

    def on_weights(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
        finite = [row for row in rows if math.isfinite(row["min"]) and math.isfinite(row["max"])]
        for sink in self.sinks:
            sink.write_weights(loop.step, finite)

    def on_rollback(self, loop: Loop) -> None:
        for sink in self.sinks:
            sink.go_back(loop.step)

    def on_train_end(self, loop: Loop) -> None:
        for sink in self.sinks:
            sink.close()

    def on_error(self, loop: Loop, error: BaseException) -> None:
        for sink in self.sinks:
            sink.close(failed=not isinstance(error, Stopped))
