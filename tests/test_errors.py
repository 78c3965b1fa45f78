"""What an error tells its reader to type can be typed: commands are written as the shell at hand finds them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bessemer
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


class Installed:
    """A distribution as pip leaves it."""

    requires = ("jax>=0.10", 'wandb>=0.17; extra == "track"', 'tensorboard; extra == "track"', 'ray; extra == "ray"')

    def __init__(self, direct_url: dict[str, Any] | None) -> None:
        self.direct_url = direct_url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.direct_url is None else json.dumps(self.direct_url)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any] | None], None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    return lambda direct_url: monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: Installed(direct_url)
    )


def test_an_extra_is_installed_for_the_python_that_runs_this(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(None)
    assert to_install("dash") == "python -m pip install 'bessemer[dash]'"
    monkeypatch.setenv("PATH", os.defpath)
    assert to_install("dash") == f"{sys.executable} -m pip install 'bessemer[dash]'"


def test_an_extra_is_installed_from_where_bessemer_came(
    installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    folder = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    installed(folder)
    assert to_install("track") == "python -m pip install -e 'my clone[track]'"
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert to_install("track") == "python -m pip install 'my clone[track]'"
    monkeypatch.chdir(clone)
    assert to_install("track") == "python -m pip install '.[track]'"
    installed({"url": "https://example.org/b.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert to_install("track").endswith("'bessemer[track] @ git+https://example.org/b.git@abc'")
    monkeypatch.chdir(tmp_path)
    clone.rmdir()
    installed(folder)
    assert to_install("track") == "python -m pip install 'wandb>=0.17' tensorboard"


def test_an_extra_of_sources_that_were_never_installed(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    installed(None)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    root = Path(bessemer.__file__).parents[2]
    assert to_install("track") == f"python -m pip install -e {shlex.quote(f'{root}[track]')}"


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path
