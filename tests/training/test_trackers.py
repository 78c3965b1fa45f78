"""What reaches Weights & Biases (offline) and TensorBoard, read back from their own files; skipped without the extra.

One run is rolled back, stopped and resumed: its rows, configuration, samples and histograms must all be there.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.training.poison import PoisonedTrainer
from tests.training.test_guard import guarded, quick  # noqa: F401 -- fixtures

from bessemer.errors import InputError, Stopped
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback
from bessemer.training.callbacks.builtin import BINS
from bessemer.training.callbacks.tracker import edges

wandb = pytest.importorskip("wandb")
accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

STOP = 9
STEPS = 14


class StopAt(Callback):
    def on_batch_end(self, loop: Any) -> None:
        if loop.step == STOP:
            loop.request_stop("the test")


@pytest.fixture(scope="module")
def tracked(
    guarded: dict[str, object],  # noqa: F811
    home: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Batch 6 is poisoned: step 7 is undone, back to 4. Stopped after step 9 and resumed."""
    root = tmp_path_factory.mktemp("runs")
    settings = {
        **guarded,
        "guard.spike_action": "rollback",
        "training.poison": {"6": 50.0},
        "callbacks": ["watchers", "weight_distribution"],
        "logging.watch": ["head"],
        "logging.preview_interval": 7,
        "logging.wandb": True,
        "logging.tensorboard": True,
    }
    with quick(home), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoisonedTrainer, "default_callbacks", (*PoisonedTrainer.default_callbacks, "tracker"))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        stopping = [StopAt()]
        trainer = launch.build_trainer("quickstart", settings, name="a", root=root, callbacks=stopping)
        with pytest.raises(Stopped):
            trainer.run()
        launch.reopen(root / "a").run()
    return root / "a"


def wandb_records(path: Path) -> Iterator[Any]:
    """A .wandb file: seven bytes, then records in pieces that never cross 32 KiB (LevelDB's log format)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block, at, parts = path.read_bytes(), 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    rows = []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def metric_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_wandb_gets_every_row_under_one_id(tracked: Path) -> None:
    files = sorted((tracked / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.stem for file in files}) == 1, "a resumed run is the same one"
    rows = [row for file in files for row in history(file)]
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert [step for step, _ in losses] == [*range(1, 7), *range(5, STEPS + 1)], "steps that go back are kept"
    latest = dict(losses)
    for row in metric_rows(tracked):
        if "loss" in row:
            assert latest[row["step"]] == pytest.approx(row["loss"])
    assert all(row["watch/head"] > 0 for row in rows if "loss" in row)
    validated = {row["step"] for row in rows if "val_loss" in row}
    assert validated == {row["step"] for row in metric_rows(tracked) if "val_loss" in row}


def test_wandb_gets_configuration_axis_samples_and_histograms(tracked: Path) -> None:
    file = sorted((tracked / "wandb").glob("offline-run-*/*.wandb"))[0]
    records = list(wandb_records(file))
    kinds = [record.WhichOneof("record_type") for record in records]
    run = records[kinds.index("run")].run
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["training"]["steps"] == STEPS and config["model"]["depth"] == 1
    axes = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in axes)
    rows = history(file)
    table = next(row["samples/path"] for row in rows if row.get("samples/_type") == "table-file")
    written = json.loads((file.parent / "files" / table).read_text())
    assert written["columns"] == ["step", "sample"] and all("▸" in text for _, text in written["data"])
    head = next(row for row in rows if row.get("weights/head/_type") == "histogram")
    assert sum(head["weights/head/values"]) > 0 and len(head["weights/head/bins"]) == BINS + 1


def test_tensorboard_reads_back_the_run_as_it_is(tracked: Path) -> None:
    events = accumulators.EventAccumulator(
        str(tracked / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0}
    )
    events.Reload()
    rows = {row["step"]: row["loss"] for row in metric_rows(tracked) if "loss" in row}
    scalars = events.Scalars("loss")
    assert [event.step for event in scalars] == sorted(rows), "what a rollback undid is gone"
    assert all(event.value == pytest.approx(rows[event.step]) for event in scalars)
    assert {event.step for event in events.Scalars("watch/head")} == set(rows)
    weights = [json.loads(line) for line in (tracked / "weights.jsonl").read_text().splitlines()]
    heads = {row["step"]: row for row in weights if row["name"] == "head"}
    shown = {event.step: event.histogram_value for event in events.Histograms("weights/head")}
    assert set(shown) == set(heads)
    for step, row in heads.items():
        assert list(shown[step].bucket) == row["counts"]
        assert shown[step].bucket_limit[-1] == pytest.approx(row["max"])
    (config,) = events.Tensors("config/text_summary")
    assert b"block_size: 16" in config.tensor_proto.string_val[0]
    assert "▸".encode() in events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0]


def test_wandb_that_does_not_start_says_what_to_do(
    guarded: dict[str, object],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bessemer.training.callbacks import tracker

    def refuse(**words: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    trainer = SimpleNamespace(
        spec=SimpleNamespace(project="p", group="g", name="n"),
        run_directory=SimpleNamespace(path=tmp_path),
        config=SimpleNamespace(tree=dict),
    )
    loop: Any = SimpleNamespace(trainer=trainer, loop_state=SimpleNamespace(tracker_id=None))
    with pytest.raises(InputError, match="WANDB_MODE=offline"):
        tracker.WandbSink(loop)


def test_edges_are_those_of_the_histogram() -> None:
    assert edges({"min": 0.0, "max": 4.0, "counts": [1, 1, 1, 1]}) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert edges({"min": 1.0, "max": 1.0, "counts": [0, 3]}) == [0.5, 1.0, 1.5]
