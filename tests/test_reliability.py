"""docs/reliability.md cannot rot: every test it names exists, is as fast as it says, and every pitfall has one."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import TIMEOUT

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
NAMED = r"`([\w/]+\.py)::(\w+)`(?: \((slow)\))?"
ON_A_GPU = ("training/test_training_gpu.py",)
PITFALLS = {"Resume and checkpoints": 20, "Loss and gradients": 15, "Data": 12, "Settings and errors": 14, "Speed": 7}
"""Sections, and how many rows each has at least."""


def named() -> list[tuple[str, str, bool]]:
    """(file, function, said to be slow) of every test on the page."""
    return [(file, name, bool(slow)) for file, name, slow in re.findall(NAMED, PAGE.read_text("utf-8"))]


@functools.cache
def functions(file: str) -> dict[str, list[str]]:
    """Test function -> the marks on it and on its module."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    shared = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return {
        node.name: [*shared, *(ast.unparse(mark) for mark in node.decorator_list)]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("file", sorted({file for file, _, _ in named()}))
def test_every_test_that_is_named_exists(file: str) -> None:
    assert (TESTS / file).is_file(), f"docs/reliability.md names {file}"
    for name in (name for other, name, _ in named() if other == file):
        assert name in functions(file), f"docs/reliability.md names {file}::{name}"
        assert name.startswith("test_")


def test_every_name_of_a_test_is_one_that_is_checked() -> None:
    """One without its file would be read by people only."""
    assert PAGE.read_text("utf-8").count("::") == len(named())


def test_slow_is_said_of_slow_tests_only() -> None:
    """A test of which some parameters run with the fast ones is not called slow."""
    wrong = [(file, name) for file, name, slow in named() if slow is not ("pytest.mark.slow" in functions(file)[name])]
    assert wrong == [], f"slow, and not said so, or the other way round: {sorted(set(wrong))}"


@pytest.mark.slow
def test_every_test_that_is_named_runs_in_ci() -> None:
    """Collected as `make test` and `make slow` do; of one with parameters, those that CI has room for."""
    files = sorted({str(TESTS / file) for file, _, _ in named()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not long and not gpu", *files]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # -v would print a tree
    result = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    collected = {line.partition("[")[0] for line in result.stdout.splitlines() if "::" in line}
    wanted = {f"tests/{file}::{name}" for file, name, _ in named() if file not in ON_A_GPU}
    assert wanted - collected == set()


@pytest.mark.parametrize("section", PITFALLS)
def test_every_pitfall_has_a_test(section: str) -> None:
    text = PAGE.read_text("utf-8").split(f"\n### {section}\n")[1].split("\n#")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= PITFALLS[section]
    for row in rows:
        pitfall, tests = (cell.strip() for cell in row.strip("|").split(" | "))
        assert re.search(NAMED, tests), pitfall
