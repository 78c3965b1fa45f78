"""benchmarks/peers.py: alike shapes, honest ratios, and a clear line where the peer is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import peers
import pytest
from beside import feed_forward_width
from tests.processes import TIMEOUT

from bessemer.models.gpt import GPT


@pytest.mark.parametrize("width", [128, 512, 768, 1280])
def test_the_peer_is_as_large_as_ours(width: int) -> None:
    counts = GPT(depth=2, width=width, vocab_size=64).count_parameters()
    theirs = 2 * (4 * width**2 + 3 * width * feed_forward_width(width))
    assert theirs == pytest.approx(counts["matrix"], rel=0.02)


def test_ratios_are_of_what_both_measured() -> None:
    mine = {"tokens_per_s": 30, "tflops": 3.0, "step_ms_best": 1.0, "parameters": 12}
    mine |= {"flops_per_token": 5, "processor_ms": 2.0}
    lines = [{"system": "ours-adamw", **mine, "peak_gib": 1.0}]
    peer = {"tokens_per_s": 10, "tflops": 2.0, "step_ms_best": 4.0, "parameters": 12}
    peer |= {"flops_per_token": 10, "processor_ms": 1.0}
    assert peers.ratios([*lines, {"system": "transformers", "skipped": "not installed"}]) is None
    found = peers.ratios([*lines, {"system": "transformers", **peer, "peak_gib": 2.0}])
    assert found is not None
    expected = {"tokens_per_s": 3, "tflops": 1.5, "step_ms_best": 0.25, "parameters": 1, "peak_gib": 0.5}
    assert found["ours-adamw / transformers"] == {**expected, "flops_per_token": 0.5, "processor_ms": 2}


@pytest.mark.slow
def test_each_system_runs_or_says_why_not() -> None:
    """The script as a user runs it, at a toy size; the peer's line is a measurement only where torch is."""
    words = ["--depth", "1", "--width", "32", "--head_dim", "16", "--vocab", "64", "--batch", "2"]
    words += ["--sequence", "16", "--repeats", "1", "--systems", "transformers,ours-adamw"]
    source = Path(peers.__file__).parents[1] / "src"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, peers.__file__, *words], env=variables, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    peer, mine, *rest = [json.loads(row) for row in result.stdout.splitlines()]
    assert mine["system"] == "ours-adamw" and mine["tokens_per_s"] > 0 and mine["peak_gib"] > 0
    if "skipped" in peer:
        assert "not installed" in peer["skipped"] and not rest
    else:
        assert peer["tokens_per_s"] > 0 and rest[0]["ratios"]
