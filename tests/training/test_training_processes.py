"""Real processes through the command line: k steps and the rest; two and four processes of one run, one of which dies
(faults of a single process: tests/faults)."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.conftest import words
from tests.processes import finish, start, wait_until

from bessemer.checkpoint import Checkpoints

Cli = Callable[..., subprocess.CompletedProcess[str]]


def metrics(path: Path) -> list[dict[str, Any]]:
    if not (path / "metrics.jsonl").exists():
        return []
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
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


UNHURRIED = '''
import time
from pathlib import Path
import bessemer as bm
from bessemer.registry import callbacks

@callbacks.register("unhurried")
class Unhurried(bm.Callback):
    """Goes no further than step 16 while there is a file `slow` beside the run; says when it is asked to stop."""

    def on_batch_end(self, loop):
        beside = loop.trainer.run_directory.path.parent
        while True:
            if loop._stop_reason is not None:
                (beside / "asked").touch()
            if loop.step != 16 or not (beside / "slow").exists():
                break
            time.sleep(0.02)
'''
STEPS = 24


class Story(NamedTuple):
    """The same run by one process (`one`), by several (`whole`), and by several of which one is killed and, after a
    resume, one is asked to stop (`told`); with what the processes of the last said and how they ended."""

    one: Path
    whole: Path
    told: Path
    killed: tuple[list[int], list[str]]
    status: dict[str, Any]
    stopped: tuple[list[int], list[str]]
    done: tuple[list[int], list[str]]


def tell(count: int, settings: dict[str, object], root: Path, home: Path) -> Story:
    (root / "unhurried.py").write_text(UNHURRIED)
    recorder = Path(__file__).parents[1] / "invariance" / "recorder.py"
    settings = {
        **settings,
        "optimization.name": "adamw",
        "training.steps": STEPS,
        "training.per_device_batch_size": 2,
        "logging.validation_interval": 12,
        "logging.checkpoint_interval": 5,
        "plugins": f"[{root / 'unhurried.py'},{recorder}]",
        "callbacks": "[unhurried,record_batches]",
    }
    arguments = ["train", "quickstart", *words(settings), "--runs", str(root), "--name"]
    for name, processes in (("one", 1), ("whole", count)):
        codes, outputs = finish(start(home, processes, *arguments, name))
        assert codes == [0] * processes, outputs
    slow, told = root / "slow", root / "told"
    slow.touch()  # so that there is a middle to be met
    processes = start(home, count, *arguments, "told")
    wait_until(processes, lambda: reached(told) >= 7 and is_saved(told))
    processes[-1].kill()
    slow.unlink()
    killed, status = finish(processes), json.loads((told / "status.json").read_text())
    slow.touch()
    processes = start(home, count, "resume", str(told))
    wait_until(processes, lambda: reached(told) >= 12)
    processes[-1].send_signal(signal.SIGTERM)
    wait_until(processes, (root / "asked").exists)
    slow.unlink()
    stopped = finish(processes)
    done = finish(start(home, count, "resume", str(told)))
    return Story(root / "one", root / "whole", told, killed, status, stopped, done)


def reached(path: Path) -> int:
    return max((row["step"] for row in metrics(path)), default=0)


def is_saved(path: Path) -> bool:
    """Whether a checkpoint is committed: it is written beside the steps, so a later step says nothing about it."""
    return any(path.glob("checkpoints/step_*/COMMIT"))


def stream(path: Path) -> dict[int, str]:
    """Batch number -> digest of what the compiled step was given; one that was done again must be the same."""
    lines = [json.loads(line) for line in (path / "batches.jsonl").read_text().splitlines()]
    found: dict[int, str] = {}
    for line in lines:
        assert found.setdefault(line["data_step"], line["digest"]) == line["digest"]
    return found


@pytest.fixture(scope="module")
def two(tiny: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell(2, tiny, tmp_path_factory.mktemp("two"), home)


@pytest.mark.slow
def test_two_processes_are_one_run(two: Story) -> None:
    check_one_run(two)


@pytest.mark.slow
def test_the_survivor_leaves_with_exit_4_and_both_resume(two: Story) -> None:
    check_loss_and_resume(two)


@pytest.mark.slow
def test_a_signal_to_one_stops_both_at_one_step(two: Story) -> None:
    check_stop(two)


@pytest.mark.slow
def test_process_0_alone_speaks_and_reports_the_goodput(two: Story) -> None:
    check_voices(two)


@pytest.mark.slow
def test_processes_agree_on_when_to_save_by_time_and_preview_together(
    tiny: dict[str, object], home: Path, tmp_path: Path
) -> None:
    """Process 0 asks after steps 1 and 5, since it is always late, and both save three steps later."""
    settings = {**tiny, "training.per_device_batch_size": 2, "training.validation": "false"}
    settings |= {"logging.checkpoint_interval": -1, "logging.checkpoint_minutes": 1e-9}
    settings |= {"topology.fsdp": 2, "topology.data": 1}  # parameters that no process has whole
    settings |= {"logging.preview_interval": 6, "logging.preview_prompts": "[the red, a]"}
    arguments = ["train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name", "timed"]
    codes, outputs = finish(start(home, 2, *arguments))
    assert codes == [0, 0], outputs
    assert Checkpoints(tmp_path / "timed" / "checkpoints").committed() == [4, 8, 10]
    samples = (tmp_path / "timed" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == [6, 6, 10, 10]


@pytest.mark.long
def test_four_processes(tiny: dict[str, object], home: Path, tmp_path: Path) -> None:
    four = tell(4, tiny, tmp_path, home)
    for check in (check_one_run, check_loss_and_resume, check_stop, check_voices):
        check(four)


def check_one_run(story: Story) -> None:
    """The same token stream as one process and, to rounding, the same losses."""
    assert stream(story.one) == stream(story.whole) == stream(story.told)
    assert sorted(stream(story.one)) == list(range(STEPS))
    one, many = metrics(story.one), metrics(story.whole)
    assert [row["step"] for row in one] == [row["step"] for row in many]
    for a, b in zip(one, many, strict=True):
        for name in {"loss", "val_loss", "val_bpb"} & a.keys():
            assert abs(a[name] - b[name]) < 2e-2 * a[name], (a["step"], name)
        assert a.get("target_tokens") == b.get("target_tokens")
    assert abs(one[1]["loss"] - many[1]["loss"]) < 1e-5, "before the first update nothing but rounding differs"


def check_loss_and_resume(story: Story) -> None:
    """A process is killed: the others name it and leave; restarted, they are the undisturbed run."""
    codes, outputs = story.killed
    lost = len(codes) - 1
    assert codes == [4] * lost + [-9], outputs
    for output in outputs[:-1]:
        assert f"process {lost} is not responding" in output and "bessemer resume" in output, output
        where = ("last good checkpoint is step", "cannot save checkpoint")  # in a step, or in the middle of a save
        assert any(part in output for part in where), output
    assert (story.status["state"], story.status["exit_code"]) == ("failed", 4)
    assert Checkpoints(story.told / "checkpoints").newest_valid() == (STEPS, [])
    assert story.done[0] == [0] * len(codes), story.done
    assert_same_run(story.told, story.whole)


def check_stop(story: Story) -> None:
    codes, outputs = story.stopped
    assert codes == [75] * len(codes), outputs
    steps = {output.partition("stopped after step ")[2].partition(" ")[0] for output in outputs}
    assert len(steps) == 1 and steps.pop().isdigit(), outputs


def check_voices(story: Story) -> None:
    outputs = story.done[1]
    assert "first step after" in outputs[0] and "report" in outputs[0]
    assert all("step" not in output for output in outputs[1:]), outputs
    rows = [json.loads(line) for line in (story.told / "metrics.jsonl").read_text().splitlines()]
    shares = [row["time/goodput"] for row in rows if "time/goodput" in row]
    assert len(shares) == STEPS and all(0 < share < 1 for share in shares)
    assert "steps that count, over 3 starts" in (story.told / "report.md").read_text()
