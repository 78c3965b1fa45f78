"""Rows also go to Weights & Biases (logging.wandb=true) or TensorBoard (logging.tensorboard=true); extra: track.

The tracker's run id is part of the loop state, so a resumed run continues the same curve.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from bessemer.errors import InputError
from bessemer.generate import Completion
from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop

SAMPLES = "samples"
DT_STRING = 7  # of TensorBoard's types.proto


def _require(module: str, setting: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{setting}=true needs the tracking extra. Install it with: pip install 'bessemer[track]' ({error})."
        ) from error


class WandbSink:
    def __init__(self, loop: Loop):
        wandb = _require("wandb", "logging.wandb")
        trainer = loop.trainer
        self.run = wandb.init(
            project=trainer.spec.project,
            group=trainer.spec.group,
            name=trainer.spec.name,
            id=loop.loop_state.tracker_id,
            resume="allow",
            dir=str(trainer.run_directory.path),
            config=trainer.config.tree(),
        )
        loop.loop_state.tracker_id = self.run.id

    def write(self, row: dict[str, Any]) -> None:
        self.run.log({name: value for name, value in row.items() if value is not None}, step=row["step"])

    def write_samples(self, step: int, lines: list[str]) -> None:
        self.run.log({SAMPLES: "\n".join(lines)}, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorboardSink:
    def __init__(self, loop: Loop):
        writer = _require("tensorboard.summary.writer.event_file_writer", "logging.tensorboard")
        self.event = _require("tensorboard.compat.proto.event_pb2", "logging.tensorboard").Event
        self.summary = _require("tensorboard.compat.proto.summary_pb2", "logging.tensorboard").Summary
        self.writer = writer.EventFileWriter(str(loop.trainer.run_directory.path / "tensorboard"))

    def write(self, row: dict[str, Any]) -> None:
        values = [
            self.summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "step"
        ]
        self.writer.add_event(
            self.event(wall_time=time.time(), step=row["step"], summary=self.summary(value=values))
        )

    def write_samples(self, step: int, lines: list[str]) -> None:
        value = self.summary.Value(tag=f"{SAMPLES}/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = DT_STRING
        value.tensor.string_val.append("\n\n".join(lines).encode())
        self.writer.add_event(
            self.event(wall_time=time.time(), step=step, summary=self.summary(value=[value]))
        )

    def close(self) -> None:
        self.writer.close()


@callbacks.register("tracker")
class Tracker(Callback):
    def on_train_begin(self, loop: Loop) -> None:
        logging = loop.trainer.logging
        self.sinks: list[WandbSink | TensorboardSink] = []
        if loop.trainer.is_process_zero:
            if logging.wandb:
                self.sinks.append(WandbSink(loop))
            if logging.tensorboard:
                self.sinks.append(TensorboardSink(loop))

    def _write(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        self._write(row)

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        self._write(row)

    def on_samples(self, loop: Loop, samples: Sequence[Completion]) -> None:
        for sink in self.sinks:
            sink.write_samples(loop.step, [f"{sample.prompt} ▸ {sample.text}" for sample in samples])

    def on_train_end(self, loop: Loop) -> None:
        for sink in self.sinks:
            sink.close()

    def on_error(self, loop: Loop, error: BaseException) -> None:
        for sink in getattr(self, "sinks", []):
            sink.close()
