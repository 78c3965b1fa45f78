"""The files of examples/ run as they say, made short: commands of their docstrings, scripts, and the notebook."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest
from tests.documented import ROOT, make_files, run, said, shorten
from tests.interop.tiny_hf import chatty_folder

EXAMPLES = ROOT / "examples"
PARTS = {
    "custom_objective": pytest.mark.slow,
    "custom_model": pytest.mark.slow,
    "custom_dataset": pytest.mark.slow,
    "custom_reward": pytest.mark.long,  # three runs, two of which sample
}
SCRIPTS = ("ablation", "distill_hf", "two_processes")
TINY = [
    "training.steps=4",
    "model.width=32",
    "architecture.block_size=32",
    "training.batch_size=8",
    "training.per_device_batch_size=-1",
    "training.validation_steps=8",
    "logging.progress=none",
    "logging.report_interval=1",
    "logging.preview_interval=0",
    "logging.plots=false",
]
OF_A_GPT = ["training.dataset=my.txt", "data.tokenizer=train:300", "model.depth=1", "model.head_dim=16"]


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""


def shown(name: str) -> list[str]:
    """The commands of an example's docstring."""
    return [" ".join(line.split()) for line in re.findall(r"^ +((?:bessemer|python) .*)$", docstring(name), re.M)]


def metrics(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the files that the commands name, and examples/ beside them."""
    make_files(tmp_path)
    os.symlink(EXAMPLES, tmp_path / "examples")
    return tmp_path


@pytest.mark.parametrize("name", (*PARTS, *SCRIPTS))
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    assert 30 <= len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 80
    assert shown(name) and all(f"examples/{name}.py" in line or " --name base" in line for line in shown(name))


def test_every_example_is_run() -> None:
    """prove_real_model.py downloads a model: docs/finetune.md shows it."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PARTS, *SCRIPTS, "prove_real_model"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in PARTS.items()])
def test_the_commands_of_a_part_run(name: str, folder: Path, home: Path) -> None:
    for line in shown(name):
        result = run(shorten(line), folder, home)
        assert result.returncode == 0, said(result)
    if name == "custom_objective":
        assert {"nll", "dropped"} <= set(metrics(folder, "truncated")[-2])
    elif name == "custom_reward":
        assert any(name.startswith("reward/") and name.endswith(":near") for name in metrics(folder, "near")[-2])
        assert metrics(folder, "hints")[-2]["env/failures"] == 0


@pytest.mark.long
def test_the_ablation_study_compares_and_continues(folder: Path, home: Path) -> None:
    words = "--seeds 1 --without architecture.smear -- " + " ".join([*TINY, *OF_A_GPT])
    for _ in range(2):  # the second time all runs are finished
        result = run(f"python examples/ablation.py {words}", folder, home)
        assert result.returncode == 0, said(result)
    made = {path.name for path in (folder / "runs" / "ablation").iterdir() if path.is_dir()}
    assert made == {"base-0", "no-smear-0"}
    assert "no-smear" in result.stdout


@pytest.mark.slow
def test_the_distilled_student_is_a_smaller_llama_with_the_teachers_tokenizer(folder: Path, home: Path) -> None:
    teacher = chatty_folder(folder / "teacher")
    words = " ".join(word for word in TINY if "width" not in word)
    result = run(f"python examples/distill_hf.py teacher my.txt -- {words}", folder, home)
    assert result.returncode == 0, said(result)
    exported = json.loads((folder / "student-hf" / "config.json").read_text())
    theirs = json.loads((teacher / "config.json").read_text())
    assert exported["num_hidden_layers"] < theirs["num_hidden_layers"]
    assert exported["vocab_size"] == theirs["vocab_size"]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(folder: Path, home: Path) -> None:
    result = run(f"python examples/two_processes.py --steps 4 -- {' '.join([*TINY[1:], *OF_A_GPT])}", folder, home)
    assert result.returncode == 0, said(result)
    assert float(result.stdout.rpartition(":")[2]) < 1e-4


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert notebook["nbformat"] == 4 and len(cells) >= 5
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    small = dict(word.split("=") for word in [*TINY, *OF_A_GPT])
    typed = {
        key: {"false": False}.get(value, int(value) if value.lstrip("-").isdigit() else value)
        for key, value in small.items()
    }
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for cell in cells:
        source = re.sub(r"^settings = .*$", f"settings = {typed!r}", cell, flags=re.M)
        exec(compile(source, "quickstart.ipynb", "exec"), names)
    status = json.loads((folder / "runs" / "notebook" / "status.json").read_text())
    assert status["state"] == "done" and status["step"] == 24
