"""On-policy distillation runs: the student nears its teacher on its own completions, and a stop changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.tiny_run import make_run, tiny_params
from tests.training.test_training_resume import StopAt, assert_same, rows

from bessemer.errors import InputError, Stopped
from bessemer.plan.trainer import planned_trainer
from bessemer.rl.rollout import TOKEN_FIELDS, Rollout
from bessemer.storage.files import ROLLOUT
from bessemer.training import launch

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture
def student(tmp_path: Path) -> dict[str, Any]:
    """One layer of half the teacher's width; four steps a rollout, the second of which is cut short."""
    teacher = make_run(tmp_path, name="teacher")
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"cats and dogs {n}"}) + "\n" for n in range(60)))
    return {
        "job": "GRPOTrainer",
        "objective": "on-policy-distill",
        "distill.teacher": str(teacher.path),
        "model.depth": 1,
        "model.width": 16,
        "model.head_dim": 16,
        "model.window": "L",
        "architecture.block_size": 32,
        "architecture.precision": "float32",
        "training.dataset": str(data),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 7,
        "training.validation_steps": 12,  # not a whole number of batches
        "data.val_fraction": 0.2,
        "grpo.group_size": 1,
        "grpo.num_iterations": 2,
        "grpo.mini_batches": 2,
        "grpo.max_completion_length": 6,
        "grpo.sync_interval": 2,
        "optimization.name": "adamw",
        "optimization.lr": 0.03,
        "logging.report_interval": 1,
        "logging.validation_interval": -1,
        "logging.checkpoint_interval": 6,
        "logging.preview_interval": 0,
        "logging.progress": "none",
    }


@pytest.mark.slow
def test_the_student_comes_closer_where_it_goes_and_resumes_in_a_rollout(
    student: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = launch.build_trainer(None, student, name="whole", root=tmp_path)
    assert "note: grpo.sync_interval has no effect with a teacher" in capsys.readouterr().out
    whole.run()
    found = rows(whole.run_directory.path)
    before, after = (row["val_kl"] for row in found if "val_kl" in row)
    assert after < 0.9 * before
    trained = [row for row in found if "kl" in row]
    assert len(trained) == 7 and all(row["kl"] == pytest.approx(row["loss"]) for row in trained)
    assert not any(name.startswith(("reward", "logprob_gap")) for row in found for name in row)
    held = Rollout.load(ROLLOUT.path(whole.checkpoint_manager.path(6)))
    assert held.rows.keys() == TOKEN_FIELDS.keys() and held.number == 1
    assert (held.rows["loss_mask"] == (held.rows["target_ids"] >= 0)).all()

    first = launch.build_trainer(None, student, name="part", root=tmp_path, callbacks=[StopAt(3)])
    with pytest.raises(Stopped):
        first.run()
    shutil.rmtree(tmp_path / "runs" / "teacher")
    second = launch.reopen(tmp_path / "part")
    assert second.step == 3 and second.rollout is not None
    second.run()
    assert_same(second, whole)
    jax.tree.map(np.testing.assert_array_equal, second.state.reference, tiny_params(20))
    kept = sorted(path.name for path in (tmp_path / "part" / "reference").glob("step_*"))
    assert kept == ["step_00000000"]  # never renewed


def test_it_needs_the_trainer_that_samples_and_the_columns_of_its_rewards(
    student: dict[str, Any], tmp_path: Path
) -> None:
    own = {key: value for key, value in student.items() if not key.startswith("grpo.")}
    for given, message in (
        (own | {"job": "BaseTrainer", "training.dataset": str(tmp_path / "cats.jsonl")}, "job=GRPOTrainer"),
        (student | {"grpo.rewards": ["exact_match"]}, "'exact_match' needs answer"),
    ):
        with pytest.raises(InputError, match=message):
            launch.build_trainer(None, given, name="no", root=tmp_path)


def test_the_recipe_is_planned_with_both_models_it_trains_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teacher and start are themselves begun from others: shapes and vocabulary come from the first of the row."""
    monkeypatch.chdir(tmp_path)
    planned = planned_trainer("distill-online", {"training.per_device_batch_size": 16}, compiles=False)
    assert planned.teacher is not None and not Path("runs").exists()
    for model in (planned.model, planned.teacher.model):
        assert (model.depth, model.width, model.vocab_size) == (2, 64, 268)
    assert planned.data.fields.keys() == TOKEN_FIELDS.keys()
