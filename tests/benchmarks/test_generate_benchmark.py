"""benchmarks/generate.py: what its figures mean, and that the script runs as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import TIMEOUT

import generate

WORDS = ["--depth", "1", "--width", "32", "--head_dim", "16", "--vocab", "64", "--batch", "2"]
WORDS += ["--prompt", "8", "--new", "16", "--steps", "8", "--repeats", "1"]


def test_the_limit_is_what_a_step_must_read() -> None:
    args = generate.arguments([*WORDS, "--alone", "ours"])
    passes = [generate.Pass(0.5, prefill=0.25, decode=0.8, steps=8, prefill_processor=0.3, processor=1.6)] * 3
    facts = {"weight_bytes": 1000, "token_bytes": 5, "windows": [None, 8], "bandwidth": 1e6}
    row = generate.line(args, passes, facts)
    assert row["decode_tokens_per_s"] == 20 and row["prefill_tokens_per_s"] == 64
    assert (row["first_token_ms"], row["step_ms"]) == (500, 100)
    assert (row["prefill_processor_ms"], row["processor_ms"]) == (300, 200)
    # steps 9 to 16 after 8 tokens of the prompt: 20 tokens a row on average, of which the second layer sees 8
    assert row["limit_ms"] == pytest.approx((1000 + 2 * (20 + 8) * 5) / 1e6 * 1e3)
    assert row["share_of_limit"] == pytest.approx(0.0128)


def test_ratios_are_of_what_both_measured() -> None:
    mine = {"batch": 2, **dict.fromkeys(generate.RATIOS, 3.0)}
    peer = {"batch": 2, **dict.fromkeys(generate.RATIOS, 2.0)}
    assert generate.ratios(mine, {"batch": 2, "skipped": "not installed"}) is None
    assert generate.ratios(mine, peer) == {"batch": 2, "ratios": dict.fromkeys(generate.RATIOS, 1.5)}


@pytest.mark.slow
def test_a_case_runs_and_the_peer_runs_or_says_why_not() -> None:
    source = Path(generate.__file__).parents[1] / "src"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, generate.__file__, *WORDS], env=variables, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    mine, peer, *rest = [json.loads(row) for row in result.stdout.splitlines()]
    assert mine["system"] == "ours" and mine["decode_tokens_per_s"] > 0 and mine["programs"] == 2
    if "skipped" in peer:
        assert "not installed" in peer["skipped"] and not rest
    else:
        assert peer["decode_tokens_per_s"] > 0 and rest[0]["ratios"]
