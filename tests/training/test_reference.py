"""Frozen reference weights: taken once, on the disk before they are used, in force again after any restart."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.training import held  # noqa: F401 -- registers the objective
from tests.training.test_training_resume import StopAt, assert_same, rows

from bessemer.errors import Stopped, StorageError
from bessemer.training import launch
from bessemer.training.persistence import reference

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture
def settings(tiny: dict[str, object]) -> dict[str, object]:
    return {**tiny, "objective": "held", "logging.validation_interval": -1}


@pytest.mark.slow
def test_taken_once_and_in_force_after_a_restart(settings: dict[str, object], tmp_path: Path) -> None:
    whole = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path)
    start = jax.tree.map(np.asarray, whole.state.params)
    whole.run()
    apart = [row["apart"] for row in rows(whole.run_directory.path) if "apart" in row]
    assert apart[0] == 0 and apart[-1] > 0
    jax.tree.map(np.testing.assert_array_equal, start, jax.tree.map(np.asarray, whole.state.reference))
    assert reference.open_references(whole.context).committed() == [0]

    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(4)])
    with pytest.raises(Stopped):
        first.run()
    assert "reference" not in first.abstract_state()  # not in each checkpoint
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, whole)


@pytest.mark.slow
def test_a_reference_that_is_gone_or_changed_is_refused(settings: dict[str, object], tmp_path: Path) -> None:
    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(2)])
    with pytest.raises(Stopped):
        first.run()
    shutil.rmtree(tmp_path / "part" / "reference")
    with pytest.raises(StorageError, match="reference weights"):
        launch.reopen(tmp_path / "part")


@pytest.mark.slow
def test_a_later_reference_replaces_it_in_the_state_and_stands_beside_it_on_the_disk(
    settings: dict[str, object], tmp_path: Path
) -> None:
    trainer = launch.build_trainer("quickstart", settings, name="synced", root=tmp_path)
    trainer.run()
    trainer.take_reference()
    assert reference.open_references(trainer.context).committed() == [0, 10]
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.tree.map(np.asarray, tree) for tree in (trainer.state.params, trainer.state.reference)),
    )
    reference.drop_after(trainer.context, 9)
    assert reference.open_references(trainer.context).committed() == [0]
