"""Asked to stop: SIGTERM, SIGINT once and twice, the time limit. Exit 75, and resume is the same run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.faults.harness import (
    HOLDING,
    assert_resumes,
    assert_sound,
    call,
    finish,
    hold,
    metrics,
    start,
    train,
    until,
    words,
)

Settings = dict[str, object]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_with_a_checkpoint(
    number: signal.Signals, settings: Settings, run: Path, home: Path, whole: Path, tmp_path: Path
) -> None:
    process = hold(home, "step 5", tmp_path / "hold", *train(settings | HOLDING, run))
    process.send_signal(number)
    output = finish(process)
    assert process.returncode == 75, output
    for text in (output, (run / "log.txt").read_text()):
        assert f"received {number.name}" in text and f"bessemer resume {run}" in text
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and status["exit_code"] == 75
    assert status["step"] == max(assert_sound(run)) == max(row["step"] for row in metrics(run)) == 5
    assert_resumes(run, whole, home)


SLOW = """
import os
import time

import bessemer as bm
from bessemer.registry import callbacks


@callbacks.register("slow")
class Slow(bm.Callback):
    def on_batch_end(self, loop):
        if loop.step == 7 and os.environ.get("HANG"):
            open(os.environ["HANG"], "w").close()
            time.sleep(600)
"""


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(
    settings: Settings, run: Path, home: Path, whole: Path, tmp_path: Path
) -> None:
    """A step that takes minutes: the first SIGINT waits for its end, the second does not."""
    (tmp_path / "slow.py").write_text(SLOW)
    mine = {**settings, "plugins": f"[{tmp_path / 'slow.py'}]", "callbacks": "[slow]"}
    process = start(home, *train(mine, run), HANG=str(tmp_path / "hangs"))
    assert until(process, (tmp_path / "hangs").exists)
    process.send_signal(signal.SIGINT)
    seen = ""
    while "Ctrl-C again" not in seen:  # two signals at once would be one
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, seen
        seen += line
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode in (75, 130) and "interrupted twice" in output, output
    assert max(assert_sound(run)) <= 6
    assert_resumes(run, whole, home)


@pytest.mark.slow
def test_the_time_limit_stops_with_a_checkpoint(settings: Settings, run: Path, home: Path, whole: Path) -> None:
    """A limit shorter than the start still takes one step a process, so that a chain of short jobs gets somewhere."""
    code, output = call(home, *train({**settings, "training.time_limit": "0.1s"}, run))
    assert code == 75 and "training.time_limit=0.1s reached" in output and "bessemer resume" in output
    assert assert_sound(run) == [1]
    code, output = call(home, "resume", str(run))
    assert code == 75 and assert_sound(run) == [1, 2], output
    assert_resumes(run, whole, home, *words({"training.time_limit": "1h"}))
