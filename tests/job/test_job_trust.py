"""The mark of a run that was started here: it cannot be forged, copied to other code, or read by others."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from bessemer.config.recipes import saved_tree
from bessemer.errors import InputError
from bessemer.job import RestoreableJob, RunDirectory
from bessemer.job.trust import check_trust, mark_origin, requests_of


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("BESSEMER_HOME", str(home))
    return home


def run_with(root: Path, text: str, mark: bool = True) -> RunDirectory:
    run = RunDirectory(root / "mine").create()
    run.config.write_text(text)
    if mark:
        mark_origin(run, saved_tree(run.config))
    return run


def test_a_marked_run_is_trusted_wherever_it_is_moved(tmp_path: Path, own_home: Path) -> None:
    run = run_with(tmp_path / "a", "job: parts:Job\n")
    check_trust(run)
    assert stat.S_IMODE((own_home / "secret").stat().st_mode) == 0o600
    shutil.move(run.path, tmp_path / "elsewhere")
    check_trust(RunDirectory(tmp_path / "elsewhere"))
    before = (tmp_path / "elsewhere/origin.json").read_bytes()
    mark_origin(RunDirectory(tmp_path / "elsewhere"), {"job": "parts:Job"})  # as every resume does
    assert (tmp_path / "elsewhere/origin.json").read_bytes() == before


def test_a_run_without_code_needs_no_mark_and_makes_no_secret(tmp_path: Path, own_home: Path) -> None:
    run = run_with(tmp_path, "job: BaseTrainer\n")
    check_trust(run)
    assert not run.origin.exists() and not own_home.exists()


@pytest.mark.parametrize("damage", ["none", "garbage", "other secret", "other code", "forged"])
def test_what_does_not_verify_asks_for_trust(tmp_path: Path, own_home: Path, damage: str) -> None:
    run = run_with(tmp_path, "job: parts:Job\n")
    if damage == "none":
        run.origin.unlink()
    elif damage == "garbage":
        run.origin.write_text("[]")
    elif damage == "other secret":
        (own_home / "secret").write_bytes(os.urandom(32))
    elif damage == "other code":
        run.config.write_text("job: parts:Other\n")
    else:
        mark = json.loads(run.origin.read_text())
        run.origin.write_text(json.dumps({**mark, "marks": ["0" * 64] * len(mark["marks"])}))
    run.write_status(state="stopped", step=1)  # names this host: no longer believed
    with pytest.raises(InputError, match=r"parts:(Job|Other).*--trust"):
        check_trust(run)
    check_trust(run, trust=True)


def test_another_plugin_file_of_the_same_name_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_with(tmp_path / "runs", "plugins: [parts.py]\n")
    check_trust(run)
    (tmp_path / "sent").mkdir()
    monkeypatch.chdir(tmp_path / "sent")
    with pytest.raises(InputError, match=r"parts\.py"):
        check_trust(run)


def test_a_reference_cannot_hide_a_name(tmp_path: Path) -> None:
    run = run_with(tmp_path, "word: evil:Job\njob: ${word}\nmodel.family: '${word}'\n", mark=False)
    found = {request.where: request.word for request in requests_of(saved_tree(run.config))}
    assert found["job"] == found["model.family"] == "evil:Job"


def test_a_secret_that_others_can_read_proves_nothing(tmp_path: Path, own_home: Path) -> None:
    run = run_with(tmp_path, "job: parts:Job\n")
    (own_home / "secret").chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        check_trust(run)


def test_from_checkpoint_imports_nothing_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the class that a run names, nor one that only a checkpoint of it names."""
    (tmp_path / "foreign_parts.py").write_text("raise AttributeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = run_with(tmp_path, "job: foreign_parts:Job\n", mark=False)
    step = run.checkpoints / "step_00000001"
    step.mkdir()
    for path, text in ((run.path, "job: foreign_parts:Job\n"), (step, "job: BaseTrainer\n")):
        run.config.write_text(text)
        (step / "config.yaml").write_text("job: foreign_parts:Job\n")
        with pytest.raises(InputError, match="trust=True"):
            RestoreableJob.from_checkpoint(path)
    assert "foreign_parts" not in sys.modules
    with pytest.raises(InputError, match="AttributeError: imported"):
        RestoreableJob.from_checkpoint(step, trust=True)
