"""benchmarks/generate.py: what its figures mean, and that the script runs as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.interop.tiny_hf import config_of_case, make_folder
from tests.processes import TIMEOUT
from tests.tiny_run import make_run

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


def run(*words: str) -> list[dict]:
    source = Path(generate.__file__).parents[1] / "src"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, generate.__file__, *words], env=variables, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(row) for row in result.stdout.splitlines()]


@pytest.mark.long
def test_an_imported_model_is_timed_with_drafts_and_8_bit_weights(tmp_path: Path) -> None:
    """A Hugging Face folder, and a run; a row for each case, and the ratios over the first."""
    config = config_of_case("llama3") | {"max_position_embeddings": 64, "vocab_size": 262}
    folder = make_folder(tmp_path / "tiny", config, tokenizer=True)
    text = tmp_path / "text.txt"
    text.write_text("one two three one two three " * 20)
    words = ["--batch", "2", "--prompt", "12", "--new", "16", "--steps", "2", "--repeats", "1", "--prompts", str(text)]
    plain, eight, fast, both, *compared = run(
        *words, "--model", str(folder), "--speculate", "none,ngram", "--weights", "auto,fp8"
    )
    assert [row["speculate"] for row in (plain, eight, fast, both)] == ["none", "none", "ngram", "ngram"]
    assert plain["tokens_per_pass"] is None and fast["tokens_per_pass"] >= 1
    head = 4 * config["vocab_size"] * config["hidden_size"]  # stays in float32
    assert eight["weight_bytes"] - head < 0.4 * (plain["weight_bytes"] - head)
    assert both["weight_bytes"] == eight["weight_bytes"] and fast["weight_bytes"] == plain["weight_bytes"]
    assert plain["model"] == "tiny" and plain["vocab"] == config["vocab_size"]
    assert [(row["speculate"], row["weights"]) for row in compared] == [
        ("none", "fp8"),
        ("ngram", "auto"),
        ("ngram", "fp8"),
    ]
    made = make_run(tmp_path, steps=(20,))
    [row] = run(
        "--model", str(made.path), "--batch", "1", "--prompt", "4", "--new", "8", "--steps", "4", "--repeats", "1"
    )
    assert row["decode_tokens_per_s"] > 0 and row["vocab"] == 300


@pytest.mark.slow
def test_a_case_runs_and_the_peer_runs_or_says_why_not() -> None:
    mine, peer, *rest = run(*WORDS)
    assert mine["system"] == "ours" and mine["decode_tokens_per_s"] > 0 and mine["programs"] == 2
    if "skipped" in peer:
        assert "not installed" in peer["skipped"] and not rest
    else:
        assert peer["decode_tokens_per_s"] > 0 and rest[0]["ratios"]
