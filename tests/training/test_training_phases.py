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
from bessemer.errors import InputError, Stopped
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
        (["phases.sft.training.dataset=???"], r"open: give phases\.sft\.training\.dataset="),
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


def word_problems(folder: Path) -> list[str]:
    """Write a text and word problems as GSM8K has them; return the words that shrink speedrun-gpu to them."""
    rows = [
        {
            "question": f"Ann has {a} apples and buys {b} more. How many has she?",
            "answer": f"She has {a}+{b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}",
        }
        for a in range(2, 8)
        for b in range(2, 8)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "problems.jsonl").write_text("".join(lines[:30]))
    (folder / "held.jsonl").write_text("".join(lines[30:]))
    (folder / "text.txt").write_text("\n\n".join(f"{row['question']} {row['answer']}" for row in rows))
    small = "training.validation_steps=4 data.val_fraction=0.2 architecture.block_size=128"
    quick = "logging.preview_interval=0 logging.plots=false training.per_device_batch_size=4"
    own = {
        "pretrain": "model.depth=1 model.width=32 model.head_dim=16 training.tokens=3072 training.batch_size=8 "
        f"data.tokenizer=train:300 training.dataset={folder / 'text.txt'}",
        "sft": f"training.batch_size=4 training.steps=3 training.dataset={folder / 'problems.jsonl'}",
        "grpo": "training.batch_size=8 training.steps=3 grpo.max_completion_length=8 "
        f"training.dataset={folder / 'problems.jsonl'}",
    }
    phases = [f"phases.{name}.{word}" for name, words in own.items() for word in f"{small} {quick} {words}".split()]
    return [*phases, f"eval.evaluations=[gsm8k:{folder / 'held.jsonl'}]", "eval.limit=4", "logging.progress=none"]


def test_the_data_of_word_problems_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        launch.build_trainer("speedrun-gpu", [], name="job", root=tmp_path)
    assert all(f"phases.{name}.training.dataset=…" in str(refused.value) for name in ("pretrain", "sft", "grpo"))
    assert not (tmp_path / "job").exists()


@pytest.mark.long
@pytest.mark.usefixtures("on_one_device")
def test_word_problems_stopped_between_phases_end_as_the_whole_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """speedrun-gpu, shrunk: text → worked problems → GRPO on the same problems, judged on others after every phase."""
    words = word_problems(tmp_path)
    whole = launch.build_trainer("speedrun-gpu", words, name="whole", root=tmp_path)
    whole.run()
    run_phase = Phases.run_phase
    for stop in ("sft", "grpo"):

        def until(self: Phases, name: str, before: RunDirectory | None, which: str, last: str = stop) -> None:
            if name == last:
                raise Stopped(f"Stopped before {name}.")
            run_phase(self, name, before, which)

        monkeypatch.setattr(Phases, "run_phase", until)
        job = (
            launch.build_trainer("speedrun-gpu", words, name="job", root=tmp_path)
            if stop == "sft"
            else launch.reopen(tmp_path / "job")
        )
        with pytest.raises(Stopped, match="Continue the whole job with: bessemer resume"):
            job.run()
        assert job.run_directory.read_status()["state"] == "stopped"
        assert not (tmp_path / "job/phases" / stop).exists()
    monkeypatch.setattr(Phases, "run_phase", run_phase)
    launch.reopen(tmp_path / "job").run()

    for name in ("pretrain", "sft", "grpo"):
        one, two = (tmp_path / job / "phases" / name for job in ("whole", "job"))
        assert (one / "model/model.safetensors").read_bytes() == (two / "model/model.safetensors").read_bytes()
        judged = [json.loads((tmp_path / job / "eval" / f"{name}.json").read_text()) for job in ("whole", "job")]
        assert judged[0][0]["task"] == judged[1][0]["task"] == "gsm8k" and judged[0][0]["examples"] == 4
        assert judged[0][0]["value"] == judged[1][0]["value"]
    rewards = [json.loads(line) for line in (tmp_path / "job/phases/grpo/metrics.jsonl").read_text().splitlines()]
    assert any("reward/gsm8k" in row or "reward" in row for row in rewards)
    assert (tmp_path / "job/model/model.safetensors").is_file()
