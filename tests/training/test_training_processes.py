"""Real processes: k steps and the rest, two processes of one run; through the command line (faults: tests/faults)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import words

Cli = Callable[..., subprocess.CompletedProcess[str]]


def start(home: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "bessemer", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def metrics(path: Path) -> list[dict[str, Any]]:
    if not (path / "metrics.jsonl").exists():
        return []
    rows = [
        json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mem/"))} for row in rows]


def weights(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path / "model" / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    assert metrics(a) == metrics(b)


@pytest.fixture(scope="module")
def longer(tiny: dict[str, object]) -> dict[str, object]:
    return {**tiny, "training.steps": 60, "logging.checkpoint_interval": 7, "logging.validation_interval": 20}


def wait_for_step(process: subprocess.Popen[str], path: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        rows = metrics(path)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.02)


STOP_AT = """
from dataclasses import dataclass
import bessemer as bm
from bessemer.registry import callbacks

@callbacks.register("stop_at")
@dataclass
class StopAt(bm.Callback):
    at: int = bm.field("training/stop_at", default=-1)

    def on_batch_end(self, loop):
        if loop.step == self.at:
            loop.request_stop("test")
"""


@pytest.mark.long
def test_k_steps_a_new_process_and_the_rest(tiny: dict[str, object], tmp_path: Path, cli: Cli) -> None:
    """k = 1 … 5 of ten steps, across the end of an epoch; each part in a process of its own."""
    (tmp_path / "stop_at.py").write_text(STOP_AT)
    settings = {**tiny, "plugins": f"[{tmp_path / 'stop_at.py'}]", "callbacks": "[stop_at]"}
    done = cli("train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name", "whole")
    assert done.returncode == 0, done.stderr
    assert any(row.get("epoch", 0) > 1 for row in metrics(tmp_path / "whole"))
    for k in range(1, 6):
        part = words({**settings, "training.stop_at": k})
        stopped = cli("train", "quickstart", *part, "--runs", str(tmp_path), "--name", f"k{k}")
        assert stopped.returncode == 75, stopped.stderr
        assert max(row["step"] for row in metrics(tmp_path / f"k{k}")) == k
        resumed = cli("resume", str(tmp_path / f"k{k}"))
        assert resumed.returncode == 0, resumed.stderr
        assert_same_run(tmp_path / f"k{k}", tmp_path / "whole")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_processes_are_one_run(longer: dict[str, object], home: Path, tmp_path: Path) -> None:
    """Two processes, one device each: the same token stream and, to rounding, the same losses; SIGTERM to one of
    them stops both at the same step, and both together resume."""
    settings = words({**longer, "training.steps": 20, "logging.validation_interval": 10})
    single = start(home, "train", "quickstart", *settings, "--runs", str(tmp_path), "--name", "one")
    assert single.wait(timeout=300) == 0, single.communicate()[0]

    def pair(*arguments: str) -> list[subprocess.Popen[str]]:
        address = f"127.0.0.1:{free_port()}"
        return [
            start(
                home,
                *arguments,
                BESSEMER_COORDINATOR=address,
                BESSEMER_PROCESSES="2",
                BESSEMER_PROCESS_ID=str(i),
            )
            for i in range(2)
        ]

    both = pair("train", "quickstart", *settings, "--runs", str(tmp_path), "--name", "two")
    wait_for_step(both[0], tmp_path / "two", 3)
    both[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [75, 75], outputs
    both = pair("resume", str(tmp_path / "two"))
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "val_loss", "val_bpb"):
            if name in a:
                assert abs(a[name] - b[name]) < 2e-2 * a[name], (a["step"], name)
        assert a.get("target_tokens") == b.get("target_tokens")
    assert abs(one[1]["loss"] - two[1]["loss"]) < 1e-5, "before the first update nothing but rounding differs"
