"""Goodput over restarts: what counts as useful, and what as time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bessemer.job import RunDirectory, directory
from bessemer.report.summary import training_seconds
from bessemer.training import outcome
from bessemer.training.metrics import StepClock, Waits
from bessemer.training.state import LoopState

NOW = 1e6


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes but what a test says."""
    clock = SimpleNamespace(time=lambda: NOW, monotonic=lambda: NOW)
    for module in (outcome, directory):
        monkeypatch.setattr(module, "time", clock)


def test_time_adds_up_over_starts_and_queues_do_not_count(tmp_path: Path, stopped_clock: None) -> None:
    run = RunDirectory(tmp_path / "x").create()
    run.write_status(state="running", **outcome.goodput_fields(run, False, 100.0))
    status = run.read_status()
    status["heartbeat"] += 50.0  # it lived for 150 s, was killed, and waited in a queue ever since
    status["began"] -= 1000.0
    status["heartbeat"] -= 1000.0
    run.status.write_text(json.dumps(status))
    fields = outcome.goodput_fields(run, True, 20.0)
    assert fields["starts"] == 2 and fields["wall_before"] == 150.0 and fields["began"] == NOW - 20.0
    assert outcome.goodput_fields(run, False, 1.0) | {"began": 0} == {"starts": 1, "began": 0, "wall_before": 0.0}


def test_waiting_for_data_pauses_and_lost_steps_are_not_useful() -> None:
    loop = LoopState(useful_seconds=30.0)
    clock = StepClock(loop, 8, 100, lambda causal: None, lambda: 100.0)
    # four steps in ten seconds, of which two waited for data
    clock._marks = {0: (0.0, Waits(0.0, None)), 4: (10.0, Waits(2.0, None))}
    row = clock.row(4)
    assert loop.useful_seconds == 38.0 and row["time/goodput"] == 0.38
    assert LoopState.from_json(LoopState(useful_seconds=5.0).to_json()).useful_seconds == 5.0


def test_rollouts_are_useful_time_and_not_waiting_for_data() -> None:
    loop = LoopState()
    clock = StepClock(loop, 8, 100, lambda causal: None, lambda: 100.0)
    clock._marks = {0: (0.0, Waits.so_far(0.0, 0.0)), 4: (10.0, Waits.so_far(7.0, 6.0))}
    row = clock.row(4)
    assert row["time/data_wait_pct"] == 10.0 and loop.useful_seconds == 9.0
    assert row["time/step_ms"] == 2500.0 and row["time/train_s"] == 0.75


def test_the_speed_of_short_steps_is_averaged_over_a_second() -> None:
    """Steps of 10 ms whose completion is seen late and in bursts: no row shows thirty times the speed."""
    clock = StepClock(LoopState(), 8, 1000, lambda causal: None, lambda: 100.0)
    seen = [0.01 * (step - step % 10) + 1e-5 * (step % 10) for step in range(1001)]
    clock._marks = {step: (moment, Waits(0.0, None)) for step, moment in enumerate(seen)}
    rows = [{"step": step, **clock.row(step)} for step in range(1, 1001)]
    assert all(700 < row["time/tok_per_s"] < 900 for row in rows[200:])
    assert clock.loop.training_seconds == pytest.approx(seen[-1] - seen[10])
    # the parts add up to the whole: the averaged windows overlap, the rows' own times do not
    assert sum(row["time/step_ms"] for row in rows) / 1e3 == pytest.approx(seen[-1], rel=1e-4)
    assert rows[-1]["time/all_steps"] == clock.loop.all_seconds == pytest.approx(seen[-1], rel=1e-4)
    older = [{name: value for name, value in row.items() if name != "time/all_steps"} for row in rows]
    assert training_seconds(rows) == pytest.approx(training_seconds(older), rel=1e-4)


def test_the_time_of_all_steps_survives_restarts_and_rollbacks() -> None:
    before = LoopState(all_seconds=30.0, training_seconds=20.0)
    again = LoopState.from_json(before.to_json())
    restored = LoopState(all_seconds=12.0)
    restored.carry_over(again)
    assert restored.all_seconds == 30.0
    older = json.dumps({key: value for key, value in json.loads(before.to_json()).items() if key != "all_seconds"})
    assert LoopState.from_json(older).all_seconds == 20.0


def test_the_speed_of_long_steps_is_that_of_the_row() -> None:
    clock = StepClock(LoopState(), 8, 100, lambda causal: None, lambda: 100.0)
    clock._marks = {step: (moment, Waits(0.0, None)) for step, moment in enumerate([0.0, 2.0, 6.0, 7.5])}
    assert [clock.row(step)["time/step_ms"] for step in (1, 2, 3)] == [2000.0, 4000.0, 1500.0]
