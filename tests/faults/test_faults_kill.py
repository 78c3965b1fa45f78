"""Kill -9: inside a save, between its data and its commit, at any moment. Resume is the same run, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from tests.faults.harness import (
    COMMITTED,
    WRITTEN,
    assert_resumes,
    assert_sound,
    finish,
    save_phase,
    start,
    steps_saved,
    train,
    until,
)
from tests.faults.soak import soak

TRIES = 5


def caught(run: Path, saved: int) -> bool:
    """A further checkpoint is there, and the one after it is between its data and its commit."""
    return steps_saved(run) > saved and save_phase(run) in (WRITTEN, COMMITTED)


def test_killed_between_the_data_of_a_checkpoint_and_its_commit(
    settings: dict[str, object], run: Path, home: Path, whole: Path
) -> None:
    """All arrays are on the disk, the directory has not got its name: it is no checkpoint, and resume is the same."""
    command = train(settings, run)
    for _ in range(TRIES):  # a loaded machine may look away at the moment
        process = start(home, *command)
        assert until(process, functools.partial(caught, run, steps_saved(run)), poll=0.0001), (
            "it ended unhurt"
        )
        process.kill()
        finish(process)
        steps = assert_sound(run)
        if save_phase(run) in (WRITTEN, COMMITTED):
            break
        command = ["resume", str(run)]
    left = [path.name for path in (run / "checkpoints").glob("*.tmp")]
    assert len(left) == 1 and int(left[0][5:13]) not in steps
    assert_resumes(run, whole, home)


@pytest.mark.slow
def test_six_seeded_kills(tmp_path: Path, home: Path) -> None:
    """What `make soak` does fifty times."""
    found = soak(tmp_path, home, kills=6, seed=7, steps=30)
    assert found.kills == found.survived == 6
    assert found.inside_a_save >= 2 and found.bit_identical == found.runs
