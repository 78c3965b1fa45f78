"""Job files: what they say, that shells and schemas accept them, and that the script really trains and asks again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tests.conftest import words
from tests.launch.jobset_schema import problems
from tests.processes import TIMEOUT
from tests.training.test_training_processes import STOP_AT, metrics

from bessemer.cli.launch import command
from bessemer.errors import InputError
from bessemer.launch.job_files import Batch, Job, Pods, describe_job, jobset, manifest, object_name, script

DEFAULTS: dict[str, Any] = {
    "name": None,
    "runs": "runs",
    "nodes": 1,
    "gpus": 0,
    "time": None,
    "port": None,
    "restarts": 20,
}
LARGE = Job("pretrain", ("model.depth=20",), "big", nodes=4, gpus=8, seconds=86400, port=4321)


def described(recipe: str = "quickstart", *overrides: str, **options: Any) -> Job:
    return describe_job(recipe, overrides, **{**DEFAULTS, **options})


def test_the_script_says_what_was_asked_for() -> None:
    batch = Batch("gpu", "lab", 16, "64G", ("module load cuda",))
    lines = script(LARGE, batch, "big.sbatch").splitlines()
    for line in (
        "--job-name=big",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=16",
        "--mem=64G",
        "--partition=gpu",
        "--account=lab",
        "--time=1-00:00:00",
        "--signal=TERM@300",
        "--requeue",
    ):
        assert f"#SBATCH {line}" in lines
    assert {"module load cuda", "export JAX_COORDINATOR_PORT=4321"} <= set(lines)
    assert any("bessemer train pretrain model.depth=20 training.time_limit=85800 --name big" in line for line in lines)


@pytest.mark.parametrize(
    ("job", "batch"),
    [
        (LARGE, Batch("gpu", "lab", 16, "64G", ("module load cuda", "export TMPDIR=/scratch"))),
        (Job("my recipe.yaml", ("logging.preview_prompts=['it is', \"a $b\"]",), "small", runs="my runs"), Batch()),
    ],
    ids=["large", "odd words"],
)
def test_shells_accept_the_script(job: Job, batch: Batch, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(script(job, batch, str(path)))
    subprocess.run(["bash", "-n", str(path)], check=True)
    beside = Path(sys.executable).with_name("shellcheck")
    checker = str(beside) if beside.exists() else shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed; bash -n was content")
    found = subprocess.run([checker, "--severity=warning", str(path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_recipe_is_checked_before_it_waits_in_a_queue() -> None:
    with pytest.raises(InputError, match=r"model\.dept"):
        described("quickstart", "model.dept=3")
    with pytest.raises(InputError, match=r"topology\.tensor=3.*2 node\(s\) with 8 devices each \(16 in all\)"):
        described("quickstart", "topology.tensor=3", nodes=2, gpus=8)
    with pytest.raises(InputError, match="at least 2m"):
        described(time="90s")
    with pytest.raises(InputError, match=r"--port must be .*; got 80"):
        described(port=80)
    assert described("quickstart", "topology.fsdp=8", nodes=2, gpus=8).name == "quickstart"
    assert "training.time_limit=7h" in described("quickstart", "training.time_limit=7h", time="8h").train()


def test_the_manifest_is_a_jobset(tmp_path: Path) -> None:
    pods = Pods("registry/bessemer:1", namespace="lab", cpus="16", memory="64Gi", selectors=("zone=a",))
    text = manifest(LARGE, pods, "big.yaml")
    found = yaml.safe_load(text)
    assert found == jobset(LARGE, pods) and problems(found) == []
    (job,) = (entry["template"]["spec"] for entry in found["spec"]["replicatedJobs"])
    (container,) = job["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert env["BESSEMER_COORDINATOR"] == "big-workers-0-0.big:4321" and env["BESSEMER_PROCESSES"] == "4"
    assert "job-completion-index" in env["BESSEMER_PROCESS_ID"]["fieldRef"]["fieldPath"]
    assert job["parallelism"] == job["completions"] == 4 and job["backoffLimit"] == 0
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2, 3], "75, 4 and 134 start again"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    subprocess.run(["bash", "-n"], input=container["command"][2], text=True, check=True)
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert problems(found) == [".spec.replicatedJobs[0].template.spec: unknown backofLimit"]


def test_the_job_in_it_is_valid_by_the_public_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    template = jobset(LARGE, Pods("registry/bessemer:1"))["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "big"}, **template}
    validate.validate(job, validate.latest_version(), strict=True)


def test_names_that_kubernetes_allows() -> None:
    assert [object_name(name) for name in ("My.Run_1", "7b", "a" * 80)] == ["my-run-1", "run-7b", "a" * 40]


def test_the_command_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = CliRunner().invoke
    done = call(command, ["slurm", "quickstart", "training.steps=5", "--nodes", "2", "--time", "1h"])
    assert done.exit_code == 0 and "sbatch quickstart.sbatch" in done.stdout, done.output
    assert "training.steps=5" in (tmp_path / "quickstart.sbatch").read_text()
    done = call(command, ["k8s", "quickstart", "--image", "i", "--nodes", "2", "-o", "-"])
    assert done.exit_code == 0 and problems(yaml.safe_load(done.stdout)) == [], done.output
    assert isinstance(call(command, ["k8s", "mine.yaml", "--image", "i"]).exception, InputError)
    assert call(command, ["k8s", "/bessemer/mine.yaml", "--image", "i", "-o", "-"]).exit_code == 0


def test_data_that_is_not_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an error: the nodes may have what this machine does not."""
    monkeypatch.chdir(tmp_path)
    call = CliRunner().invoke
    missing = ["training.dataset=/data/web", "data.tokenizer=/data/tok", "init=runs/base"]
    done = call(command, ["slurm", "pretrain", *missing, "-o", "-"])
    assert done.exit_code == 0, done.output
    for word in missing:
        assert f"warning: {word} was not found here" in done.stderr
    (tmp_path / "my.txt").write_text("some text")
    done = call(command, ["slurm", "quickstart", "training.dataset=my.txt", "-o", "-"])
    assert done.exit_code == 0 and "warning" not in done.stderr
    there = {"python-stdlib", "/bessemer/web", "s3://b/web"}
    for dataset in ("my.txt", "./my.txt", "/data/web", *there):
        done = call(command, ["k8s", "pretrain", f"training.dataset={dataset}", "--image", "i", "-o", "-"])
        assert done.exit_code == 0 and ("the pods do not have it" in done.stderr) == (dataset not in there), dataset


STAND_IN = """\
#!/bin/bash
echo "$@" >> {log}
{body}
"""


def started(program: str, env: dict[str, str], tmp_path: Path, bodies: dict[str, str]) -> int:
    """The exit code of a job's shell, with stand-ins for the programs it calls."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(STAND_IN.format(log=tmp_path / f"{name}.log", body=body))
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, env={**os.environ, **env, "PATH": path}, timeout=TIMEOUT
    ).returncode


def test_slurm_counts_failures_and_not_stops(tmp_path: Path) -> None:
    """Any number of stops with a checkpoint, then --restarts failures and one more, which is the end."""
    program = script(described(restarts=2, name="r"), Batch(), "f")
    log = tmp_path / "scontrol.log"

    def start(number: int, code: int, job: str = "7") -> bool:
        env = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n", "SLURM_RESTART_COUNT": str(number)}
        log.unlink(missing_ok=True)
        assert started(program, env, tmp_path, {"srun": f"exit {code}", "scontrol": ""}) == code
        return "requeue" in log.read_text()

    assert all(start(number, 75) for number in range(5))
    assert [start(5, 4), start(6, 75), start(7, 137), start(8, 75), start(9, 4)] == [True, True, True, True, False]
    assert start(0, 4, job="8"), "submitted again by hand, it counts anew"
    assert not start(1, 2, job="8") and not start(2, 0, job="8")


def test_kubernetes_counts_failures_and_not_stops(tmp_path: Path) -> None:
    found = jobset(described(restarts=1, name="r"), Pods("i"))
    assert problems(found) == [] and found["spec"]["failurePolicy"]["maxRestarts"] == 2**31 - 1
    (container,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    program = container["command"][2]
    (attempt,) = (entry["valueFrom"] for entry in container["env"] if entry["name"] == "RESTART_ATTEMPT")
    assert "restart-attempt" in attempt["fieldRef"]["fieldPath"]

    def start(number: int, code: int, body: str = "exit ") -> int:
        return started(program, {"RESTART_ATTEMPT": str(number)}, tmp_path, {"bessemer": f"{body}{code}"})

    assert [start(number, 75) for number in range(3)] == [75] * 3
    assert [start(3, 4), start(4, 75), start(5, 4)] == [4, 75, 4]
    assert start(5, 4) == 4, "another pod of the same start is the same failure"
    assert start(6, 75) == 1, "two failures, one more than allowed: the pod failure policy ends the job"
    assert start(0, 75) == 75, "applied anew, it counts anew"
    # the pod's SIGTERM reaches the program, whose exit code is the pod's
    assert start(1, 75, "trap 'exit 75' TERM; kill -TERM $PPID; sleep 0.5; exit ") == 75


SRUN = """\
#!{python}
# What SLURM's srun does for a step, on one machine: as many tasks as SLURM_NTASKS, and the highest exit code.
import os, subprocess, sys
assert sys.argv[1].startswith("--")
step = {{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}}
tasks = [
    subprocess.Popen(sys.argv[2:], env={{**os.environ, **step, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}})
    for n in range(int(os.environ["SLURM_NTASKS"]))
]
sys.exit(max(task.wait() if task.returncode is None else task.returncode for task in tasks))
"""
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; else echo "$@" >> {log}; fi\n'
PROGRAM = '#!/bin/bash\nexec {python} -m bessemer "$@"\n'


@pytest.mark.slow
def test_the_script_trains_two_processes_and_asks_to_be_started_again(
    tiny: dict[str, object], home: Path, tmp_path: Path
) -> None:
    """The real script with stand-ins for srun and scontrol: the first start is stopped (75), the second one goes on."""
    log, programs = tmp_path / "scontrol.log", tmp_path / "bin"
    programs.mkdir()
    texts = {"srun": SRUN, "scontrol": SCONTROL, "bessemer": PROGRAM}
    for name, text in texts.items():
        (programs / name).write_text(text.format(python=sys.executable, log=log))
        (programs / name).chmod(0o755)
    (tmp_path / "stop_at.py").write_text(STOP_AT)
    settings = {**tiny, "optimization.name": "adamw", "training.validation": False, "training.steps": 8}
    settings |= {"plugins": f"[{tmp_path / 'stop_at.py'}]", "callbacks": "[stop_at]", "training.stop_at": 2}
    job = described("quickstart", *words(settings), name="job", runs=str(tmp_path / "runs"), nodes=2, time="1h")
    (tmp_path / "job.sbatch").write_text(script(job, Batch(), "job.sbatch"))
    slurm = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "BESSEMER_HOME": str(home),
        "JAX_NUM_CPU_DEVICES": "1",
        "SLURM_JOB_ID": str(1000 + os.getpid() % 3000),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    ends = []
    for start in ("0", "1"):
        env = {**os.environ, **slurm, "SLURM_RESTART_COUNT": start}
        done = subprocess.run(
            ["bash", "job.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT
        )
        ends.append(done.returncode)
        assert done.returncode in (75, 0), done.stdout + done.stderr
        asked = log.read_text().splitlines() if log.exists() else []
        assert asked == [f"requeue {slurm['SLURM_JOB_ID']}"], "asked for once, by the first start"
    assert ends == [75, 0]
    run = tmp_path / "runs" / "job"
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    meta = json.loads((run / "checkpoints" / "step_00000008" / "meta.json").read_text())
    assert meta["topology"]["processes"] == 2
