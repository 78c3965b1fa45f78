"""A disk that fills up, becomes read-only or goes away while a run writes to it: exit 4, one clear paragraph, and the
committed checkpoints stay as they are. With the disk back the run ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
    steps_saved,
    train,
    until,
)
from tests.faults.in_place import At, build, ends

from bessemer.checkpoint import Checkpoints
from bessemer.job import RunDirectory
from bessemer.training import launch

Settings = dict[str, object]
NO_MOUNT = "needs the right to mount file systems (run as root, in a container with CAP_SYS_ADMIN)"


def mount(*arguments: str | Path) -> None:
    command = ["mount", *map(str, arguments)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip(NO_MOUNT)
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(NO_MOUNT)


def unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", disk)
    yield disk
    unmount(disk)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """A read-only view laid over the directory: whoever opens a file by its name from now on gets EROFS."""
    mount("--bind", path, path)
    try:
        mount("-o", "remount,ro,bind", path)
        yield
    finally:
        unmount(path)


def fill(disk: Path) -> None:

    with open(disk / "ballast", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"\0" * 4096)


def vanish(path: Path) -> None:
    """Gone at once, whatever is being written inside."""
    path.rename(path.with_name("gone"))
    shutil.rmtree(path.with_name("gone"), ignore_errors=True)


def assert_one_paragraph(output: str, *parts: str) -> None:
    """The last line says it all, and no traceback comes with it."""
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: ") and "Traceback" not in output, output
    for part in parts:
        assert part in last, (part, last)


def test_a_disk_that_fills_up(in_place: None, settings: Settings, small_disk: Path, whole_in_place: Path) -> None:
    run = small_disk / "part"
    code, message = ends(build(settings, run, At(8, lambda: fill(small_disk))))
    assert code == 4 and "bessemer resume" in message
    assert "free" in message.lower(), message
    assert 3 in assert_sound(run)  # and 6, unless its save was not yet through
    (small_disk / "ballast").unlink()
    assert ends(launch.reopen(run)) == (0, "")
    assert_same_run(run, whole_in_place)


@pytest.mark.slow
def test_a_disk_full_at_the_final_weights(
    in_place: None, settings: Settings, small_disk: Path, whole_in_place: Path
) -> None:
    """The last checkpoint is committed, the exported weights do not fit: exit 4, and resume writes them."""
    run = small_disk / "part"
    trainer = build(settings, run)
    export = trainer.save_pretrained

    def full(*arguments: object) -> object:
        fill(small_disk)
        return export(*arguments)  # type: ignore[arg-type]

    trainer.save_pretrained = full  # type: ignore[method-assign, assignment]
    code, message = ends(trainer)
    assert code == 4 and "No space left" in message and "bessemer resume" in message
    assert 12 in assert_sound(run)
    (small_disk / "ballast").unlink()
    assert ends(launch.reopen(run)) == (0, "")
    assert_same_run(run, whole_in_place)


@pytest.mark.slow
def test_a_real_process_on_a_disk_that_fills_up(
    settings: Settings, small_disk: Path, home: Path, whole: Path, tmp_path: Path
) -> None:
    run = small_disk / "part"
    process = hold(home, "step 8", tmp_path / "hold", *train(settings | HOLDING, run))
    assert until(process, lambda: steps_saved(run) >= 6)
    fill(small_disk)
    let_go(tmp_path / "hold")
    output = finish(process)
    assert process.returncode == 4, output
    assert_one_paragraph(output, "bessemer resume")
    assert max(assert_sound(run)) >= 6
    (small_disk / "ballast").unlink()
    assert_resumes(run, whole, home)


@pytest.mark.slow
def test_a_run_directory_that_becomes_read_only(
    settings: Settings, run: Path, home: Path, whole: Path, tmp_path: Path
) -> None:
    run.mkdir(parents=True)
    process = hold(home, "step 8", tmp_path / "hold", *train(settings | HOLDING, run))
    assert until(process, lambda: steps_saved(run) >= 6)
    with read_only(run):
        let_go(tmp_path / "hold")
        output = finish(process)
        saved = assert_sound(run)
        again, refused = call(home, "resume", str(run))
    assert process.returncode == 4, output
    assert_one_paragraph(output, "read-only")
    assert again == 4, refused
    assert_one_paragraph(refused, "read-only")
    assert max(saved) >= 6 and assert_sound(run) == saved
    assert_resumes(run, whole, home)


def test_a_directory_for_runs_that_is_read_only(in_place: None, settings: Settings, run: Path, home: Path) -> None:
    run.parent.mkdir()
    with read_only(run.parent):
        code, message = ends(build(settings, run))
    assert code == 4 and "read-only" in message and "--runs" in message


@pytest.mark.slow
def test_a_run_directory_deleted_during_the_run(in_place: None, settings: Settings, run: Path) -> None:
    """Exit 4. TensorStore makes the directory of a save in progress again; it must not become a checkpoint."""
    code, message = ends(build(settings, run, At(7, lambda: vanish(run))))
    assert code == 4 and "vanished" in message and str(run) in message
    assert Checkpoints(run / "checkpoints").committed() == []
    status = RunDirectory(run).read_status()
    assert status.get("exit_code") in (None, 4) and status.get("state") != "done"


def raced(path: Path) -> None:
    """`rm -rf` against a heartbeat: everything is deleted, and one file is there again before its directory goes."""
    vanish(path)
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)  # a save in progress may have made it again
    (path / "eval").mkdir()
    (path / "status.json").write_text('{"state": "running", "step": 5}')


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 5, 7, 12])
def test_a_run_directory_deleted_by_rm_that_raced_with_the_run(
    step: int, in_place: None, settings: Settings, run: Path
) -> None:
    """It ended "finished", exit 0, without its configuration and earlier rows."""
    code, message = ends(build(settings, run, At(step, lambda: raced(run))))
    assert code == 4 and "vanished" in message and str(run) in message
    assert RunDirectory(run).read_status() == {"state": "running", "step": 5}, "nothing is made again"
    assert Checkpoints(run / "checkpoints").committed() == [] and not (run / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["validate", "save_pretrained"])
def test_a_run_directory_deleted_after_the_last_save(
    moment: str, in_place: None, settings: Settings, run: Path
) -> None:
    trainer = build(settings, run)
    real = getattr(trainer, moment)

    def vanished(*arguments: object) -> object:
        if trainer.step == 12:
            vanish(run)
        return real(*arguments)

    setattr(trainer, moment, vanished)
    code, message = ends(trainer)
    assert code == 4 and "vanished" in message
    assert not run.exists()


@pytest.mark.slow
def test_a_real_process_whose_directory_is_deleted(
    settings: Settings, run: Path, home: Path, whole: Path, tmp_path: Path
) -> None:
    process = hold(home, "step 5", tmp_path / "hold", *train(settings | HOLDING, run))
    assert until(process, lambda: steps_saved(run) >= 3)
    aside = run.with_name("aside")
    run.rename(aside)
    let_go(tmp_path / "hold")
    output = finish(process)
    assert process.returncode == 4, output
    assert_one_paragraph(output, "vanished")
    assert not run.exists()
    aside.rename(run)  # it was moved, not deleted: put back, the run goes on
    assert_resumes(run, whole, home)
