"""Callbacks that ship but are not on by default, in one short run each where they can share it."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from bessemer.errors import InputError, Stopped, StorageError
from bessemer.report.metrics import MetricsFile
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback, Callbacks
from bessemer.training.callbacks.builtin import Watchers, append_weights

pytestmark = pytest.mark.usefixtures("on_one_device")


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_watchers_weights_profile_ema_and_evaluation(tiny: dict[str, object], tmp_path: Path) -> None:
    settings = {
        **tiny,
        "callbacks": ["watchers", "weight_distribution", "profiler"],
        "logging.watch": ["head"],
        "logging.profile_start": 2,
        "logging.profile_steps": 2,
        "training.ema": 0.9,
        "eval.evaluations": ["bpb"],
        "logging.preview_interval": 5,
    }
    largest = Watchers(functions={"embedding": lambda array: jnp.abs(array).max()})
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path, callbacks=[largest])
    trainer.run()
    rows = metrics(tmp_path / "a")
    steps = [row for row in rows if "loss" in row]
    assert all(row["watch/head"] > 0 and row["watch/embedding"] > 0 for row in steps)
    validations = [row for row in rows if "val_bpb" in row]
    assert all(abs(row["eval/bpb"] - row["val_bpb"]) < 1e-4 for row in validations)
    weights = [json.loads(line) for line in (tmp_path / "a/weights.jsonl").read_text().splitlines()]
    assert {row["step"] for row in weights} == {0, 4, 8, 10}
    assert sum(weights[0]["counts"]) > 0
    assert list((tmp_path / "a/profile").rglob("*.xplane.pb"))
    samples = [json.loads(line) for line in (tmp_path / "a/samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples} == {5, 10}
    assert trainer.state.ema is not None
    assert gc.isenabled(), "the collector is given back after the run"
    launch.reopen(tmp_path / "a", callbacks=[largest]).run()  # as after a kill beyond the last save
    assert MetricsFile(tmp_path / "a/weights.jsonl").rows() == weights, "the last validation's, once"


def test_weights_that_are_no_numbers_leave_a_file_that_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "weights.jsonl"
    for step in (1, 2):
        append_weights(path, {"head": jnp.array([1.0, math.nan])}, step)
    assert MetricsFile(path).truncate_after(1) == 1
    [row] = MetricsFile(path).rows()
    assert row["step"] == 1 and row["mean"] is None
    with pytest.raises(StorageError, match="cannot write"):
        append_weights(tmp_path, {"head": jnp.ones(2)}, 3)  # a directory stands for a disk that refuses


@pytest.mark.slow
def test_time_limit_stops_with_a_checkpoint(tiny: dict[str, object], tmp_path: Path) -> None:
    settings = {**tiny, "training.time_limit": "0.001s"}
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    with pytest.raises(Stopped, match="time_limit"):
        trainer.run()
    assert trainer.checkpoint_manager.committed() == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"callbacks": ["watchers"], "logging.watch": ["no_such_thing"]}, "matches no parameter"),
        ({"callbacks": ["watchers"], "logging.watch": ["("]}, "not a regular expression"),
        ({"eval.evaluations": ["bqb"]}, "unknown evaluation 'bqb'. Did you mean 'bpb'"),
        ({"eval.evaluations": ["exact:no.jsonl"]}, "there is no file 'no.jsonl'"),
        ({"eval.evaluations": ["bpb"], "training.validation": False}, "set training.validation=true"),
        ({"eval.core_interval": 5}, "set eval.core_bundle"),
        ({"eval.core_interval": 5, "eval.core_bundle": "/nowhere"}, "no bundle of tasks at '/nowhere'"),
    ],
)
def test_what_a_callback_cannot_do_is_said_before_anything_is_compiled_or_written(
    tiny: dict[str, object], tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        launch.build_trainer("quickstart", {**tiny, **settings}, name="a", root=tmp_path).run()
    assert not (tmp_path / "a").exists()


def test_trackers_say_what_to_install(tiny: dict[str, object], tmp_path: Path) -> None:
    try:
        import wandb  # noqa: F401

        pytest.skip("wandb is installed here")
    except ImportError:
        pass
    settings = {**tiny, "logging.wandb": True}
    with pytest.raises(InputError, match=r"pip install .*\[track\]'"):
        launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    assert not (tmp_path / "a").exists(), "known before data is prepared and steps are compiled"


def test_hooks_fire_in_order_and_only_where_defined() -> None:
    calls: list[str] = []

    class One(Callback):
        def on_batch_end(self, loop: Any) -> None:
            calls.append("one")

    class Two(Callback):
        def on_batch_end(self, loop: Any) -> None:
            calls.append("two")

    both = Callbacks([One(), Two(), Callback()])
    both.fire("on_batch_end", None)
    both.fire("on_batch_begin", None)
    assert calls == ["one", "two"]
