"""Tests for a GPU never pass without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import TIMEOUT


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_without_a_gpu_its_tests_do_not_run_whatever_the_shell_says() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/training"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "-m gpu needs an NVIDIA GPU" in done.stderr
