"""`bessemer rm` deletes a run and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bessemer.cli.rm import command
from bessemer.errors import InputError
from bessemer.job import RunDirectory, RunLock
from bessemer.job.runs import strangers, written_by_runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_directory(tmp_path / "runs" / "mine")


def make_directory(path: Path, init: str | None = None) -> Path:
    """A run directory as a stopped run leaves it."""
    run = RunDirectory(path).create()
    run.config.write_text(f"job: BaseTrainer\ninit: {init or 'null'}\nprovenance: {{}}\n")
    run.write_status(state="stopped", step=3)
    (run.checkpoints / "step_00000003").mkdir()
    (run.checkpoints / "step_00000003" / "COMMIT").write_text("{}")
    return path


def rm(*words: str, answer: str = "") -> Result:
    return CliRunner().invoke(command, list(words), input=answer)


def refused(*words: str) -> str:
    result = rm(*words)
    assert isinstance(result.exception, InputError), result.output
    return str(result.exception)


def test_it_asks_and_deletes(run: Path) -> None:
    result = rm("mine", answer="n\n")
    assert result.exit_code == 0 and run.is_dir() and "Delete" in result.stderr and "step 3" in result.stderr
    assert "not confirmed" in refused("mine") and run.is_dir(), "no answer is no"
    result = rm("mine", answer="y\n")
    assert result.exit_code == 0 and not run.exists() and run.parent.is_dir()
    assert result.stdout.startswith(f"deleted {run}")


def test_yes_by_name_and_by_path(run: Path) -> None:
    other = make_directory(run.with_name("other"))
    assert rm("mine", "--yes").exit_code == 0 and not run.exists() and other.is_dir()
    assert rm(str(other), "--yes").exit_code == 0 and not other.exists()
    assert "no run 'mine'" in refused("mine", "--yes")


def test_a_run_at_work_is_refused(run: Path) -> None:
    with RunLock(run):
        assert "in use by pid" in refused("mine", "--yes")
    phase = make_directory(run / "phases" / "first")
    with RunLock(phase):
        assert "in use by pid" in refused("mine", "--yes")
    assert rm("mine", "--yes").exit_code == 0 and not run.exists()


def test_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (run / "model").symlink_to(precious)
    (run / "checkpoints" / "step_00000009").symlink_to(precious)
    (run / "lock").unlink(missing_ok=True)
    (run / "lock").symlink_to(precious / "thesis.txt")
    (run.parent / "alias").symlink_to(run)
    assert "is a link to" in refused("alias", "--yes") and run.is_dir()
    assert rm("mine", "--yes").exit_code == 0 and not run.exists()
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_only_a_run_directory_is_deleted(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    (project / "checkpoints").mkdir(parents=True)
    (project / "config.yaml").write_text("database: postgres\n")
    (project / "main.py").write_text("")
    assert "is not a run directory" in refused(str(project), "--yes") and (project / "main.py").exists()
    (project / "config.yaml").unlink()
    (project / "config.yaml").symlink_to(run / "config.yaml")
    assert "is not a run directory" in refused(str(project), "--yes")
    shutil.copytree(run, tmp_path / "runs" / "outer")
    shutil.copytree(run, tmp_path / "runs" / "outer" / "inner")
    assert "contains other runs (inner)" in refused("outer", "--yes")
    assert "no run" in refused("runs/", "--yes") and run.is_dir()
    monkeypatch.chdir(run / "checkpoints")
    assert "contains the current directory" in refused(str(run), "--yes") and run.is_dir()


def test_own_files_and_dependent_runs_are_named(run: Path) -> None:
    (run / "notes.md").write_text("mine")
    make_directory(run.with_name("adapters"), init=str(run / "checkpoints" / "step_00000003"))
    make_directory(run.with_name("unrelated"), init=str(run) + "-2")
    result = rm("mine", answer="n\n")
    assert "no run wrote: notes.md" in result.stderr and "initialized or distilled from it: adapters\n" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may delete anything")
def test_what_cannot_be_deleted_is_a_storage_error(run: Path) -> None:
    from bessemer.errors import StorageError

    (run / "checkpoints").chmod(0o500)
    assert isinstance(rm("mine", "--yes").exception, StorageError)
    (run / "checkpoints").chmod(0o700)


def test_every_file_of_a_run_is_known(run: Path) -> None:
    found = RunDirectory(run)
    assert strangers(found) == [] and {"config.yaml", "metrics.jsonl", "reference"} <= written_by_runs(found)
