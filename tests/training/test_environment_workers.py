"""Worker processes of environments: an empty standard input, and the error for a constructor that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.training.tiny_rl import build, grpo_settings

from bessemer.errors import InputError
from bessemer.rl.environments.base import EnvironmentSpec
from bessemer.rl.workers import Workers, check_made

OWN = """
import subprocess
import sys
from bessemer.rl.environments.base import Environment

class Asks(Environment):
    def __init__(self, how="input"):
        self.how = how

    def reset(self, row, seed):
        if self.how == "input":
            return input("your name: ")
        if self.how == "child":
            return subprocess.run(["cat"], capture_output=True, check=True, timeout=60).stdout.decode() + "nothing"
        return sys.stdin.read() + "nothing"

    def step(self, completion):
        return None, 0.0, True

class Broken(Asks):
    def __init__(self, how="raise"):
        if how == "exit":
            sys.exit(5)
        self.door = {}["door"]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own_environments.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("how", ["input", "child", "read"])
def test_standard_input_is_empty_and_takes_no_call(how: str, own: Path) -> None:
    workers = Workers(EnvironmentSpec(f"{own}:Asks", {"how": how}), [], 1, 60.0, 0)
    try:
        for number in range(2):  # the second call is not what the first one read
            outcome = workers.submit(number, {"call": "reset", "row": {}, "seed": 1}).result()
            if how == "input":
                assert outcome.failure == f"reset: EOFError: EOF when reading a line ({own} line 12)"
            else:
                assert outcome.reply == {"prompt": "nothing", "tools": []}
    finally:
        workers.close()


def test_an_environment_that_cannot_be_made_is_named_with_its_line(own: Path) -> None:
    check_made(EnvironmentSpec("guess"), [])
    with pytest.raises(
        InputError, match=r"own_environments.py:Broken' cannot be made: KeyError: 'door' \(.* line 24\)"
    ):
        check_made(EnvironmentSpec(f"{own}:Broken"), [])
    with pytest.raises(InputError, match="cannot be made: its worker process ended with code 5"):
        check_made(EnvironmentSpec(f"{own}:Broken", {"how": "exit"}), [])
    with pytest.raises(InputError, match=r"cannot be made: low=9 is above high=2\."):
        check_made(EnvironmentSpec("guess", {"low": 9, "high": 2}), [])


def test_an_environment_is_made_before_anything_is_written(own: Path, tmp_path: Path, on_one_device: None) -> None:
    changes: dict[str, Any] = {"grpo.environment": f"{own}:Broken", "training.steps": 2}
    settings = grpo_settings(tmp_path, [{"number": n} for n in range(20)], changes)
    with pytest.raises(InputError, match=r"KeyError: 'door' \(.*own_environments.py line 24\)"):
        build(settings, tmp_path, "no")
    assert not (tmp_path / "no").exists()
