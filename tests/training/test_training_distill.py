"""Distillation runs: a small student comes closer to its teacher, live or stored, and resumes as the same run."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.processes import finish, start, wait_until
from tests.tiny_run import make_run, tiny_params, tiny_tokenizer
from tests.training.test_training_resume import StopAt, assert_same, rows

from bessemer.errors import InputError, Stopped, StorageError
from bessemer.job import RunDirectory
from bessemer.plan.trainer import planned_trainer
from bessemer.training import launch

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture
def teacher(tmp_path: Path) -> RunDirectory:
    """Two layers with random weights, at step 20."""
    return make_run(tmp_path, name="teacher")


@pytest.fixture
def student(teacher: RunDirectory, tmp_path: Path) -> dict[str, object]:
    """One layer of half the width."""
    return {
        "objective": "distill",
        "distill.teacher": str(teacher.path),
        "distill.alpha": 1.0,
        "model.depth": 1,
        "model.width": 16,
        "model.head_dim": 16,
        "training.dataset": str(tmp_path / "cats.jsonl"),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 6,
        "training.validation": False,
        "architecture.block_size": 16,
        "architecture.precision": "float32",
        "optimization.name": "adamw",
        "optimization.lr": 0.02,
        "logging.report_interval": 1,
        "logging.preview_interval": -1,
        "logging.checkpoint_interval": 2,
        "logging.progress": "none",
    }


@pytest.mark.slow
def test_the_student_comes_closer_and_resumes_without_the_teachers_run(
    student: dict[str, object], teacher: RunDirectory, tmp_path: Path
) -> None:
    whole = launch.build_trainer("quickstart", student, name="whole", root=tmp_path)
    assert whole.tokenizer.hash == tiny_tokenizer().hash  # taken over from the teacher: the recipe says train:1024
    whole.run()
    kl = [row["kl"] for row in rows(whole.run_directory.path) if "kl" in row]
    assert kl[-1] < 0.9 * kl[0]
    first = launch.build_trainer("quickstart", student, name="part", root=tmp_path, callbacks=[StopAt(4)])
    with pytest.raises(Stopped):
        first.run()
    assert not [name for name in first.checkpoint_manager.leaves(4) if "reference" in name]
    shutil.rmtree(teacher.path)
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, whole)
    jax.tree.map(np.testing.assert_array_equal, second.state.reference, tiny_params(20))


@pytest.mark.long
def test_a_stored_teacher_with_all_tokens_is_the_live_one(student: dict[str, object], tmp_path: Path) -> None:
    settings = student | {"training.steps": 2}
    live = launch.build_trainer("quickstart", settings, name="live", root=tmp_path)
    live.run()
    stored = launch.build_trainer("quickstart", settings | {"distill.top_k": 1000}, name="all", root=tmp_path)
    assert stored.functions.abstract_state.reference is None  # no teacher in memory
    stored.run()
    few = launch.build_trainer("quickstart", settings | {"distill.top_k": 8}, name="few", root=tmp_path)
    few.run()
    exact, same, bound = (
        np.array([row["kl"] for row in rows(run.run_directory.path) if "kl" in row]) for run in (live, stored, few)
    )
    np.testing.assert_allclose(same, exact, rtol=1e-4)
    assert (bound < exact).all() and (bound > 0.3 * exact).all()
    assert few.batch()["teacher_ids"].shape == (8, 16, 8)


def stored_folder(home: Path) -> Path:
    (folder,) = (home / "taught").iterdir()
    return folder


def columns_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.load(folder / name) for name in ("ids.npy", "logprobs.npy")}


@pytest.mark.slow
def test_two_runs_at_once_share_one_complete_cache_of_the_teacher(student: dict[str, object], tmp_path: Path) -> None:
    """They wrote into one temporary folder, and rows stayed zero in a committed cache. The first is held in the middle
    of its writing until the second has come to the same place."""
    settings = student | {"distill.top_k": 8, "training.steps": 1, "logging.plots": False}
    words = [f"{key}={value}" for key, value in settings.items()]
    home, out = tmp_path / "home", str(tmp_path / "runs")
    (first,) = start(home, 1, "train", "quickstart", *words, "--name", "a", "--runs", out)
    wait_until([first], lambda: bool(list(home.glob("taught/*/ids.npy.tmp"))))
    first.send_signal(signal.SIGSTOP)
    (second,) = start(home, 1, "train", "quickstart", *words, "--name", "b", "--runs", out)
    try:
        said: list[str] = []
        while not said or (said[-1] and "waiting for it" not in said[-1]):
            said.append(second.stdout.readline())
    finally:
        first.send_signal(signal.SIGCONT)
    codes, outputs = finish([first, second])
    assert codes == [0, 0], outputs
    assert "waiting for it" in said[-1] and "most likely tokens for" not in "".join(said) + outputs[1]
    folder = stored_folder(home)
    assert not list(folder.glob("*.tmp"))
    columns = columns_of(folder)
    assert (columns["logprobs.npy"] < 0).all() and (columns["ids.npy"].max((1, 2)) > 0).all()
    losses = [[row["loss"] for row in rows(tmp_path / "runs" / name) if "loss" in row] for name in "ab"]
    assert losses[0] == losses[1]


def test_a_cache_of_an_older_version_is_not_trusted(
    student: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("BESSEMER_HOME", str(home))
    settings = student | {"distill.top_k": 8, "training.steps": 1}
    launch.build_trainer("quickstart", settings, name="new", root=tmp_path)
    folder = stored_folder(home)
    good = columns_of(folder)
    about = json.loads((folder / "about.json").read_text())
    for key in ("format", "checksums"):
        del about[key]
    (folder / "about.json").write_text(json.dumps(about))
    np.save(folder / "ids.npy", np.zeros_like(good["ids.npy"]))
    trainer = launch.build_trainer("quickstart", settings, name="again", root=tmp_path)
    assert "written by an older version" in capsys.readouterr().out
    for name, values in columns_of(stored_folder(home)).items():
        np.testing.assert_array_equal(values, good[name])
    assert trainer.batch()["teacher_ids"].max() > 0


def test_a_damaged_cache_is_noticed_before_it_is_trained_on(
    student: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("BESSEMER_HOME", str(home))
    settings = student | {"distill.top_k": 8, "training.steps": 1}
    launch.build_trainer("quickstart", settings, name="new", root=tmp_path)
    ids = np.load(stored_folder(home) / "ids.npy", mmap_mode="r+")
    ids[:] = 0
    ids.flush()
    with pytest.raises(StorageError, match=r"ids\.npy' is damaged: bytes \d+ to"):
        launch.build_trainer("quickstart", settings, name="again", root=tmp_path).run()


@pytest.mark.slow
def test_a_stored_teacher_may_be_pruned_but_not_replaced(
    student: dict[str, object], teacher: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "home"))
    settings = student | {"distill.top_k": 8, "training.steps": 4}
    whole = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path)
    whole.run()
    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(2)])
    with pytest.raises(Stopped):
        first.run()
    newest = teacher.checkpoints / "step_00000020"
    shutil.rmtree(newest)
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, whole)
    shutil.copytree(teacher.checkpoints / "step_00000010", newest)
    with pytest.raises(InputError, match="holds other weights"):
        launch.reopen(tmp_path / "part")
    shutil.rmtree(newest)
    shutil.rmtree(tmp_path / "home/taught")
    with pytest.raises(StorageError, match="is gone, and so are the tokens stored of it"):
        launch.reopen(tmp_path / "part")


def test_a_plan_knows_the_fields_of_a_stored_teacher(student: dict[str, object]) -> None:
    """They were missing, and `bessemer plan` ended with KeyError: 'teacher_ids'."""
    planned = planned_trainer(
        "quickstart", student | {"distill.top_k": 8, "training.per_device_batch_size": 1}, compiles=False
    )
    assert planned.data.fields["teacher_ids"] == ((16, 8), np.dtype(np.int32))
    assert planned.data.fields["teacher_logprobs"] == ((16, 8), np.dtype(np.float32))


def test_a_teacher_that_does_not_fit_is_refused(student: dict[str, object], tmp_path: Path) -> None:
    wrong = {
        "distill.teacher": (None, "give distill.teacher=RUN"),
        "data.tokenizer": ("train:280", "another tokenizer"),
        "model.vocab_size": (400, "set model.vocab_size=300"),
        "architecture.block_size": (64, "reads 32 tokens at most"),
    }
    for key, (value, message) in wrong.items():
        with pytest.raises(InputError, match=message):
            launch.build_trainer("quickstart", student | {key: value}, name="wrong", root=tmp_path)


@pytest.mark.long
def test_the_recipe_trains_its_teacher_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `bessemer train distill` does, with a smaller recipe in place of toy; a plan trains nothing."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(
        "extends: toy\nmodel: {width: 32}\ntraining: {steps: 2, batch_size: 8, validation: false}\n"
    )
    few = {"distill.teacher": "recipe:small.yaml", "training.steps": 2, "training.batch_size": 8}
    planned = planned_trainer("distill", few, compiles=False)
    assert planned.teacher is not None and planned.teacher.model.width == 32 and not Path("runs").exists()
    trainer = launch.build_trainer("distill", few | {"logging.progress": "none"}, name="d", root="runs")
    assert Path("runs/small-base/report.md").is_file() and trainer.model.depth == 1
    assert trainer.config["distill/teacher"].endswith("small-base/checkpoints/step_00000002")
    assert trainer.tokenizer is not None and trainer.tokenizer.vocab_size == trainer.teacher.model.vocab_size
    trainer.run()
    assert launch.is_finished("runs/d")
