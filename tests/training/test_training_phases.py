"""A job of phases: what is wrong is found before the first begins, and a job killed anywhere goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.processes import TIMEOUT
from tests.tiny_run import make_run

from bessemer.doctor import examine
from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.job.trust import named_code
from bessemer.report import write_report
from bessemer.training import launch
from bessemer.training.phases import Phases
from bessemer.training.setup.initial_weights import find_start

TWO = {"job": "phases", "phases": {"pretrain": {"recipe": "toy"}, "sft": {"recipe": "sft"}}}


def build(tmp_path: Path, *words: str) -> Phases:
    return launch.build_trainer(TWO, list(words), name="job", root=tmp_path)  # type: ignore[return-value]


def test_phases_are_settings_and_can_be_left_out(tmp_path: Path) -> None:
    job = build(tmp_path, "phases.sft.training.steps=3", "phases.pretrain=null", "seed=5", "init=runs/mine")
    assert list(job.phases) == ["sft"]
    overrides = job.overrides(job.phases["sft"], None)
    assert overrides["training"] == {"steps": 3} and overrides["seed"] == 5 and overrides["init"] == "runs/mine"
    assert "init" in job.overrides(job.phases["sft"], RunDirectory(tmp_path / "a"))
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["phases.sft.training.stepz=3"], "phase sft: unknown setting 'training.stepz'"),
        (["phases.last.recipe=gppo"], "phase last: unknown recipe 'gppo'"),
        (["phases.last.training.steps=3"], "phases.last needs a recipe"),
        (["phases.sft=null", "phases.pretrain=null"], "has no phases"),
        (["eval.evaluations=[exct:toy-sort]"], "unknown evaluation"),
        (["training.steps=3"], "unknown setting 'training.steps'"),
    ],
)
def test_a_mistake_in_the_last_phase_is_found_before_the_first(tmp_path: Path, words: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        build(tmp_path, *words)
    assert not (tmp_path / "job").exists()


def test_code_named_by_a_phase_is_code_named_by_the_job() -> None:
    """A job from elsewhere must not import what it hides in a phase, or in a recipe file of its own."""
    phases = {"a": {"recipe": "evil.yaml"}, "b": {"recipe": "toy", "plugins": ["x.py"], "training.dataset": "m:f"}}
    assert {"evil.yaml", "x.py", "m:f"} <= set(named_code({"phases": phases}))
    assert not named_code({"phases": {"a": {"recipe": "toy", "init": "runs/mine"}}})


def test_the_report_and_what_starts_from_the_job(tmp_path: Path) -> None:
    job = RunDirectory(tmp_path / "job").create()
    job.config.write_text("job: phases\nphases: {one: {recipe: toy}, two: {recipe: sft}, three: null}\n")
    job.write_status(state="done", exit_code=0)
    for name in ("two", "one"):
        made = make_run(tmp_path, name)
        made.write_status(state="done", step=20)
        (job.path / "phases").mkdir(exist_ok=True)
        made.path.rename(job.path / "phases" / name)
        result = {"task": "exact:toy-sort", "metric": "exact match", "value": 0.25 if name == "one" else 0.75}
        (job.eval / f"{name}.json").write_text(json.dumps([result]))
    text = write_report(job).read_text()
    assert text.index("| one ") < text.index("| two ") and "phases/two/report.md" in text
    assert "| exact:toy-sort | exact match | 0.2500 | 0.7500 |" in text
    start, _ = find_start(str(job.path), tmp_path)
    assert start == job.path / "phases/two/checkpoints/step_00000020"


SIZES = "model.width=32 model.head_dim=16 architecture.block_size=32 training.batch_size=8 training.steps=8"
QUICK = "logging.checkpoint_interval=2 logging.validation_interval=-1 training.validation_steps=8"
SMALL = [
    *(f"phases.pretrain.{word}" for word in f"{SIZES} {QUICK}".split()),
    *(f"phases.sft.{word}" for word in f"{QUICK} training.batch_size=8 training.steps=8".split()),
    "phases.sft.architecture.block_size=32",
    "phases.sft.eval.evaluations=[]",
    "phases.grpo=null",
    "eval.evaluations=[bpb]",
    "eval.limit=8",
    "logging.progress=none",
]


def start(runs: Path, home: Path, *words: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "bessemer", *words, "--runs", str(runs)]
    return subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_killed_in_every_phase_it_goes_on(tmp_path: Path, home: Path) -> None:
    """kill -9 while pretraining, SIGTERM while fine-tuning, kill -9 while the result is judged; then to the end."""
    job = tmp_path / "job"
    moments = [
        ("phases/pretrain/checkpoints/step_00000002", signal.SIGKILL),
        ("phases/sft/checkpoints/step_00000002", signal.SIGTERM),
        ("eval/pretrain.json", signal.SIGKILL),
    ]
    command = ["train", "demo", *SMALL, "--name", "job"]
    for place, number in moments:
        process = start(tmp_path, home, *command)
        while not (job / place).exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode in (-number, 75), errors
        if process.returncode == 75:
            assert f"bessemer resume {job}" in errors
            assert json.loads((job / "status.json").read_text())["state"] == "stopped"
        command = ["resume", str(job)]
    process = start(tmp_path, home, *command)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors

    for phase in ("pretrain", "sft"):
        rows = [json.loads(line) for line in (job / "phases" / phase / "metrics.jsonl").read_text().splitlines()]
        seen = [row["step"] for row in rows if "loss" in row]
        assert seen == sorted(set(seen)) and seen[-1] == 8
    assert {path.stem for path in (job / "eval").glob("*.json")} == {"pretrain", "sft"}
    assert (job / "model/model.safetensors").is_file() and "State: done." in (job / "report.md").read_text()
    assert examine(RunDirectory(job)).state == "done"
