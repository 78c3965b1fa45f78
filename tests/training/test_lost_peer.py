"""A process of a run dies: the others say so and leave; the last checkpoint is sound; all together go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import words

from bessemer.checkpoint import Checkpoints


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pair(home: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes of one run, one device each."""
    shared = {
        **os.environ,
        "BESSEMER_HOME": str(home),
        "JAX_NUM_CPU_DEVICES": "1",
        "BESSEMER_COORDINATOR": f"127.0.0.1:{free_port()}",
        "BESSEMER_PROCESSES": "2",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bessemer", *arguments],
            env={**shared, "BESSEMER_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]


UNHURRIED = """
import time
from pathlib import Path
import bessemer as bm
from bessemer.registry import callbacks

@callbacks.register("unhurried")
class Unhurried(bm.Callback):
    def on_batch_end(self, loop):
        if Path({marker!r}).exists():
            time.sleep(0.1)
"""


def steps(path: Path) -> list[int]:
    if not (path / "metrics.jsonl").exists():
        return []
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if line.endswith("}") and '"loss"' in line]


@pytest.mark.slow
def test_the_survivor_leaves_with_exit_4_and_both_resume(
    tiny: dict[str, object], home: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.touch()  # until a process is killed, so that there is a middle to kill it in
    (tmp_path / "unhurried.py").write_text(UNHURRIED.format(marker=str(slow)))
    settings = {
        **tiny,
        "optimization.name": "adamw",
        "training.steps": 60,
        "training.validation": False,
        "logging.checkpoint_interval": 5,
        "plugins": f"[{tmp_path / 'unhurried.py'}]",
        "callbacks": "[unhurried]",
    }
    both = pair(home, "train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name", "two")
    path = tmp_path / "two"
    deadline = time.monotonic() + 200
    while not (reached := steps(path)) or reached[-1] < 12:
        assert time.monotonic() < deadline and all(process.poll() is None for process in both)
        time.sleep(0.02)
    both[1].kill()
    output, _ = both[0].communicate(timeout=30)
    both[1].communicate()
    assert both[0].returncode == 4, output
    for part in ("process 1 gives no sign of life", "last good checkpoint is step", "bessemer resume"):
        assert part in output, output
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    newest, _ = Checkpoints(path / "checkpoints").newest_valid()
    assert newest is not None and newest >= 5

    slow.unlink()
    both = pair(home, "resume", str(path))
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert steps(path) == list(range(1, 61)), "no row is missing or doubled"


@pytest.mark.long
def test_two_processes_roll_back_together(tiny: dict[str, object], home: Path, tmp_path: Path) -> None:
    """The loss is replicated, so both decide the same at the same step; to rounding it is the run of one process."""
    settings = {
        **tiny,
        "optimization.name": "adamw",
        "training.steps": 14,
        "training.validation": False,
        "logging.checkpoint_interval": 4,
        "plugins": f"[{Path(__file__).parent / 'poison.py'}]",
        "job": "poisoned",
        "objective": "poisonable",
        "training.poison": "{'6': 50.0}",
        "guard.spike_sigma": 6.0,
        "guard.spike_window": 4,
        "guard.spike_action": "rollback",
    }
    arguments = ["train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name"]
    env = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1"}
    alone = subprocess.Popen([sys.executable, "-m", "bessemer", *arguments, "one"], env=env)
    both = pair(home, *arguments, "two")
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [alone.wait(timeout=200), *(process.returncode for process in both)] == [0, 0, 0], outputs
    one, two = (
        [json.loads(row) for row in (tmp_path / name / "metrics.jsonl").open()] for name in ("one", "two")
    )
    assert [row["step"] for row in two] == list(range(1, 15)) and two[-1]["rollbacks"] == 1
    for a, b in zip(one, two, strict=True):
        assert a["target_tokens"] == b["target_tokens"] and a["epoch"] == b["epoch"], "the same token stream"
        assert abs(a["loss"] - b["loss"]) < 1e-2 * a["loss"]
