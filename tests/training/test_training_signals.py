"""A stop signal at any moment of the command, in real processes: the right code; the run resumes, or never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import words
from tests.processes import TIMEOUT

pytestmark = pytest.mark.slow

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def small(tiny: dict[str, object]) -> dict[str, object]:
    """Quick to compile; yet, with a cold cache, long enough to be met by a signal."""
    return {**tiny, "optimization.name": "adamw", "logging.preview_prompts": "[the]"}


SLOW_DATA = """
import time
from pathlib import Path
from bessemer.registry import datasets

@datasets.register("slow_data")
def slow_data():
    Path({marker!r}).touch()
    time.sleep(600)
    yield {{"text": "never"}}
"""


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """As from a terminal, also where the tests themselves run under nohup: a process inherits what is ignored."""
    env = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1"}
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "bessemer", *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGHUP, inherited)


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)


def losses(path: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_data_is_prepared_there_is_no_run_yet(
    number: signal.Signals, small: dict[str, object], home: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "preparing"
    (tmp_path / "slow_data.py").write_text(SLOW_DATA.format(marker=str(marker)))
    settings = {
        **small,
        "training.dataset": "slow_data",
        "plugins": f"[{tmp_path / 'slow_data.py'}]",
        "data.root": str(tmp_path / "root"),
    }
    process = start(home, "train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name", "a")
    wait_until(process, marker.exists)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + number, output
    assert "nothing to resume" in output and "Traceback" not in output
    assert not (tmp_path / "a").exists()


def test_while_the_program_compiles_the_run_resumes_from_its_start(
    small: dict[str, object], tmp_path: Path, cli: Cli
) -> None:
    """A cold cache makes the compilation long; the header is written just before it."""
    cold = tmp_path / "cold"
    arguments = ["train", "quickstart", *words(small), "--runs", str(tmp_path)]
    process = start(cold, *arguments, "--name", "part")
    log = tmp_path / "part/log.txt"
    wait_until(process, lambda: log.exists() and "devices" in log.read_text())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, output
    assert "compiled" not in output and "starts again" in output and "bessemer resume" in output
    status = json.loads((tmp_path / "part/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert not (tmp_path / "part/metrics.jsonl").exists()
    again = cli("resume", str(tmp_path / "part"), env={"BESSEMER_HOME": str(cold)})
    assert again.returncode == 0, again.stderr
    assert "starts again from step 0" in again.stdout and "took over the lock" not in again.stdout
    whole = cli(*arguments, "--name", "whole", env={"BESSEMER_HOME": str(cold)})
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_before_a_resume_has_begun_the_run_is_as_it_was(
    small: dict[str, object], home: Path, tmp_path: Path, cli: Cli
) -> None:
    limited = {**small, "training.time_limit": "0.001s"}
    stopped = cli("train", "quickstart", *words(limited), "--runs", str(tmp_path), "--name", "a")
    assert stopped.returncode == 75, stopped.stderr
    before = (tmp_path / "a/status.json").read_text()
    process = start(home, "resume", str(tmp_path / "a"))
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(process, lambda: "jaxlib" in maps.read_text())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, output
    assert "bessemer resume" in output
    if "it is as it was" in output:
        assert (tmp_path / "a/status.json").read_text() == before


def test_a_second_interrupt_leaves_at_once(small: dict[str, object], home: Path, tmp_path: Path, cli: Cli) -> None:
    """The first asks for a stop after the step, which takes minutes here; the second does not wait for it."""
    marker = tmp_path / "in_step"
    (tmp_path / "slow_step.py").write_text(
        "import time\nfrom pathlib import Path\nimport bessemer as bm\nfrom bessemer.registry import callbacks\n\n"
        "@callbacks.register('slow_step')\nclass SlowStep(bm.Callback):\n"
        "    def on_batch_end(self, loop):\n        if loop.step == 4:\n"
        f"            Path({str(marker)!r}).touch()\n            time.sleep(600)\n"
    )
    settings = {**small, "plugins": f"[{tmp_path / 'slow_step.py'}]", "callbacks": "[slow_step]"}
    process = start(home, "train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name", "a")
    saved = tmp_path / "a/checkpoints/step_00000003/COMMIT"
    wait_until(process, lambda: marker.exists() and saved.exists())
    process.send_signal(signal.SIGINT)
    said = ""
    while "Ctrl-C again" not in said:  # two signals at once would be one
        line = process.stdout.readline() if process.stdout is not None else ""
        assert line, said
        said += line
    assert process.poll() is None, "the step is not over"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, output
    assert "leaving at once" in output
    assert saved.exists()


def test_a_run_outlives_the_reader_of_its_output(small: dict[str, object], home: Path, tmp_path: Path) -> None:
    """`bessemer train | tee log` goes on when tee is killed; a closed terminal's SIGHUP stops it as SIGTERM does."""
    settings = {**small, "training.steps": 100_000, "logging.report_interval": 1}
    process = start(home, "train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name", "a")
    run = tmp_path / "a"
    wait_until(process, lambda: (run / "metrics.jsonl").exists() and len(losses(run)) >= 3)
    assert process.stdout is not None
    process.stdout.close()
    before = len(losses(run))
    wait_until(process, lambda: len(losses(run)) >= before + 20)
    process.send_signal(signal.SIGHUP)
    assert process.wait(TIMEOUT) == 75
    status = json.loads((run / "status.json").read_text())
    assert status["message"].startswith("received SIGHUP") and status["step"] == losses(run)[-1][0]
    assert (run / f"checkpoints/step_{status['step']:08}/COMMIT").exists()
    said = [int(line.split()[3]) for line in (run / "log.txt").read_text().splitlines() if "val loss" in line]
    assert said[-1] > before, "what nobody read is in the log"
