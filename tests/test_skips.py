"""Skips are accounted for: every reason is on a list, and one that is not fails the session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import TIMEOUT
from tests.skips import TESTS, files_for_scale, why_allowed

CASES = """
import pytest

def test_package(): pytest.importorskip("torch_of_nobody", reason="could not import 'torch'")
def test_machine(): pytest.skip("no NVIDIA GPU here")
def test_other(): pytest.skip("not today")
@pytest.mark.xfail
def test_known(): assert False
"""
MODULE = "import pytest\npytest.skip('a whole module', allow_module_level=True)\n"
CONFTEST = """
from tests.skips import SkipLedger

def pytest_addoption(parser): parser.addoption("--nothing-missing", action="store_true")
def pytest_configure(config): config.pluginmanager.register(SkipLedger(config.getoption("--nothing-missing")))
"""


def session(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS.parent}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_an_unexpected_skip_fails_the_session_and_is_named(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_module.py").write_text(MODULE)
    expected = session(tmp_path, *workers, "-k", "package or machine or known", "test_cases.py")
    assert expected.returncode == 0 and "   1  no NVIDIA GPU here" in expected.stdout, expected.stdout
    strict = session(tmp_path, *workers, "--nothing-missing", "-k", "package or machine", "test_cases.py")
    assert strict.returncode == 1 and "test_cases.py::test_package: could not import 'torch'" in strict.stdout
    other = session(tmp_path, *workers)
    assert other.returncode == 1
    assert "test_cases.py::test_other: not today" in other.stdout and "test_module.py: a whole module" in other.stdout


def test_packages_are_allowed_to_be_missing_until_nothing_may_be() -> None:
    reason = "could not import 'trl': No module named 'trl'"
    assert why_allowed(reason, nothing_missing=False) and not why_allowed(reason, nothing_missing=True)
    assert not why_allowed("mkdocs is not installed", nothing_missing=False), "it is in the extra `test`"


def test_the_files_of_make_scale_are_found() -> None:
    files = files_for_scale()
    assert {"tests/interop/test_transformers.py", "tests/training/test_mirror.py"} <= set(files)
    assert "tests/test_docs.py" not in files, "mkdocs is in the extra `test`"
    services = files_for_scale(services_only=True)
    assert set(services) < set(files) and "tests/training/test_mirror.py" in services
    assert "tests/interop/test_transformers.py" not in services
