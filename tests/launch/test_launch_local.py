"""`bessemer launch local`: devices are split, and real processes are started, watched, restarted and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from tests.conftest import words
from tests.processes import TIMEOUT, finish, start, wait_until
from tests.training.test_training_processes import STEPS, UNHURRIED, assert_same_run, is_saved, reached

from bessemer.cli.launch import command
from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.launch import local
from bessemer.launch.local import (
    Group,
    Machine,
    Starts,
    device_environments,
    free_port,
    group_code,
    local_group,
    peer_environments,
    visible_gpus,
)

VISIBLE = "CUDA_VISIBLE_DEVICES"


# Devices, from environments that this machine does not have


@pytest.mark.parametrize(
    ("visible", "installed", "expected"),
    [
        (None, 3, ["0", "1", "2"]),
        ("2,0", 3, ["2", "0"]),
        (" 1 , 2 ", 3, ["1", "2"]),
        ("GPU-8f2a,MIG-11", 2, ["GPU-8f2a", "MIG-11"]),
        ("0,-1,1", 3, ["0"]),
        ("0,7,1", 3, ["0"]),
        ("", 3, []),
        ("-1", 3, []),
        ("0,1", 0, []),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(visible: str | None, installed: int, expected: list[str]) -> None:
    assert visible_gpus({} if visible is None else {VISIBLE: visible}, installed) == expected


def split(processes: int | None, environ: dict[str, str], machine: Machine, platform: str | None = None) -> list[str]:
    """The GPU of each process; - where it has none."""
    found = device_environments(processes, environ, machine, platform)
    assert all(own["JAX_NUM_CPU_DEVICES"] == "1" for own in found)
    return [own.get(VISIBLE, "-") for own in found]


def test_each_process_gets_one_gpu() -> None:
    eight = Machine(gpus=8)
    assert split(None, {}, eight) == list("01234567")
    assert split(2, {}, eight) == ["0", "1"]
    assert split(None, {VISIBLE: "5,3"}, eight) == ["5", "3"]
    assert split(None, {"JAX_PLATFORMS": "cuda,cpu"}, Machine(gpus=2)) == ["0", "1"]
    assert split(3, {"JAX_PLATFORMS": "cpu"}, eight) == ["-"] * 3
    assert split(3, {}, eight, platform="cpu") == ["-"] * 3
    assert split(2, {}, Machine()) == ["-"] * 2
    assert split(2, {"JAX_PLATFORMS": "cpu"}, Machine(tpu=True)) == ["-"] * 2


@pytest.mark.parametrize(
    ("processes", "environ", "machine", "platform", "message"),
    [
        (None, {}, Machine(), None, r"no NVIDIA GPU is visible here, so .*--processes 2"),
        (None, {VISIBLE: ""}, Machine(gpus=4), None, r"no NVIDIA GPU is visible here \(CUDA_VISIBLE_DEVICES=\)"),
        (9, {}, Machine(gpus=8), None, r"--processes 9: 8 GPU\(s\) are visible.*Pass --processes 8"),
        (3, {VISIBLE: "0,1"}, Machine(gpus=8), None, r"2 GPU\(s\) are visible here \(CUDA_VISIBLE_DEVICES=0,1\)"),
        (2, {VISIBLE: "1,1"}, Machine(gpus=8), None, "names a GPU twice"),
        (0, {}, Machine(gpus=8), None, "--processes must be at least 1; got 0"),
        (2, {}, Machine(), "gpu", r"no NVIDIA GPU is visible here, and gpu was asked for"),
        (2, {}, Machine(tpu=True), None, "one process drives all TPU chips"),
        (2, {}, Machine(gpus=2), "tpu", "one process drives all TPU chips"),
    ],
)
def test_devices_that_are_not_there_are_an_error_with_the_fix(
    processes: int | None, environ: dict[str, str], machine: Machine, platform: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        device_environments(processes, environ, machine, platform)


def test_processes_meet_on_this_machine_alone() -> None:
    found = peer_environments([{VISIBLE: "3"}, {VISIBLE: "5"}], 21000)
    assert [own[VISIBLE] for own in found] == ["3", "5"]
    assert [own["BESSEMER_PROCESS_ID"] for own in found] == ["0", "1"]
    assert {own["BESSEMER_PROCESSES"] for own in found} == {"2"}
    assert {own["BESSEMER_COORDINATOR"] for own in found} == {"127.0.0.1:21000"}
    assert found[0]["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:21000"
    assert peer_environments([{VISIBLE: "3"}], 21000) == [{VISIBLE: "3"}], "one has no peers"
    assert free_port() in local.PORTS


# Exit codes and counts


@pytest.mark.parametrize(
    ("ended", "stopped_by", "can_resume", "expected"),
    [
        ([0, 0], None, True, 0),
        ([75, 75], None, True, 75),
        ([-9, 4], None, True, 137),
        ([4, 4], None, True, 4),
        ([-6, 4], None, True, 134),
        ([4, 3], None, True, 3),
        ([2, 143], None, False, 2),
        ([0, 0], signal.SIGTERM, True, 0),
        ([75, 75], signal.SIGTERM, True, 75),
        ([-15, 143], signal.SIGTERM, True, 75),
        ([-15, 143], signal.SIGTERM, False, 143),
        ([130, 130], signal.SIGINT, False, 130),
        ([-9, 75], signal.SIGTERM, True, 137),
    ],
)
def test_the_exit_code_is_the_groups(ended: list[int], stopped_by: int | None, can_resume: bool, expected: int) -> None:
    assert group_code(ended, stopped_by, can_resume) == expected


def test_failed_starts_are_counted_in_the_run_and_a_new_launch_counts_anew(tmp_path: Path) -> None:
    starts = Starts(RunDirectory(tmp_path / "run"))
    for number in range(3):
        starts.begin(number)
    starts.ended_in_order(1)
    assert starts.failures(besides=2) == 1 and starts.failures(besides=3) == 2
    (tmp_path / "run" / "starts" / "slurm-7.0").touch()
    again = Starts(RunDirectory(tmp_path / "run"))
    again.begin(0)
    assert again.failures(besides=0) == 0, "neither those of before nor another launcher's"


# The command


def test_what_cannot_be_launched_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "this_machine", Machine)
    (tmp_path / "runs" / "taken" / "checkpoints").mkdir(parents=True)
    for arguments, message in {
        (): "no NVIDIA GPU",
        ("--processes", "2", "--name", "taken"): r"already exists.*launch local --resume",
        ("--processes", "2", "--name", "a/b"): "cannot be a run name",
        ("--processes", "2", "topology.process_id=1"): r"topology\.process_id cannot be set here",
        ("--processes", "2", "--restarts", "-1"): "--restarts must be at least 0",
        ("--processes", "2", "--resume", "taken", "sft"): "leave out the recipe 'sft'",
        ("--processes", "2", "--resume", "taken", "--name", "other"): "leave out --name",
        ("--processes", "2", "--resume", "nothing"): "no run 'nothing'",
        ("--processes", "2", "--max-lr", "3"): "is not a Bessemer flag",
    }.items():
        with pytest.raises(InputError, match=message):
            CliRunner().invoke(command, ["local", *arguments], catch_exceptions=False)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]


def test_a_run_that_was_started_by_hand_forgets_where_its_peers_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.yaml").write_text("topology: {coordinator: 'host0:1234', processes: 2, process_id: 0, fsdp: 2}\n")
    monkeypatch.setattr(local, "this_machine", Machine)
    options = {"processes": 2, "name": None, "root": str(tmp_path), "restarts": 3, "say": print}
    group = local_group(None, ["logging.progress=none"], resume="mine", **options)  # type: ignore[arg-type]
    cleared = ["topology.coordinator=null", "topology.processes=null", "topology.process_id=null"]
    assert group.resume == ["resume", str(run), "logging.progress=none", *cleared, "--runs", str(tmp_path)]


# Real processes that end before they train: a plugin decides how


def behaving(tmp_path: Path, code: str) -> list[str]:
    """Settings with a plugin that runs `code` when it is imported; `number` is that of the process."""
    head = 'import os, signal, sys, time\nfrom pathlib import Path\nnumber = int(os.environ["BESSEMER_PROCESS_ID"])\n'
    (tmp_path / "behavior.py").write_text(f"{head}{code}\n")
    return [f"plugins=[{tmp_path / 'behavior.py'}]", "topology.start_timeout=5"]


def launcher(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return start(home, 1, "launch", "local", *arguments)[0]


def descendants(pid: int) -> dict[str, int]:
    """Number of a launched process -> its pid."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                variables = dict(part.partition("=")[::2] for part in (entry / "environ").read_text().split("\0"))
                found[variables.get("BESSEMER_PROCESS_ID", "")] = int(entry.name)
        except OSError:
            continue
    return found


def is_gone(pid: int) -> bool:
    """Ended; one that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_bad_input_ends_with_2_after_one_start_and_leaves_nothing(home: Path, tmp_path: Path) -> None:
    process = launcher(home, "quickstart", "model.dept=3", "--processes", "2", "--runs", str(tmp_path), "--name", "bad")
    codes, (output,) = finish([process])
    assert codes == [2] and output.count("did you mean 'model.depth'") == 1 and "restart" not in output, output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_always_dies_uses_up_the_restarts(home: Path, tmp_path: Path) -> None:
    dies = (
        'if number == 1:\n    print("the GPU fell off the bus", flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)'
    )
    arguments = ["quickstart", *behaving(tmp_path, dies), "--processes", "2", "--restarts", "1"]
    codes, (output,) = finish([launcher(home, *arguments, "--runs", str(tmp_path), "--name", "dies")])
    log = tmp_path / "dies" / "logs" / "process-1.log"
    assert codes == [137], output
    assert (
        output.count(
            f"process 1 was killed by SIGKILL (by hand, or by the kernel's OOM killer). The last lines of {log}:"
        )
        == 2
    )
    assert output.count("  the GPU fell off the bus") == 2, output
    assert output.count("restart 1 of 1: all processes start again") == 1 and "restart 2" not in output, output
    assert "not restarted again after 1 restart. Fix the cause, then start it again with the same command" in output, (
        output
    )
    assert log.read_text().count("=== start") == 2
    assert sorted(path.name for path in (tmp_path / "dies" / "starts").iterdir()) == ["local.0", "local.1"]


@pytest.mark.slow
def test_a_stuck_survivor_is_killed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Process 1 exits with 1 once process 0 is frozen, in which no signal but SIGKILL reaches it."""
    monkeypatch.setattr(local, "NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(local, "TERMINATE_SECONDS", 0.5)
    frozen = tmp_path / "frozen"
    code = f"frozen = Path({str(frozen)!r})\n"
    code += "if number == 0:\n    frozen.touch()\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    code += "while not frozen.exists():\n    time.sleep(0.05)\nos._exit(1)"
    said: list[str] = []
    run = RunDirectory(tmp_path / "stuck")
    train = ["train", "quickstart", *behaving(tmp_path, code), "--name", "stuck", "--runs", str(tmp_path)]
    devices = [{"JAX_NUM_CPU_DEVICES": "1"}] * 2
    assert Group(run, train, ["resume", str(run.path)], devices, 0, said.append).launch() == 1
    stopped = [line.rpartition(" ")[2] for line in said if "process 0 is still there" in line]
    assert stopped == ["SIGTERM", "SIGKILL"], said
    assert any("process 1 exited with code 1 (a bug)" in line for line in said), said
    assert any("not restarted again (--restarts 0)" in line for line in said), said


@pytest.mark.slow
def test_a_run_whose_directory_is_deleted_is_not_started_again(home: Path, tmp_path: Path) -> None:
    code = f"import shutil\nif number == 1:\n    shutil.rmtree({str(tmp_path / 'gone')!r})\nos._exit(4)"
    arguments = ["quickstart", *behaving(tmp_path, code), "--processes", "2"]
    codes, (output,) = finish([launcher(home, *arguments, "--runs", str(tmp_path), "--name", "gone")])
    assert codes == [4] and "was deleted or moved, so there is nothing to restart" in output, output
    assert not (tmp_path / "gone").exists()


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(home: Path, tmp_path: Path) -> None:
    code = f"(Path({str(tmp_path)!r}) / f'here-{{number}}').touch()\nos.kill(os.getpid(), signal.SIGSTOP)"
    arguments = ["quickstart", *behaving(tmp_path, code), "--processes", "2"]
    process = launcher(home, *arguments, "--runs", str(tmp_path), "--name", "frozen")
    wait_until([process], lambda: all((tmp_path / f"here-{number}").exists() for number in range(2)))
    pids = descendants(process.pid)
    assert sorted(pids) == ["0", "1"]
    assert all(os.getpgid(pid) == pid for pid in pids.values()), "Ctrl-C in a terminal reaches the launcher alone"
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    codes, (output,) = finish([process])
    assert codes == [130] and "SIGINT again: all processes are killed" in output, output
    assert not (tmp_path / "frozen").exists(), "the run had not begun"
    assert all(is_gone(pid) for pid in pids.values())


def test_a_child_that_does_not_stop_is_killed_after_its_grace() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); from bessemer.job.process import *; "
    code += "end_with_parent(grace=0.1); print(1, flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"1\n"
    process.stdin.close()
    assert process.wait(TIMEOUT) == -signal.SIGKILL


# Real training


class Launched(NamedTuple):
    root: Path
    home: Path
    count: int
    settings: list[str]

    def launch(self, *arguments: str) -> subprocess.Popen[str]:
        return launcher(self.home, "--processes", str(self.count), "--runs", str(self.root), *arguments)

    def train(self, name: str) -> subprocess.Popen[str]:
        return self.launch("quickstart", *self.settings, "--name", name)

    def hold(self) -> Path:
        """Runs go no further than step 16 while this file is there."""
        (self.root / "asked").unlink(missing_ok=True)
        (self.root / "slow").touch()
        return self.root / "slow"


def by_hand(count: int, tiny: dict[str, object], root: Path, home: Path) -> Launched:
    """The run `hand`, of processes that were started one by one."""
    (root / "unhurried.py").write_text(UNHURRIED)
    settings = {
        **tiny,
        "optimization.name": "adamw",
        "training.steps": STEPS,
        "training.per_device_batch_size": 2,
        "logging.validation_interval": 12,
        "logging.checkpoint_interval": 5,
        "plugins": f"[{root / 'unhurried.py'}]",
        "callbacks": "[unhurried]",
    }
    codes, outputs = finish(
        start(home, count, "train", "quickstart", *words(settings), "--runs", str(root), "--name", "hand")
    )
    assert codes == [0] * count, outputs
    return Launched(root, home, count, words(settings))


@pytest.fixture(scope="module")
def two(tiny: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return by_hand(2, tiny, tmp_path_factory.mktemp("two"), home)


@pytest.mark.slow
def test_launched_processes_train_as_those_started_by_hand(two: Launched) -> None:
    codes, (output,) = finish([two.train("launched")])
    assert codes == [0] and "first step after" in output, output
    assert_same_run(two.root / "launched", two.root / "hand")
    assert list((two.root / "launched" / "starts").iterdir()) == []
    assert "step" not in (two.root / "launched" / "logs" / "process-1.log").read_text()


def check_kill(group: Launched) -> None:
    """The last process is killed with SIGKILL; the launcher restarts all, and the run is the undisturbed one."""
    slow, run = group.hold(), group.root / "killed"
    process = group.train("killed")
    wait_until([process], lambda: reached(run) >= 7 and is_saved(run))
    last = group.count - 1
    os.kill(descendants(process.pid)[str(last)], signal.SIGKILL)
    slow.unlink()
    codes, (output,) = finish([process])
    assert codes == [0], output
    assert f"process {last} was killed by SIGKILL" in output, output
    assert f"restart 1 of 3: all processes resume {run} from its last checkpoint" in output, output
    assert output.count("resume     from the checkpoint of step") == 1, output
    assert_same_run(run, group.root / "hand")
    assert [path.name for path in (run / "starts").iterdir()] == ["local.0"], "one start failed"
    for number in range(1, group.count):
        assert (run / "logs" / f"process-{number}.log").read_text().count("=== start") == 2


@pytest.mark.slow
def test_a_killed_process_restarts_the_group_bit_for_bit(two: Launched) -> None:
    check_kill(two)


@pytest.mark.slow
def test_sigkill_of_the_launcher_leaves_no_process_and_a_checkpoint(two: Launched) -> None:
    slow, run = two.hold(), two.root / "orphaned"
    process = two.train("orphaned")
    wait_until([process], lambda: reached(run) >= 7)
    pids = descendants(process.pid)
    assert sorted(pids) == ["0", "1"]
    process.kill()
    process.wait()
    eventually((two.root / "asked").exists)
    slow.unlink()
    eventually(lambda: all(is_gone(pid) for pid in pids.values()))
    finish([process])
    status = RunDirectory(run).read_status()
    assert (status["state"], status["exit_code"]) == ("stopped", 75), status


@pytest.mark.slow
def test_sigterm_stops_all_with_a_checkpoint_and_the_run_resumes_bit_for_bit(two: Launched) -> None:
    slow, run = two.hold(), two.root / "stopped"
    process = two.train("stopped")
    wait_until([process], lambda: reached(run) >= 7)
    pids = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    wait_until([process], (two.root / "asked").exists)
    slow.unlink()
    codes, (output,) = finish([process])
    assert codes == [75] and f"launch local --resume {run} --processes 2" in output, output
    assert sorted(pids) == ["0", "1"] and all(is_gone(pid) for pid in pids.values())
    assert list((run / "starts").iterdir()) == [], "a stop is not a failure"
    codes, (output,) = finish([two.launch("--resume", "stopped")])
    assert codes == [0], output
    assert_same_run(run, two.root / "hand")


@pytest.mark.long
def test_four_processes_survive_the_loss_of_one(tiny: dict[str, object], home: Path, tmp_path: Path) -> None:
    check_kill(by_hand(4, tiny, tmp_path, home))
