"""Kill -9: inside a save, between its data and its commit, at any moment. Resume is the same run, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.harness import (
    COMMITTED,
    HOLDING,
    WRITTEN,
    assert_resumes,
    assert_sound,
    finish,
    hold,
    save_phase,
    train,
)
from tests.faults.soak import soak


@pytest.mark.slow
def test_killed_between_the_data_of_a_checkpoint_and_its_commit(
    settings: dict[str, object], run: Path, home: Path, whole: Path, tmp_path: Path
) -> None:
    """All arrays are on the disk, the directory has not got its name: it is no checkpoint, and resume is the same.
    Without its COMMIT, and with it."""
    command = train(settings | HOLDING, run)
    for moment, step, phase in (("data", 9, WRITTEN), ("commit", 18, COMMITTED)):
        process = hold(home, f"{moment} {step}", tmp_path / moment, *command)
        process.kill()
        finish(process)
        assert save_phase(run) == phase
        assert [path.name for path in (run / "checkpoints").glob("*.tmp")] == [f"step_{step:08d}.tmp"]
        assert max(assert_sound(run)) == step - 3
        command = ["resume", str(run)]
    assert_resumes(run, whole, home)


@pytest.mark.slow
def test_six_seeded_kills(tmp_path: Path, home: Path) -> None:
    """What `make soak` does fifty times; two thirds of them are aimed at a save."""
    found = soak(tmp_path, home, kills=6, seed=7, steps=30)
    assert found.kills == found.survived == 6
    assert found.inside_a_save >= 4 and found.between_data_and_commit >= 2
    assert found.bit_identical == found.runs
