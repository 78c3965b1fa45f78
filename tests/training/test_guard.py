"""The guard: what a spike or a run of non-finite steps does, and that a resumed run decides the same."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.training.poison import INFINITE

from bessemer.errors import Stopped, TrainingError
from bessemer.topology import make_topology
from bessemer.training import feed as fetching
from bessemer.training import launch, output
from bessemer.training.callbacks.base import Callback
from bessemer.training.persistence.checkpoints import saved_tree
from bessemer.training.state import SpikeRule, fresh_statistics, judge

STEPS = 14


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than these runs."""
    if "report" not in request.node.name:
        monkeypatch.setattr(output, "conclude", lambda *_: None)


@pytest.fixture(scope="module")
def guarded(tiny: dict[str, object]) -> dict[str, object]:
    """Spikes are looked for after four steps; a checkpoint every four; one compiled program for all tests."""
    return {
        **tiny,
        "job": "poisoned",
        "objective": "poisonable",
        "optimization.name": "adamw",
        "model.depth": 1,
        "training.per_device_batch_size": 8,
        "training.steps": STEPS,
        "training.validation_steps": 4,
        "logging.validation_interval": 7,
        "logging.checkpoint_interval": 4,
        "guard.spike_sigma": 6.0,
        "guard.spike_window": 4,
        "guard.spike_action": "skip",
    }


@contextlib.contextmanager
def quick(home: Path) -> Iterator[None]:
    """The fixtures above for a fixture that is shared by the tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
        patch.setattr(output, "conclude", lambda *_: None)
        yield


class Record(Callback):
    """Per step, as the loop went: the data step after it; parameters on demand; a stop or a crash on demand."""

    def __init__(self, stop_at: int = -1, crash_at: int = -1, crash_in_rollback: int = -1):
        self.stop_at, self.crash_at, self.crash_in_rollback = stop_at, crash_at, crash_in_rollback
        self.batches: list[tuple[int, int]] = []
        self.params: dict[int, Any] = {}

    def on_optimizer_step(self, loop: Any) -> None:
        self.batches.append((loop.step, int(loop.trainer.state.data_step) - 1))
        self.params[loop.step] = jax.tree.map(np.asarray, loop.trainer.state.params)

    def on_batch_end(self, loop: Any) -> None:
        if loop.step == self.stop_at:
            loop.request_stop("test")
        if loop.step == self.crash_at and loop.loop_state.rollbacks > 0:
            raise RuntimeError("killed")

    def on_rollback(self, loop: Any) -> None:
        if loop.loop_state.rollbacks == self.crash_in_rollback:
            raise RuntimeError("killed")


def rows(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "mem/"))} for line in lines]


def run(settings: dict[str, object], root: Path, name: str, record: Record | None = None) -> Any:
    parts = {"callbacks": [record]} if record else {}
    trainer = launch.build_trainer("quickstart", settings, name=name, root=root, **parts)
    trainer.run()
    return trainer


def same_leaves(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def assert_same_run(a: Any, b: Any) -> None:
    assert same_leaves(saved_tree(a.state), saved_tree(b.state))
    assert rows(a.run_directory.path) == rows(b.run_directory.path)


def test_running_mean_and_deviation_against_numpy() -> None:
    """The first `window` losses as numpy has them, then weight 1/window; a stage of other data starts anew."""
    rule = SpikeRule(sigma=3.0, window=5, skip=True, stages=(9,))
    step = jax.jit(functools.partial(judge, rule))
    losses = [4.0, 3.5, 3.7, 3.2, 3.4, 30.0, 3.1, np.inf, 3.3, 20.0, 21.0]
    statistics = fresh_statistics()
    accepted: list[float] = []
    mean = variance = 0.0
    for data_step, loss in enumerate(losses):
        finite = jnp.isfinite(loss)
        applied, statistics, seen = step(statistics, jnp.float32(loss), finite, jnp.int32(data_step))
        assert bool(seen["spike"]) == (loss == 30.0), loss
        assert bool(applied) == (loss not in (30.0, np.inf)), loss
        if data_step == 9:
            accepted = []
        if bool(applied):
            accepted.append(loss)
            if len(accepted) <= 5:
                mean, variance = float(np.mean(accepted)), float(np.var(accepted))
            else:
                far = loss - mean
                mean, variance = mean + far / 5, 0.8 * (variance + far**2 / 5)
        np.testing.assert_allclose(float(statistics["mean"]), mean, rtol=1e-5)
        np.testing.assert_allclose(float(statistics["variance"]), variance, rtol=1e-3, atol=1e-6)
    assert int(statistics["count"]) == 2 and int(statistics["stage"]) == 1


def test_off_by_default_nothing_is_added(tiny: dict[str, object], tmp_path: Path) -> None:
    trainer = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path)
    assert trainer.functions.abstract_state.guard is None and "guard" not in trainer.abstract_state()


@pytest.mark.slow
def test_warn_says_counts_reports_and_changes_nothing(
    guarded: dict[str, object], tmp_path: Path, newer_loops: None
) -> None:
    settings = {**guarded, "training.poison": {"8": 50.0}}
    warned = run({**settings, "guard.spike_action": "warn"}, tmp_path, "warn")
    unguarded = run({**settings, "guard.spike_sigma": 0.0}, tmp_path, "off")
    assert same_leaves(warned.state.params, unguarded.state.params)
    log = warned.run_directory.log.read_text()
    assert log.count("a spike above") == 1 and "step 9: the loss is" in log
    counts = {row["step"]: (row["spikes"], row["skipped_steps"]) for row in rows(tmp_path / "warn") if "loss" in row}
    assert counts[8] == (0, 0) and counts[9] == counts[STEPS] == (1, 0)
    assert "loss spikes" in warned.run_directory.report.read_text()
    assert "spikes" not in rows(tmp_path / "off")[-2]


def test_skip_leaves_the_update_out(guarded: dict[str, object], tmp_path: Path) -> None:
    record = Record()
    settings = {**guarded, "training.poison": {"8": 50.0, "11": INFINITE}}
    trainer = run(settings, tmp_path, "skip", record)
    assert same_leaves(record.params[8], record.params[9]), "the spike's update was not applied"
    assert same_leaves(record.params[11], record.params[12]), "nor that of the infinite loss"
    assert not same_leaves(record.params[9], record.params[10])
    last = [row for row in rows(tmp_path / "skip") if "loss" in row][-1]
    assert (last["step"], last["skipped_steps"], last["spikes"]) == (STEPS, 2, 1)
    log = trainer.run_directory.log.read_text()
    assert "8 updates in 9 steps" in log and "step 12: the loss is infinite; its update is left out (10" in log


def test_endless_skipping_ends_with_exit_3(guarded: dict[str, object], tmp_path: Path) -> None:
    settings = {**guarded, "training.poison": {"8": 50.0, "9": INFINITE, "10": 50.0}}
    with pytest.raises(TrainingError) as caught:
        run(settings, tmp_path, "a")
    text = str(caught.value)
    assert caught.value.exit_code == 3
    for part in ("step 11", "3 steps in a row", "last good checkpoint is step 8", "lr", "guard.spike_sigma"):
        assert part in text, text


@pytest.fixture(scope="module")
def whole(guarded: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with quick(home):
        return run({**guarded, "training.poison": {"8": 50.0}}, tmp_path_factory.mktemp("runs"), "whole")


@pytest.mark.parametrize("stop", [*(pytest.param(k, marks=pytest.mark.slow) for k in (3, 10)), 9])
def test_resume_with_the_guard_on_is_the_same_run(
    stop: int, whole: Any, guarded: dict[str, object], tmp_path: Path
) -> None:
    """Stopped before the spike could be judged, right at it, and after it."""
    settings = {**guarded, "training.poison": {"8": 50.0}}
    assert whole.loop_state.spikes == 1
    with pytest.raises(Stopped):
        run(settings, tmp_path, "part", Record(stop_at=stop))
    again = launch.reopen(tmp_path / "part")
    assert again.step == stop
    again.run()
    assert_same_run(again, whole)


def test_no_read_is_added_and_one_program(guarded: dict[str, object], tmp_path: Path) -> None:
    settings = {
        **guarded,
        "training.validation": False,
        "logging.report_interval": 7,
        "logging.checkpoint_interval": -1,
        "training.poison": {"8": 50.0},
    }
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    step = trainer.functions.train_step
    with trainer.topology.scope(), trainer.prefetcher(0) as batches:
        for number in range(STEPS):
            trainer.state, _, _ = step(trainer.state, batches.get(number), trainer.key)
    assert step._cache_size() == 1
    trainer.start_over()
    before = fetching.calls
    trainer.run()
    # rows 7 and 14; at the end each weight as it is written
    assert fetching.calls - before == 2 + len(jax.tree.leaves(trainer.state.params))
