"""Promise 1: resume is the same run, bit for bit, wherever it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.stops import StopAt

from bessemer.errors import Stopped
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback
from bessemer.training.trainer import BaseTrainer


def slowly(k: int, long: bool = False) -> Any:
    return pytest.param(k, marks=pytest.mark.long if long else pytest.mark.slow)


def one_device() -> Any:
    from bessemer.topology import make_topology

    return make_topology(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def tiny(tiny: dict[str, object]) -> dict[str, object]:
    """With a preview at the end: it too must be made once, and be the same."""
    return {**tiny, "logging.preview_interval": -1, "logging.preview_prompts": ["a"]}


pytestmark = pytest.mark.usefixtures("on_one_device")


def rows(path: Path) -> list[dict[str, Any]]:
    """Metrics without what the promise leaves out."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "mem/"))} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tiny: dict[str, object], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("runs")
    trainer = launch.build_trainer("quickstart", tiny, name="whole", root=root)
    trainer.run()
    return trainer


def assert_same(a: BaseTrainer, b: BaseTrainer) -> None:
    from bessemer.training.persistence.checkpoints import saved_tree

    for left, right in zip(jax.tree.leaves(saved_tree(a.state)), jax.tree.leaves(saved_tree(b.state)), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    assert rows(a.run_directory.path) == rows(b.run_directory.path)


@pytest.mark.parametrize("k", [slowly(1, long=True), slowly(2), slowly(3, long=True), slowly(4, long=True), 5])
def test_stopped_after_k_steps_and_resumed(
    k: int, tiny: dict[str, object], undisturbed: BaseTrainer, tmp_path: Path
) -> None:
    first = launch.build_trainer("quickstart", tiny, name="part", root=tmp_path, callbacks=[StopAt(k)])
    with pytest.raises(Stopped):
        first.run()
    assert first.run_directory.read_status()["exit_code"] == 75
    second = launch.reopen(tmp_path / "part")
    assert second.step == k
    second.run()
    assert_same(second, undisturbed)


@pytest.mark.slow
def test_killed_after_the_final_save(tiny: dict[str, object], undisturbed: BaseTrainer, tmp_path: Path) -> None:
    """All steps are taken and saved, the end is not: resume finishes, without a row or a sample twice."""

    class Crash(Callback):
        def on_train_end(self, loop: Any) -> None:
            raise RuntimeError("killed before the end was written")

    first = launch.build_trainer("quickstart", tiny, name="part", root=tmp_path, callbacks=[Crash()])
    with pytest.raises(RuntimeError):
        first.run()
    assert first.run_directory.read_status()["exit_code"] == 1
    second = launch.reopen(tmp_path / "part")
    assert second.step == 10 and not (tmp_path / "part/model").exists()
    second.run()
    assert_same(second, undisturbed)
    assert (tmp_path / "part/model/model.safetensors").exists()
    samples = [path / "samples.jsonl" for path in (tmp_path / "part", undisturbed.run_directory.path)]
    assert samples[0].read_text() == samples[1].read_text()


@pytest.mark.slow
def test_saving_by_time_and_a_crash_after_it_change_no_bit(
    tiny: dict[str, object], undisturbed: BaseTrainer, tmp_path: Path
) -> None:
    class Crash(Callback):
        def on_batch_begin(self, loop: Any) -> None:
            if loop.step == 5:
                loop.trainer.checkpoint_manager.wait()
                raise RuntimeError("killed")

    always = {**tiny, "logging.checkpoint_interval": -1, "logging.checkpoint_minutes": 1e-9}
    first = launch.build_trainer("quickstart", always, name="part", root=tmp_path, callbacks=[Crash()])
    with pytest.raises(RuntimeError, match="killed"):
        first.run()
    assert first.checkpoints() == [1, 2, 3, 4, 5]
    second = launch.reopen(tmp_path / "part")
    assert second.step == 5
    second.run()
    assert second.checkpoints() == list(range(1, 11))
    assert_same(second, undisturbed)


@pytest.mark.slow
def test_the_clock_starts_again_with_every_checkpoint(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which every step takes a minute: one save three minutes after the last, whoever asked for that."""
    settings = {**tiny, "logging.checkpoint_interval": 4, "logging.checkpoint_minutes": 3}
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    clock = SimpleNamespace(monotonic=lambda: 60.0 * trainer.step)
    monkeypatch.setattr("bessemer.training.callbacks.builtin.time", clock)
    trainer.run()
    assert trainer.checkpoints() == [3, 4, 7, 8, 10]


@pytest.fixture(scope="module")
def staged(tiny: dict[str, object], corpus: Path) -> dict[str, object]:
    """Six steps on one mixture and four on another, with dropout, an average of the weights and a second warm-up."""
    return {
        **{key: value for key, value in tiny.items() if key != "training.steps"},
        "training.dataset": [[{"name": str(corpus)}], [{"name": str(corpus), "style": "PACKED"}]],
        "training.tokens": [6 * 128, 4 * 128],
        "training.ema": 0.9,
        "architecture.dropout": 0.2,
        "optimization.name": "adamw",
        "optimization.schedule": "rewarm",
    }


@pytest.fixture(scope="module")
def undisturbed_stages(
    staged: dict[str, object], on_one_device: None, tmp_path_factory: pytest.TempPathFactory
) -> BaseTrainer:
    trainer = launch.build_trainer("quickstart", staged, name="whole", root=tmp_path_factory.mktemp("runs"))
    trainer.run()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("k", [5, pytest.param(6, marks=pytest.mark.long)])
def test_stages_and_dropout_go_on_as_they_would_have(
    k: int, staged: dict[str, object], undisturbed_stages: BaseTrainer, tmp_path: Path
) -> None:
    """Stopped one step before the second stage, and at its beginning: stage, schedule and dropout follow from the
    step alone."""
    assert undisturbed_stages.data.stage_starts == [0, 6]
    first = launch.build_trainer("quickstart", staged, name="part", root=tmp_path, callbacks=[StopAt(k)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, undisturbed_stages)
