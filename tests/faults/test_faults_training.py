"""What goes wrong in training itself: non-finite batches, data that cannot be read, no memory for an evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.faults.harness import assert_same_run, assert_sound, final_state, metrics
from tests.faults.in_place import build, ends, poison

from bessemer.checkpoint import Checkpoints
from bessemer.registry import Entry, evaluations
from bessemer.training import launch

pytestmark = pytest.mark.usefixtures("in_place")

Settings = dict[str, object]


def test_one_non_finite_batch_is_skipped_and_counted(settings: Settings, run: Path) -> None:
    """Step 6 gives no update: its checkpoint holds the weights of step 5, and the run ends as usual."""
    trainer = build(settings | {"logging.checkpoint_interval": 1, "logging.keep_last": 20}, run)
    poison(trainer, {5})
    assert ends(trainer) == (0, "")
    rows = {row["step"]: row for row in metrics(run) if "loss" in row}
    assert [rows[step]["skipped_steps"] for step in (5, 6, 7, 12)] == [0, 1, 1, 1]
    assert rows[6]["loss"] is None and "loss" in rows[6]["non_finite"] and rows[7]["loss"] is not None
    store = Checkpoints(run / "checkpoints")
    leaves = {name: np.empty(shape, dtype) for name, (dtype, shape) in store.leaves(5).items()}
    before, after = store.restore(5, leaves), store.restore(6, leaves)
    changed = [name for name in leaves if before[name].tobytes() != after[name].tobytes()]
    assert sorted(changed) == ["data_step", "step"]
    assert json.loads(store.read(12, "loop.json"))["skipped_steps"] == 1


@pytest.mark.slow
def test_non_finite_batches_in_a_row_end_the_run(settings: Settings, run: Path, whole_in_place: Path) -> None:
    trainer = build(settings, run)
    poison(trainer, {7, 8, 9, 10, 11})
    code, message = ends(trainer)
    assert code == 3
    for part in ("3 steps in a row gave no update", "step 10", "not a number", "weights are still those of"):
        assert part in message
    assert "last good checkpoint is step 9" in message and "optimization.lr" in message
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["message"]) == ("failed", 3, message)
    assert all(np.isfinite(array).all() for array in final_state(run)[1].values())
    shutil.rmtree(run / "checkpoints/step_00000009")  # taken while steps were being skipped
    assert_sound(run)
    again = launch.reopen(run)  # with the data as they should be
    assert again.step == 6 and ends(again) == (0, "")
    assert_same_run(run, whole_in_place)


def test_a_run_that_never_made_an_update_is_not_told_of_its_learning_rate(settings: Settings, run: Path) -> None:
    trainer = build(settings, run)
    poison(trainer, {0, 1, 2})
    code, message = ends(trainer)
    assert code == 3 and "those of step 0" in message and "learning rate is not the cause" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(5, "Input/output error", "/data/shard"), 4, "reading or writing /data/shard failed"),
        (MemoryError("Unable to allocate 9 TiB"), 3, "out of memory"),
    ],
)
def test_an_error_in_the_prefetch_thread_stops_the_run(
    error: Exception, code: int, says: str, settings: Settings, run: Path, whole_in_place: Path
) -> None:
    """The thread that makes batches ahead of use fails at step 7: no hang, and what was committed stays."""
    trainer = build(settings, run)
    clean = trainer.data.plan.batch

    def batch(step: int, rows: slice | None = None) -> Any:
        if step == 7:
            raise error
        return clean(step, rows)

    object.__setattr__(trainer.data.plan, "batch", batch)
    found, message = ends(trainer)
    assert found == code and says in message and "last good checkpoint is step 6" in message
    assert assert_sound(run) == [3, 6]
    assert ends(launch.reopen(run)) == (0, "")
    assert_same_run(run, whole_in_place)


def hungry(loaded: Any, **options: Any) -> dict[str, Any]:
    """An evaluation that, after the last step, asks for more memory than any machine has."""
    size = 1 << 58 if loaded.step == 12 else 8
    return {"metric": "sum", "value": float(jnp.zeros(size).sum())}


@pytest.mark.slow
def test_an_evaluation_without_memory_loses_nothing(
    settings: Settings, run: Path, whole_in_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the last evaluation: exit 3, but the last step is saved; resume without it ends the run."""
    evaluations.names()  # fills the registry, so that what is added goes again
    monkeypatch.setitem(evaluations._entries, "hungry", Entry("hungry", hungry))
    code, message = ends(build(settings | {"eval.evaluations": "[hungry]"}, run))
    assert code == 3 and "out of memory" in message and "last good checkpoint is step 12" in message
    assert 12 in assert_sound(run)
    assert ends(launch.reopen(run, {"eval.evaluations": []})) == (0, "")
    assert_same_run(run, whole_in_place, but_for=("eval/",))


def scale_weights(trainer: Any, factor: float, at: int) -> None:
    """Let the update of step `at` multiply the largest weights by `factor`, as a diverged optimizer does."""
    original = type(trainer).train_step

    def train_step(state: Any, batch: Any, key: Any, accumulate_steps: int) -> Any:
        state, loss, meta = original(state, batch, key, accumulate_steps)
        scale = jnp.where(state.step == at, factor, 1.0)
        return state.replace(params=jax.tree.map(lambda leaf: leaf * scale, state.params)), loss, meta

    trainer.train_step = train_step
    trainer.functions = trainer.configure_functions()


@pytest.mark.slow
@pytest.mark.parametrize("at", [6, 7, 12])
def test_an_update_that_makes_weights_non_finite_ends_the_run_unsaved(at: int, settings: Settings, run: Path) -> None:
    """At a checkpoint, between two, and at the last step: the loss of the step itself is still finite."""
    trainer = build(settings, run, guard_max_bad_steps=100)
    scale_weights(trainer, float("inf"), at)
    code, message = ends(trainer)
    assert code == 3 and f"after step {at} " in message and "NaN or infinite values" in message
    good = (at - 1) // 3 * 3
    assert f"last good checkpoint is step {good}." in message and "optimization.lr" in message
    assert assert_sound(run)[-1] == good
    assert all(np.isfinite(array).all() for array in final_state(run)[1].values())
    assert not (run / "model").exists() and json.loads((run / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("validates", [True, False])
def test_a_final_model_that_overflows_is_not_called_done(validates: bool, settings: Settings, run: Path) -> None:
    """Finite weights of 1e30: the last step's loss is not finite, and too few such steps follow to stop the run."""
    trainer = build(settings, run, training_validation=validates)
    scale_weights(trainer, 1e30, 11)
    code, message = ends(trainer)
    assert code == 3 and "step 12 was the last" in message, message
    assert ("the final validation gave nan" if validates else "no validation to judge") in message
    assert "last good checkpoint is step 9." in message and assert_sound(run)[-1] == 9
    assert (run / "checkpoints/step_00000012.aside").is_dir() and not (run / "model").exists()
    assert json.loads((run / "status.json").read_text())["exit_code"] == 3


@pytest.mark.slow
def test_one_bad_batch_at_the_end_leaves_a_good_model_done(settings: Settings, run: Path) -> None:
    trainer = build(settings, run)
    poison(trainer, {11})
    assert ends(trainer) == (0, "")


def test_a_learning_rate_beyond_all_bounds_is_exit_3_within_three_steps(settings: Settings, run: Path) -> None:
    trainer = build(settings, run, optimization_lr=1e300, training_steps=3)
    code, message = ends(trainer)
    assert code == 3 and "NaN or infinite values" in message and "There is no checkpoint yet." in message
