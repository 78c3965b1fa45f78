"""Distillation runs: a small student comes closer to its teacher, live or stored, and resumes as the same run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.test_training_resume import StopAt, assert_same, one_device, rows

from bessemer.errors import InputError, Stopped
from bessemer.training import launch


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())


@pytest.fixture(scope="module")
def plain(tiny: dict[str, object]) -> dict[str, object]:
    off = {
        "logging.validation_interval": -1,
        "logging.preview_interval": -1,
        "logging.checkpoint_interval": 10,
    }
    return {
        **tiny,
        **off,
        "architecture.precision": "float32",
        "optimization.name": "adamw",
        "optimization.lr": 0.01,
    }


@pytest.fixture(scope="module")
def teacher(plain: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", lambda settings: one_device())
        trainer = launch.build_trainer(
            "quickstart", plain, name="teacher", root=tmp_path_factory.mktemp("runs")
        )
        trainer.run()
    return trainer


@pytest.fixture
def student(plain: dict[str, object], teacher: Any) -> dict[str, object]:
    """One layer of half the width learns from two."""
    return {
        **plain,
        "objective": "distill",
        "distill.teacher": str(teacher.run_directory.path),
        "distill.alpha": 1.0,
        "model.depth": 1,
        "model.width": 16,
    }


def test_the_student_comes_closer_and_resumes_without_the_teachers_run(
    student: dict[str, object], teacher: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(teacher.run_directory.path, folder)
    settings = student | {"distill.teacher": str(folder)}
    whole = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path)
    whole.run()
    kl = [row["kl"] for row in rows(whole.run_directory.path) if "kl" in row]
    assert kl[-1] < 0.8 * kl[0]
    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(4)])
    with pytest.raises(Stopped):
        first.run()
    assert not [name for name in first.checkpoint_manager.leaves(4) if "reference" in name]
    shutil.rmtree(folder)
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, whole)
    jax.tree.map(np.testing.assert_array_equal, second.state.reference, teacher.state.params)


def test_a_stored_teacher_with_all_tokens_is_the_live_one(student: dict[str, object], tmp_path: Path) -> None:
    settings = student | {"training.steps": 3}
    live = launch.build_trainer("quickstart", settings, name="live", root=tmp_path)
    live.run()
    stored = launch.build_trainer("quickstart", settings | {"distill.top_k": 1000}, name="all", root=tmp_path)
    assert stored.functions.abstract_state.reference is None  # no teacher in memory
    stored.run()
    few = launch.build_trainer("quickstart", settings | {"distill.top_k": 8}, name="few", root=tmp_path)
    few.run()
    exact, same, bound = (
        np.array([row["kl"] for row in rows(run.run_directory.path) if "kl" in row])
        for run in (live, stored, few)
    )
    np.testing.assert_allclose(same, exact, rtol=1e-4)
    assert (bound < exact).all() and (bound > 0.3 * exact).all()
    assert few.batch()["teacher_ids"].shape == (8, 16, 8)


def test_a_teacher_that_does_not_fit_is_refused(student: dict[str, object], tmp_path: Path) -> None:
    wrong = {
        "distill.teacher": (None, "give distill.teacher=RUN"),
        "data.tokenizer": ("train:280", "another tokenizer"),
        "model.vocab_size": (400, "set model.vocab_size=300"),
        "architecture.block_size": (32, "reads 16 tokens at most"),
    }
    for key, (value, message) in wrong.items():
        with pytest.raises(InputError, match=message):
            launch.build_trainer("quickstart", student | {key: value}, name="wrong", root=tmp_path)
