"""The generated reference is that of the code, and names every metric that the code may write."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from docs.generate import METRICS, PAGES, ROOT, files

import bessemer
from bessemer.config import dotted, resolve
from bessemer.training.setup.schema import schema_of

SOURCES = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))


def known_metrics() -> list[str]:
    groups = yaml.safe_load(METRICS.read_text(encoding="utf-8"))
    return [name for rows in groups.values() for names in rows for name in names.split(", ")]


def pattern(name: str) -> str:
    return re.escape(name).replace("NAME", ".+")


def test_the_reference_is_up_to_date() -> None:
    """In a process of its own: other tests register parts, which would be listed too."""
    check = [sys.executable, "-m", "docs.generate", "--check"]
    result = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_no_page_of_the_reference_is_left_over() -> None:
    assert {path for path in files() if path.suffix == ".md"} == set(PAGES.glob("*.md"))


@pytest.mark.parametrize("chosen", [{}, {"objective": "dpo", "optimization.name": "muon"}, {"model.family": "llama"}])
def test_every_setting_of_a_run_is_in_the_reference(chosen: dict[str, str]) -> None:
    text = (PAGES / "settings.md").read_text(encoding="utf-8")
    for key in resolve(schema_of, {}, chosen).schema.settings:
        assert f"| `{dotted(key)}` |" in text, key


def test_every_metric_of_the_reference_is_written_somewhere() -> None:
    """By the last part of its name, since objectives and rewards build the rest."""
    for name in known_metrics():
        last = name.removeprefix("val_").rpartition("/")[2]
        assert last == "NAME" or last in SOURCES, name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quickstart", "dpo"])
def test_every_metric_of_a_run_is_in_the_reference(
    recipe: str, cli: Callable[..., subprocess.CompletedProcess[str]], tiny: dict[str, object], tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    row = {"prompt": "red fox", "chosen": "runs", "rejected": "sleeps"}
    pairs.write_text("".join(json.dumps({**row, "prompt": f"red fox {number}"}) + "\n" for number in range(40)))
    settings = tiny | {"training.steps": 2, "logging.watch": "[embed]", "callbacks": "[watchers]"}
    if recipe == "dpo":
        settings |= {"training.dataset": str(pairs), "init": "null", "architecture.block_size": 32}
    words = [f"{key}={value}" for key, value in settings.items()]
    result = cli("train", recipe, *words, "--name", "run", "--runs", str(tmp_path))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    unknown = {
        name for row in rows for name in row if not any(re.fullmatch(pattern(known), name) for known in known_metrics())
    }
    assert len(rows) > 2 and not unknown


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == bessemer.__version__ and citation["license"] == "Apache-2.0"


def test_every_public_name_and_hook_is_described() -> None:
    """In docs/reference/python.md, whose texts are the docstrings."""
    text = (PAGES / "python.md").read_text(encoding="utf-8")
    for name in set(bessemer.__all__) - {"__version__"}:
        assert f"\n### {name}\n" in text and inspect.getdoc(getattr(bessemer, name)), name
    for owner in (bessemer.Callback, bessemer.Run, bessemer.BaseTrainer, bessemer.RestoreableJob):
        for member, value in vars(owner).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(owner, member)), f"{owner.__name__}.{member} has no docstring"
                assert owner is not bessemer.Callback or f"| `{member}" in text, member
