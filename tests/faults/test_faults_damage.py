"""Files lost or changed after they were written: the newest sound checkpoint is used, and the others are named."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.harness import assert_resumes, assert_same_run, assert_sound
from tests.faults.in_place import build, ends

from bessemer.checkpoint import Checkpoints
from bessemer.doctor import diagnose
from bessemer.errors import InputError, StorageError
from bessemer.generate import load_model
from bessemer.job import RunDirectory
from bessemer.training import launch


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


DAMAGE: list[Callable[[Path], None]] = [truncate, flip, remove]
FILES = ["data", "_METADATA", "loop.json", "meta.json", "config.yaml", "tokenizer.json", "COMMIT"]


def copy_unfinished(whole: Path, run: Path) -> Path:
    """A copy of a finished run as a kill right after the last save leaves it: nothing says that it is done."""
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))
    return Checkpoints(run / "checkpoints").path(max(assert_sound(run)))


def target(folder: Path, which: str) -> Path:
    """A file of the checkpoint; `data` is the largest one of the arrays."""
    if which == "data":
        return max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    return next(path for path in [folder / which, folder / "state" / which] if path.exists())


@pytest.mark.parametrize("which", FILES)
def test_no_damage_goes_unnoticed(which: str, whole_in_place: Path, tmp_path: Path) -> None:
    for damage in DAMAGE:
        run = tmp_path / damage.__name__
        file = target(copy_unfinished(whole_in_place, run), which)
        damage(file)
        step, messages = Checkpoints(run / "checkpoints").newest_valid()
        assert step == 9 and len(messages) == 1, damage.__name__
        assert "step_00000012" in messages[0] and file.name in messages[0], damage.__name__


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over(
    in_place: None, whole_in_place: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit of the arrays, which would restore silently wrong: the run goes on from the one before."""
    flip(target(copy_unfinished(whole_in_place, run), "data"))
    trainer = launch.reopen(run)
    assert trainer.step == 9
    assert "step_00000012 is damaged and not used" in capsys.readouterr().out
    assert ends(trainer) == (0, "")
    assert_same_run(run, whole_in_place)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "which"), [(truncate, "data"), (flip, "loop.json"), (remove, "COMMIT")])
def test_a_real_process_passes_over_a_damaged_checkpoint(
    damage: Callable[[Path], None], which: str, whole: Path, run: Path, home: Path
) -> None:
    damage(target(copy_unfinished(whole, run), which))
    assert_resumes(run, whole, home, says="step_00000030 is damaged and not used")


def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(
    in_place: None, whole_in_place: Path, run: Path
) -> None:
    copy_unfinished(whole_in_place, run)
    for step in assert_sound(run):
        flip(target(run / f"checkpoints/step_{step:08d}", "data"))
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(StorageError, match=r"no checkpoint .* can be used") as caught:
        launch.reopen(run)
    assert caught.value.exit_code == 4 and "Restore the directory from a copy" in str(caught.value)
    assert before == {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}


def test_what_kills_left_behind_is_never_taken_for_a_checkpoint_and_goes(
    in_place: None, whole_in_place: Path, run: Path
) -> None:
    """Unfinished saves (even one that is whole but for its name), half-finished deletions, half-written files; and
    time stamps that say the opposite of the steps."""
    newest = copy_unfinished(whole_in_place, run)
    saves = run / "checkpoints"
    shutil.copytree(newest, saves / "step_00000015.tmp")
    (saves / "step_00000018.tmp/state.orbax-checkpoint-tmp").mkdir(parents=True)
    shutil.copytree(newest, saves / "step_00000003.deleted")
    (run / ".status.json.123.tmp").write_text('{"sta')
    (run / ".metrics.jsonl.99.tmp").write_text("{}")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "lo')  # a row cut off by a kill
    now = time.time()
    for step in (3, 6, 9, 12):
        if (saves / f"step_{step:08d}").exists():
            os.utime(saves / f"step_{step:08d}", (now + 1e6 / step, now + 1e6 / step))
    trainer = launch.reopen(run)
    assert trainer.step == 12 and ends(trainer) == (0, "")
    assert_same_run(run, whole_in_place)
    assert not [path.name for path in run.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.slow
def test_stray_files_named_like_checkpoints_do_not_stop_resume(in_place: None, whole_in_place: Path, run: Path) -> None:
    """Files where a save, its temporary directory or a deletion would go."""
    copy_unfinished(whole_in_place, run)
    saves = run / "checkpoints"
    for step in (9, 12):
        shutil.rmtree(saves / f"step_{step:08d}")
    for name in ("step_00000009", "step_00000012.tmp", "step_00000009.deleted", "step_00000012.aside", "step_99999999"):
        (saves / name).write_text("not a checkpoint")
    trainer = launch.reopen(run)
    assert trainer.step == 6 and ends(trainer) == (0, "")
    assert [path.name for path in saves.iterdir() if not path.is_dir()] == ["step_99999999"]
    (saves / "step_99999999").unlink()
    assert_same_run(run, whole_in_place)


def test_everybody_takes_the_same_newest_checkpoint(
    in_place: None, settings: dict[str, object], whole_in_place: Path, run: Path
) -> None:
    """Resume, inference, the doctor and `init`: a damaged newest one, a later save that was cut off, and time
    stamps in the opposite order lead all of them to step 9."""
    newest = copy_unfinished(whole_in_place, run)
    shutil.copytree(newest, run / "checkpoints/step_00000015.tmp")
    flip(target(newest, "data"))
    for step in (6, 9, 12):
        os.utime(run / f"checkpoints/step_{step:08d}", (2e9 / step, 2e9 / step))
    child = build(settings, run.with_name("child"), init=str(run))
    taken = {
        "init": int(Path(child.config["init"]).name[5:]),
        "inference": load_model(RunDirectory(run)).step,
        "doctor": diagnose(RunDirectory(run)).step,
        "resume": launch.reopen(run).step,
    }
    assert set(taken.values()) == {9}, taken


def test_a_run_killed_before_its_first_line_says_what_to_do(run: Path, home: Path, in_place: None) -> None:
    """The directory is there, its config.yaml not yet: nothing is lost, and nothing guesses what the run was."""
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no config.yaml.*[Dd]elete the directory"):
        launch.reopen(run)


def test_killed_while_the_report_was_written(in_place: None, whole_in_place: Path, run: Path) -> None:
    """The state is already "done", for the report to say so; the run is not finished before the report is there."""
    copy_unfinished(whole_in_place, run)
    (run / "report.md").unlink()
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "done", "exit_code": None}))
    assert not launch.is_finished(run) and launch.is_finished(whole_in_place)
    assert ends(launch.reopen(run)) == (0, "")
    assert_same_run(run, whole_in_place)
    assert launch.is_finished(run)


def test_the_last_deletions_are_made_up_for(in_place: None, whole_in_place: Path, run: Path) -> None:
    """Killed after the last commit, before the older checkpoints were deleted: resume deletes them."""
    copy_unfinished(whole_in_place, run)
    assert assert_sound(run) == [6, 9, 12]
    assert ends(launch.reopen(run, {"logging.keep_last": 1})) == (0, "")
    assert assert_sound(run) == [6, 12], "the last one, and the best of those validated before it"
