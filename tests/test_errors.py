"""What an error tells its reader to type can be typed: commands are written as the shell at hand finds them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bessemer.errors import runnable, to_install

TEXT = "stopped: step 3. Continue with: bessemer resume runs/a, or see `bessemer doctor runs/a`. A bug in bessemer."


def test_a_command_on_the_path_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(tmp_path / "bessemer")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runnable(TEXT) == TEXT


def test_after_make_train_alone_the_virtual_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program(tmp_path / ".venv" / "bin" / "bessemer")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "argv", [str(program), "train"])
    monkeypatch.chdir(tmp_path)
    said = runnable(TEXT)
    assert "with: .venv/bin/bessemer resume runs/a" in said and "`.venv/bin/bessemer doctor runs/a`" in said
    assert said.endswith("A bug in bessemer.")
    assert runnable("next\n  bessemer dash    # all runs") == "next\n  .venv/bin/bessemer dash    # all runs"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"with: {program} resume runs/a" in runnable(TEXT)


def test_an_extra_is_installed_where_this_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    assert to_install("dash") == f"{sys.executable} -m pip install 'bessemer[dash]'"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert to_install("dash") == "python -m pip install 'bessemer[dash]'"


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path
