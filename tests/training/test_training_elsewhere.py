"""A run is continued from any directory: it knows its data by the full path, and finds a moved folder again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.stops import StopAt

from bessemer.errors import InputError, Stopped
from bessemer.evaluate import Evaluator
from bessemer.training import launch
from bessemer.training.persistence.checkpoints import saved_tree

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture
def project(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with data, in which runs are started."""
    place = tmp_path / "project"
    place.mkdir()
    shutil.copy2(corpus, place / "mine.jsonl")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another directory, with other data of the same name."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "mine.jsonl").write_text('{"text": "something else"}\n' * 20)
    return place


@pytest.fixture
def settings(tiny: dict[str, object]) -> dict[str, object]:
    return {**tiny, "training.dataset": "mine.jsonl", "training.steps": 4, "data.root": "cache"}


def stopped(settings: dict[str, object], name: str) -> Path:
    trainer = launch.build_trainer("quickstart", settings, name=name, callbacks=[StopAt(2)])
    with pytest.raises(Stopped):
        trainer.run()
    path: Path = trainer.run_directory.path
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics without what the promise leaves out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "mem/"))} for line in lines]


@pytest.mark.slow
def test_resumed_from_another_directory(
    project: Path, elsewhere: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own_parts.py").write_text("# code of the user's, which the run bears a mark for\n")
    settings = {**settings, "plugins": ["own_parts.py"]}
    whole = launch.build_trainer("quickstart", settings, name="whole")
    whole.run()
    run = stopped(settings, "half")
    monkeypatch.chdir(elsewhere)
    resumed = launch.reopen(run)
    resumed.run()
    for left, right in zip(
        jax.tree.leaves(saved_tree(whole.state)), jax.tree.leaves(saved_tree(resumed.state)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    assert rows(run) == rows(project / "runs" / "whole")
    assert not list(elsewhere.glob("cache*"))
    results = Evaluator.from_run(resumed.run_directory).run()
    assert results["bpb"]["value"] == pytest.approx(rows(run)[-1]["val_bpb"], rel=1e-4)


@pytest.mark.slow
def test_a_moved_folder_is_found_from_inside_it(
    project: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(settings, "half")
    moved = project.rename(project.with_name("moved"))
    monkeypatch.chdir(moved)
    trainer = launch.reopen(moved / run.relative_to(project))
    assert trainer.step == 2
    (sampling,) = trainer.settings.datasets[0]
    assert sampling.name == str(moved / "mine.jsonl")
    assert any("training.dataset: what it names is gone, and found again below" in n for n in trainer.config.notes)
    evaluator = Evaluator.from_run(trainer.run_directory)
    evaluator.run()
    assert evaluator.loaded.notes == [
        f"the data {project / 'mine.jsonl'} is gone; held-out sequences are those of {moved / 'mine.jsonl'}"
    ]
    assert not project.exists()  # nor made again, for the cache


@pytest.mark.slow
def test_the_same_data_given_again_is_no_change_and_other_data_is(project: Path, settings: dict[str, object]) -> None:
    run = stopped(settings, "half")
    assert launch.reopen(run, {"training.dataset": "mine.jsonl"}).step == 2
    shutil.copy2("mine.jsonl", "other.jsonl")
    with pytest.raises(InputError, match=r"training\.dataset cannot be changed on resume"):
        launch.reopen(run, {"training.dataset": "other.jsonl"})


@pytest.mark.slow
def test_a_run_that_holds_a_relative_name_is_resumed_where_it_leads(
    project: Path, elsewhere: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs of an earlier version do."""
    run = stopped(settings, "half")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"{project}/mine.jsonl", "mine.jsonl"))
    assert "name: mine.jsonl" in config.read_text()
    assert launch.reopen(run).step == 2
    (elsewhere / "mine.jsonl").unlink()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(InputError, match=f"'mine.jsonl' does not exist below {elsewhere}"):
        launch.reopen(run)
