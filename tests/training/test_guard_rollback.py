"""Rollback: back to the last regular checkpoint, past the poisoned data; stopped anywhere, it is the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.poison import INFINITE
from tests.training.test_guard import STEPS, Record, _no_report, assert_same_run, guarded, quick, rows, run, same_leaves  # noqa: F401 -- fixtures

from bessemer.errors import InputError, Stopped, TrainingError
from bessemer.training import launch

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def rolling(guarded: dict[str, object]) -> dict[str, object]:  # noqa: F811
    """Checkpoints at 4, 8, 12. Batch 6 is poisoned (step 7) and, met later, batch 13."""
    return {**guarded, "guard.spike_action": "rollback", "training.poison": {"6": 50.0, "13": 50.0}}


@pytest.fixture(scope="module")
def whole(rolling: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Record]:
    record = Record()
    with quick(home):
        return run(rolling, tmp_path_factory.mktemp("runs"), "whole", record), record


@pytest.mark.slow
def test_poisoned_batches_are_passed_over(whole: tuple[Any, Record]) -> None:
    """Step 7 took batch 6: back to 4, on with batch 7. Step 11 takes 13: back to 8, on with 14."""
    trainer, record = whole
    met = record.batches
    back = [index for index, (step, _) in enumerate(met) if index and step <= met[index - 1][0]]
    assert [met[index] for index in back] == [(5, 7), (9, 14)]
    last = dict(met)
    assert [last[step] for step in range(1, STEPS + 1)] == [0, 1, 2, 3, 7, 8, 9, 10, 14, 15, 16, 17, 18, 19]
    kept = [row for row in rows(trainer.run_directory.path) if "loss" in row]
    assert [row["step"] for row in kept] == list(range(1, STEPS + 1)), "rows of the undone steps are gone"
    assert kept[3]["rollbacks"] == 0 and (kept[-1]["rollbacks"], kept[-1]["spikes"]) == (2, 2)
    assert kept[-1]["skipped_steps"] == 0 and int(trainer.state.step) == STEPS
    assert trainer.checkpoint_manager.committed() == [4, 8, 12, 14]
    log = trainer.run_directory.log.read_text()
    assert "rollback 1 of at most 3" in log and "batches 4 to 6 are skipped" in log
    assert trainer.run_directory.read_status()["rollbacks"] == 2


@pytest.mark.slow
def test_it_is_the_run_on_the_data_without_the_gap(rolling: dict[str, object], tmp_path: Path) -> None:
    """Bit for bit what a run gives whose data never held batches 4 to 6."""
    rolled = run({**rolling, "training.poison": {"6": 50.0}}, tmp_path, "a")
    clean = run({**rolling, "training.poison": {}, "training.gap": [4, 3]}, tmp_path, "b")
    tree, expected = (
        {name: part for name, part in saved_tree_of(trainer).items() if name != "data_step"}
        for trainer in (rolled, clean)
    )
    assert same_leaves(tree, expected)
    assert int(rolled.state.data_step) == int(clean.state.data_step) + 3


def saved_tree_of(trainer: Any) -> dict[str, Any]:
    from bessemer.training.persistence.checkpoints import saved_tree

    return saved_tree(trainer.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"stop_at": 2}, marks=pytest.mark.slow),
        {"stop_at": 6},  # its own checkpoint lies between the one to go back to and the spike
        pytest.param({"stop_at": 7}, marks=pytest.mark.slow),  # the stop's own checkpoint would hold the spike
        pytest.param({"stop_at": 10}, marks=pytest.mark.slow),
        {"crash_at": 6},  # after the first rollback, before anything of it was saved
        {"crash_in_rollback": 1},
        pytest.param({"crash_in_rollback": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda how: "-".join(f"{key}-{value}" for key, value in how.items()),
)
def test_stopped_or_killed_around_a_rollback(
    how: dict[str, int], whole: tuple[Any, Record], rolling: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises((Stopped, RuntimeError)):
        run(rolling, tmp_path, "part", Record(**how))
    again = launch.reopen(tmp_path / "part")
    again.run()
    assert_same_run(again, whole[0])
    assert again.loop_state.rollbacks == 2


def test_a_spike_at_the_step_of_a_checkpoint_is_never_saved(rolling: dict[str, object], tmp_path: Path) -> None:
    """Reports come late and rarely: the save itself has to look first."""
    settings = {**rolling, "logging.report_interval": 100, "training.poison": {"7": 50.0}}
    saved: list[tuple[int, int]] = []

    class Saves(Record):
        def on_checkpoint(self, loop: Any, step: int) -> None:
            saved.append((step, int(loop.trainer.state.data_step)))

    run(settings, tmp_path, "a", Saves())
    assert saved == [(4, 4), (8, 12), (12, 16), (14, 18)]


def test_without_a_checkpoint_it_starts_over(rolling: dict[str, object], tmp_path: Path) -> None:
    settings = {**rolling, "logging.checkpoint_interval": -1, "training.poison": {"6": 50.0}}
    record = Record()
    run(settings, tmp_path, "a", record)
    assert [batch for _, batch in record.batches[-STEPS:]] == list(range(7, 7 + STEPS))
    validated = [row["step"] for row in rows(tmp_path / "a") if "val_loss" in row]
    assert validated == [0, 7, 14]


def test_non_finite_steps_in_a_row_roll_back_too(rolling: dict[str, object], tmp_path: Path) -> None:
    poison = {"5": INFINITE, "6": INFINITE, "7": INFINITE}
    settings = {**rolling, "training.poison": poison, "guard.max_bad_steps": 3}
    record = Record()
    trainer = run(settings, tmp_path, "a", record)
    assert dict(record.batches)[5] == 8, "back to step 4, on with the batch after the third"
    assert trainer.loop_state.rollbacks == 1 and trainer.loop_state.skipped_steps == 0


def test_rollbacks_are_bounded(rolling: dict[str, object], tmp_path: Path) -> None:
    poison = {str(step): 50.0 for step in range(6, 30)}
    settings = {**rolling, "training.poison": poison, "guard.max_rollbacks": 2}
    with pytest.raises(TrainingError, match="2 rollbacks") as caught:
        run(settings, tmp_path, "a")
    assert caught.value.exit_code == 3 and "last good checkpoint is step 4" in str(caught.value)


def test_what_decides_the_way_back_cannot_be_changed_on_resume(rolling: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(rolling, tmp_path, "a", Record(stop_at=2))
    with pytest.raises(InputError, match="spike_action=rollback"):
        launch.reopen(tmp_path / "a", {"logging.checkpoint_interval": 3})


@pytest.mark.slow
def test_the_way_back_is_kept_from_retention(
    whole: tuple[Any, Record], rolling: dict[str, object], tmp_path: Path
) -> None:
    """Two stops between two regular checkpoints, and only one checkpoint kept: the regular one stays."""
    settings = {**rolling, "logging.keep_last": 1}
    with pytest.raises(Stopped):
        run(settings, tmp_path, "a", Record(stop_at=5))
    with pytest.raises(Stopped):
        launch.reopen(tmp_path / "a", callbacks=[Record(stop_at=6)]).run()
    again = launch.reopen(tmp_path / "a")
    assert again.checkpoint_manager.committed() == [4, 6]
    again.run()
    assert_same_run(again, whole[0])


def test_given_weights_survive_starting_over(rolling: dict[str, object], tmp_path: Path) -> None:
    """The step donates its state; the caller's arrays, and the second start from them, are not harmed."""
    settings = {**rolling, "logging.checkpoint_interval": -1, "training.poison": {"6": 50.0}}
    first = launch.build_trainer("quickstart", settings, name="first", root=tmp_path)
    given = first.state.params
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path, model_state=given)
    trainer.run()
    assert trainer.loop_state.rollbacks == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(given))
