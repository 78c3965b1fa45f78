"""Time to the first step: the parts add up, and the cache says whether it helped."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tests.conftest import words

from bessemer.training import launch
from bessemer.training.display import StartUp
from bessemer.training.setup.compiled import Programs


def test_laps_add_up_and_end_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 102.0, 105.0, 105.5])  # made, and the end of each lap
    clock = SimpleNamespace(monotonic=lambda: next(moments))
    monkeypatch.setattr("bessemer.training.display.time", clock)
    startup = StartUp()
    startup.lap("data")
    startup.lap("compile")
    startup.lap("data")
    assert startup.facts() is None and set(startup.parts) == {"data", "compile"}
    startup.began(startup._made - 5.0)
    startup.done = True
    startup.lap("late")
    facts = startup.facts()
    assert facts is not None and list(facts["parts"]) == ["imports and devices", "data", "compile"]
    assert facts["seconds"] == 10.5
    assert startup.line().startswith("first step after 10.5 s: imports and devices 5.0, data 2.5, compile 3.0")


def test_a_run_of_days_is_said_after_one_step() -> None:
    """Not after the first report, which may be half an hour away."""
    startup = StartUp()
    startup.parts["first step"] = 149.0
    assert "takes 5h17m (128 steps of 149 s)" in str(startup.forecast(128))
    assert startup.forecast(20) is None
    startup.parts["first step"] = 1.0
    assert startup.forecast(100_000) is None, "most of it is what only a first step has"


def test_words_for_the_cache() -> None:
    assert Programs(2, 2).words == "cache hit" and Programs(2, 0).words == "cache miss"
    assert Programs(0, 0).words == "no cache" and Programs(3, 1).words == "cache had 1 of 3"
    assert Programs(5, 4) - Programs(3, 4) == Programs(2, 0)


@pytest.mark.slow
def test_a_run_says_it_once(tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.topology import make_topology

    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
    launch.build_trainer("quickstart", tiny, name="a", root=tmp_path).run()
    facts = json.loads((tmp_path / "a/facts.json").read_text())["start_up"]
    assert list(facts["parts"]) == ["data", "setup", "compile", "state", "validation", "first step"]
    assert facts["seconds"] == pytest.approx(sum(facts["parts"].values()), abs=0.01)
    assert facts["cache"].startswith("cache")
    log = (tmp_path / "a/log.txt").read_text()
    assert log.count("first step after") == 1
    assert "# teach it to answer" in log and "on your own text" not in log, "its text was the caller's own"
    assert f"first step after | {facts['seconds']:.1f} s" in (tmp_path / "a/report.md").read_text()


@pytest.mark.slow
def test_the_second_process_finds_its_programs(
    cli: Callable[..., subprocess.CompletedProcess[str]], tiny: dict[str, Any], tmp_path: Path
) -> None:
    found, said = [], []
    for name in ("cold", "warm"):
        result = cli("train", *words(tiny), "--name", name, cwd=tmp_path, env={"BESSEMER_HOME": str(tmp_path / "home")})
        assert result.returncode == 0, result.stderr
        facts = json.loads((tmp_path / "runs" / name / "facts.json").read_text())["start_up"]
        assert next(iter(facts["parts"])) == "imports and devices"
        found.append(facts["cache"])
        said.append(result.stdout + (tmp_path / "runs" / name / "log.txt").read_text())
    assert found == ["cache miss", "cache hit"]
    assert said[0].count("compiled   in ") == 2 and "from the cache" not in said[0]
    assert said[1].count("loaded     from the cache in ") == 2 and "compil" not in said[1].split("first step")[0]
