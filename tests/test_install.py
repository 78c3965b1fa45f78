"""A small, quiet package: what it needs, and what importing it does not do."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.lowest import lower_bounds

import bessemer

ROOT = Path(__file__).parent.parent
SOURCES = sorted(Path(bessemer.__file__).parent.rglob("*.py"))
CORE = {
    "jax",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tokenizers",
    "numpy",
    "pyarrow",
    "omegaconf",
    "click",
    "rich",
    "jinja2",
    "PyYAML",
    "ml_dtypes",
    "matplotlib",
}
MOST = 56

GUARD = """
import os, socket, sys, threading

def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")

socket.socket = refuse
environment = dict(os.environ)
"""
CHECK = """
heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "matplotlib", "tokenizers", "pyarrow", "transformers"}
heavy |= {"starlette", "uvicorn", "openai"}
heavy &= set(sys.modules)
assert not heavy, f"imported {sorted(heavy)}"
assert dict(os.environ) == environment, "an environment variable was changed"
assert threading.active_count() == 1, threading.enumerate()
"""


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


COMMAND = """
from bessemer.cli import main

try:
    main(["WORD"])
except SystemExit as end:
    assert end.code == 0
"""


@pytest.mark.parametrize(
    "statements",
    ["import bessemer\ndir(bessemer)", COMMAND.replace("WORD", "--help"), COMMAND.replace("WORD", "recipes")],
    ids=["import", "help", "recipes"],
)
def test_it_starts_cheaply_and_quietly(statements: str) -> None:
    result = fresh(GUARD + statements + CHECK)
    assert result.returncode == 0, result.stderr


def test_every_name_of_the_package_can_be_loaded() -> None:
    for name in bessemer.__all__:
        assert getattr(bessemer, name) is not None


EVERY_NAME = """
import os
os.environ["XLA_FLAGS"] = "--xla_no_such_flag=1"
import flax, jax, optax, orbax.checkpoint
environment = dict(os.environ)  # what others set is not ours
import bessemer
for name in bessemer.__all__:
    getattr(bessemer, name)
assert dict(os.environ) == environment, "an environment variable was changed"
assert not jax.distributed.is_initialized(), "distributed services were started"
"""


def test_loading_every_name_takes_no_devices_and_starts_no_service() -> None:
    """With a compiler flag in the environment for which XLA aborts as soon as anybody asks for devices."""
    result = fresh(EVERY_NAME)
    assert result.returncode == 0, result.stderr


def test_base_dependencies_are_those_of_the_design() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(line).name for line in project["dependencies"]} == CORE
    assert project["requires-python"] == ">=3.11"
    assert project["version"] == bessemer.__version__


def needed(name: str, extras: frozenset[str], found: dict[str, set[str]]) -> None:
    """Add what an installed distribution needs here, and what that needs; `found` is name → extras seen."""
    name = canonicalize_name(name)
    if name in found and extras <= found[name]:
        return
    found.setdefault(name, set()).update(extras)
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            needed(requirement.name, frozenset(requirement.extras), found)


def test_a_base_install_is_small() -> None:
    found: dict[str, set[str]] = {}
    for name in CORE:
        needed(name, frozenset(), found)
    assert len(found) <= MOST, f"{len(found)} distributions: {', '.join(sorted(found))}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_pickle_and_no_evaluated_text(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"pickle", "dill", "marshal"}, where
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in {"pickle", "dill", "marshal"}, where
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}, where
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, where


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_constraints_pin_every_dependency_within_its_bounds(version: str) -> None:
    """What the Makefile installs is what pyproject.toml allows, whatever the extra."""
    lines = (ROOT / "constraints" / f"{version}.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(word for extra in extras.values() for word in extra)]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name not in ("bessemer", "jax") or (name == "jax" and not requirement.extras):
            assert name in pins, f"{name} is not pinned: run `make constraints` with Python {version}"
            assert requirement.specifier.contains(pins[name]), (str(requirement), pins[name])


def test_lower_bounds_can_be_tried_out() -> None:
    """Every direct dependency has one; `make lowest` installs and uses them."""
    bounds = lower_bounds()
    assert bounds["jax"] == "0.10" and len(bounds) > 12
