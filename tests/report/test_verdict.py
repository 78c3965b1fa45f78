"""The verdict over two groups of runs: Student's distribution, pairing by seed, assumed noise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.report.summary import Summary
from bessemer.report.tables import compare_seeds, describe, judge, mean_and_spread, student_cdf


@pytest.mark.parametrize(
    ("t", "freedom", "expected"),  # 95% and 99% one-sided points of printed tables
    [(6.3138, 1, 0.95), (2.9200, 2, 0.95), (2.3534, 3, 0.95), (2.1318, 4, 0.95), (31.8205, 1, 0.99), (3.3649, 5, 0.99)],
)
def test_student_distribution_agrees_with_printed_tables(t: float, freedom: int, expected: float) -> None:
    assert student_cdf(t, freedom) == pytest.approx(expected, abs=2e-5)
    assert student_cdf(0.0, freedom) == 0.5


def test_shared_seeds_are_paired_so_a_common_shift_between_seeds_does_not_count() -> None:
    slow = {0: 3.50, 1: 3.60, 2: 3.40}
    fast = {seed: value - 0.01 + 0.001 * seed for seed, value in slow.items()}
    verdict = judge("fast", fast, "slow", slow)
    assert verdict.difference == pytest.approx(-0.009) and verdict.error == pytest.approx(0.001 / math.sqrt(3))
    assert verdict.decided and "paired by 3 seeds" in str(verdict) and "fast is 0.0090 below slow" in str(verdict)


def test_without_two_shared_seeds_the_noise_is_assumed() -> None:
    verdict = judge("ours", {0: 3.28, 1: 3.27}, "theirs", {None: 3.30}, noise=0.02)
    assert verdict.error == pytest.approx(0.02 * math.sqrt(1.5))
    assert not verdict.decided and "assumed noise 0.02; undecided" in str(verdict)
    assert judge("ours", {0: 3.1}, "theirs", {0: 3.3}).decided  # one shared seed has no spread of its own


def test_equal_runs_are_not_decided() -> None:
    verdict = judge("a", {0: 3.0, 1: 3.1}, "b", {0: 3.0, 1: 3.1})
    assert verdict.confidence == 0.5 and not verdict.decided


def test_runs_without_a_partner_are_counted() -> None:
    verdict = judge("a", {0: 1.0, 1: 2.0, 2: 9.0}, "b", {0: 1.5, 1: 2.5})
    assert verdict.difference == -0.5 and "1 unpaired left out" in verdict.method


def test_spread_of_one_run_is_unknown() -> None:
    assert mean_and_spread({0: 3.0}) == (3.0, None)
    assert mean_and_spread({0: 3.0, 1: 4.0}) == (3.5, pytest.approx(math.sqrt(0.5)))


def finished(rate: float, seed: int, loss: float, tokens: int = 6400, steps: int = 10, **last: Any) -> Summary:
    return Summary(
        RunDirectory(Path(f"runs/{rate}-{seed}")),
        status={"state": "done"},
        config={"seed": seed, "optimization.lr": rate, "logging.progress": f"{seed}"},
        facts={"validation": {"fingerprint": "f"}},
        rows=[{"step": 1, "val_loss": 9.0}, {"step": steps, "tokens": tokens, "val_loss": loss, **last}],
    )


def test_runs_that_differ_only_in_seed_are_one_group() -> None:
    runs = [finished(0.1, 0, 3.0), finished(0.1, 1, 3.2), finished(0.2, 0, 2.9), finished(0.2, 1, 3.09)]
    lines = compare_seeds(runs, ["a", "b", "c", "d"])
    assert lines[0] == "Validation loss after 6,400 tokens:"
    assert lines[1:3] == ["c: 2.9950 (spread 0.1344, 2 runs)", "a: 3.1000 (spread 0.1414, 2 runs)"]
    assert lines[3].startswith("c is 0.1050 below a") and "paired by 2 seeds" in lines[3]


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(InputError, match="same settings and seed"):
        compare_seeds([finished(0.1, 0, 3.0), finished(0.1, 0, 3.1)], ["a", "b"])
    with pytest.raises(InputError, match="nothing to compare"):
        compare_seeds([finished(0.1, 0, 3.0), finished(0.1, 1, 3.1)], ["a", "b"])
    other = finished(0.2, 0, 3.0)
    other.facts = {}
    with pytest.raises(InputError, match="held-out set"):
        compare_seeds([finished(0.1, 0, 3.0), other], ["a", "b"])
    other.status = {"state": "stopped"}
    with pytest.raises(InputError, match="not done: b"):
        compare_seeds([finished(0.1, 0, 3.0), other], ["a", "b"])


def test_runs_with_different_budgets_are_refused() -> None:
    """1.5 times the tokens is lower by itself. Tokens and FLOPs may differ by less than a step of the larger batch."""
    with pytest.raises(InputError, match="a had 6,400 tokens; b had 9,600 tokens"):
        compare_seeds([finished(0.1, 0, 3.0), finished(0.2, 0, 2.9, tokens=9600, steps=15)], ["a", "b"])
    almost = compare_seeds([finished(0.1, 0, 3.0), finished(0.2, 0, 2.9, tokens=7000, steps=7)], ["a", "b"])
    assert almost[0] == "Validation loss after 6,700 tokens:"
    deeper = finished(0.2, 0, 2.9, tokens=3200, steps=5, total_training_flops=2.0e15)
    equal = compare_seeds([finished(0.1, 0, 3.0, total_training_flops=2.1e15), deeper], ["a", "b"])
    assert equal[0] == "Validation loss after 2.05e+15 FLOPs:"


def test_runs_with_equal_training_time_are_compared() -> None:
    slower = {"tokens": 3200, "steps": 5, "time/step_ms": 202.0}
    runs = [finished(0.1, 0, 3.0, **{"time/step_ms": 100.0}), finished(0.2, 0, 2.9, **slower)]
    assert compare_seeds(runs, ["a", "b"])[0] == "Validation loss after 1s of training:"
    with pytest.raises(InputError, match=r"b had 3,200 tokens, 1\.1s of training"):
        compare_seeds([runs[0], finished(0.2, 0, 2.9, **{**slower, "time/step_ms": 220.0})], ["a", "b"])


def test_a_loss_of_an_earlier_step_is_not_a_final_loss() -> None:
    early = finished(0.2, 0, 2.9)
    early.rows.append({"step": 12, "tokens": 7680})
    with pytest.raises(InputError, match="b has it of 10/12"):
        compare_seeds([finished(0.1, 0, 3.0), early], ["a", "b"])


def test_description_begins_with_the_best() -> None:
    assert describe({"a": {0: 3.0}, "b": {0: 2.0}})[0] == "b: 2.0000 (one run, spread unknown)"
