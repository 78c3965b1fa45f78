"""Two writers and clocks that go wrong: a run has one owner, and no decision rests on the time of day."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tests.faults.harness import (
    HOLDING,
    assert_resumes,
    assert_same_run,
    assert_sound,
    call,
    finish,
    hold,
    let_go,
    start,
    steps_saved,
    train,
    until,
)
from tests.faults.in_place import At, build, ends
from tests.faults.test_faults_damage import copy_unfinished

from bessemer.errors import InputError
from bessemer.job import RunDirectory, RunLock
from bessemer.training import launch

Settings = dict[str, object]


@pytest.mark.slow
def test_a_second_writer_is_refused_and_the_first_unharmed(
    in_place: None, settings: Settings, run: Path, whole_in_place: Path
) -> None:
    """Twice: at once, and by the lock itself, should the second have looked before the first began."""
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(InputError) as caught:
            launch.reopen(run)
        refused.append(str(caught.value))
        with pytest.raises(InputError) as caught:
            RunLock(RunDirectory(run)).acquire()
        refused.append(str(caught.value))

    assert ends(build(settings, run, At(7, second))) == (0, "")
    assert len(refused) == 2
    for text in refused:
        assert "is in use by pid" in text and "wait for it or stop it" in text and "--name" in text
    assert_same_run(run, whole_in_place)


@pytest.mark.slow
def test_two_processes_on_one_run_and_a_stale_lock(
    settings: Settings, run: Path, home: Path, whole: Path, tmp_path: Path
) -> None:
    first = hold(home, "step 7", tmp_path / "first", *train(settings | HOLDING, run))
    code, output = call(home, "resume", str(run))
    assert code == 2 and f"is in use by pid {first.pid}" in output, output
    let_go(tmp_path / "first")
    finish(first)
    assert first.returncode == 0
    assert_same_run(run, whole)
    again = run.with_name("again")
    killed = hold(home, "step 7", tmp_path / "killed", *train(settings | HOLDING, again))
    assert until(killed, lambda: steps_saved(again) >= 3)
    killed.kill()
    finish(killed)
    assert_resumes(again, whole, home, says=f"took over the lock of pid {killed.pid}")


def test_a_lock_and_a_status_from_the_future(
    in_place: None, whole_in_place: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On this host the kernel knows who is alive. Of another host only the clock tells, and when that cannot be
    right the refusal says so, with the remedy."""
    copy_unfinished(whole_in_place, run)
    directory = RunDirectory(run)
    future = time.time() + 1e6
    status = directory.read_status()
    directory.status.write_text(json.dumps({**status, "heartbeat": future}))
    directory.lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "heartbeat": future}))
    with pytest.raises(InputError, match=rf"host elsewhere .* ahead of ours.*delete .*{run.name}/lock"):
        launch.reopen(run)
    directory.lock.write_text(json.dumps({"pid": 999999, "host": status["host"], "heartbeat": future}))
    trainer = launch.reopen(run)
    assert trainer.step == 12 and ends(trainer) == (0, "")
    assert "took over the lock of pid 999999" in capsys.readouterr().out
    assert_same_run(run, whole_in_place)


BACKWARDS = """
import time

_begun, _real = time.monotonic(), time.time


def backwards():
    return 1e9 - 1000 * (time.monotonic() - _begun)


time.time = backwards
"""


@pytest.mark.slow
def test_a_clock_that_runs_backwards(settings: Settings, run: Path, home: Path, whole: Path, tmp_path: Path) -> None:
    """time.time of the whole process falls by 1000 s a second, from the year 2001; killed and resumed under it, the
    newest checkpoint is the one of the highest step, and the run is the same."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(BACKWARDS)
    path = os.pathsep.join(filter(None, [str(tmp_path / "clock"), os.environ.get("PYTHONPATH", "")]))
    process = start(home, *train(settings, run), PYTHONPATH=path)
    assert until(process, lambda: steps_saved(run) >= 9)
    process.kill()
    finish(process)
    steps = assert_sound(run)
    stamps = [json.loads((run / f"checkpoints/step_{s:08d}/meta.json").read_text())["timestamp"] for s in steps]
    assert stamps == sorted(stamps, reverse=True) and len(stamps) > 1, "the clock did go backwards"
    code, output = call(home, "resume", str(run), PYTHONPATH=path)
    assert code == 0, output
    assert_same_run(run, whole)
