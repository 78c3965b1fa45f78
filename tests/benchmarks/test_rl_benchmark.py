"""benchmarks/rl.py: what its figures mean, and that the script runs as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rl
from tests.processes import TIMEOUT

WORDS = ["--sizes", "tiny", "--completions", "8", "--group", "4", "--prompt", "48", "--new", "16", "--steps", "4"]


def row(step: int, **changed: float) -> dict[str, float]:
    parts = {"time/rollout_s": 2.0, "time/reward_s": 0.5, "time/score_s": 0.5, "time/train_s": 1.0}
    known = {"completion_len": 10.0, "logprob_gap": 0.01, "logprob_gap_max": 0.1, "seen": 100.0 + step}
    return {"step": step, "time/step_ms": 4100.0, **parts, **known, **changed}


def test_rates_are_of_real_tokens_after_the_second_step() -> None:
    args = rl.arguments(WORDS)
    rows = [row(1, **{"time/rollout_s": 50.0}), row(2, **{"time/rollout_s": 9.0}), row(3), row(4)]
    found = rl.summary(args, rows, made=[90.0, 101.5, 102.5], started=40.0, prompt=5.0)
    assert found["rollout_tokens_per_s"] == 8 * 10 / 2 and found["trained_tokens_per_s"] == 8 * 15 / 1.5
    assert found["rollout_s"] == [50, 9, 2, 2] and found["first_step_s"] == 61
    assert found["programs"] == 3 and found["programs_after_step_2"] == 1
    assert found["accounted"] == pytest.approx(4 / 4.1, abs=1e-4) and found["shares"]["train"] == round(1 / 4.1, 4)


@pytest.mark.slow
def test_a_case_runs_and_the_peer_runs_or_says_why_not(tmp_path: Path) -> None:
    pytest.importorskip("transformers")  # the model is written by it
    pytest.importorskip("torch")
    source = Path(rl.__file__).parents[1] / "src"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, rl.__file__, *WORDS, "--folder", str(tmp_path)]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["bessemer"]["rollout_tokens_per_s"] > 0 and found["bessemer"]["programs_after_step_2"] == 0
    assert found["engine"]["tokens_per_s"] > 0 and found["transformers"]["tokens_per_s"] > 0
