"""benchmarks/arena.py: what it accepts, that it goes on where it was stopped, and the stream that its runs share."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import arena
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stream
from stream_order import InOrder
from tests.conftest import WORDS, words
from tests.processes import TIMEOUT

from bessemer.data import DataPlan, DatasetStyle, Sampling, Tokenizer, make_rows
from bessemer.errors import InputError, Stopped, TrainingError
from bessemer.job import RunDirectory
from bessemer.report.summary import Summary

TWO = ["--contender", "one", "--contender", "two", "optimization.matrix_lr=0.04"]
CURVE = {"depth": 2, "width": 32, "block_size": 16, "batch": 4, "steps": 3, "window": "L", "seed": 0}
ROWS = [{"step": 0, "val_loss": 5.7}, {"step": 0, "train_loss": 5.7}, {"step": 3, "val_loss": 5.0}]


def arguments(*given: str, budget: Sequence[str] = ("--tokens", "192")) -> Any:
    return arena.arguments(["somewhere", *budget, *given])


# -- what it accepts ---------------------------------------------------------------------------------------------


def test_contenders_come_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("deep: {recipe: quickstart, model.depth: 5, model.window: SL}\nplain:\n")
    found = {one.name: one for one in arena.contenders_of(arguments(*TWO, "--file", str(tmp_path / "more.yaml")))}
    assert list(found) == ["one", "two", "deep", "plain"]
    assert found["two"].settings == {"optimization.matrix_lr": "0.04"} and found["two"].recipe is None
    assert found["deep"].settings == {"model.depth": "5", "model.window": "SL"} and found["deep"].recipe == "quickstart"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--contender", "alone"], "at least two contenders"),
        (["--contender", "a", "--contender", "a"], "two contenders are called a"),
        (["--contender", "a", "sft", "dpo", "--contender", "b"], "two recipes"),
        (["--contender", "a", "training.steps=5", "--contender", "b"], "training.steps is the budget"),
        (["--contender", "a", "data/tokenizer=x", "--contender", "b"], "data.tokenizer must be the same"),
        (["--contender", "a", "seed=5", "--contender", "b"], "seed must be the same"),
        ([*TWO, "--curve", "theirs", "curve.json"], "--stream"),
        ([*TWO, "--curve", "theirs"], "at least one file"),
        ([*TWO, "--curve", "theirs", "a.json", "./a.json"], "given twice"),
        (["--contender", "a/b", "--contender", "b"], "cannot be a run name"),
    ],
)
def test_what_cannot_be_compared_is_refused(given: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        arena.contenders_of(arguments(*given))


def test_there_is_one_budget() -> None:
    assert arena.budget_of(arguments(*TWO)) == ("tokens", 192)
    for budget in ([], ["--tokens", "5", "--seconds", "5"], ["--flops", "0"]):
        with pytest.raises(InputError, match="one budget"):
            arena.budget_of(arguments(*TWO, budget=budget))


def test_a_seed_counts_once() -> None:
    assert arena.seeds_of("0,1,2") == [0, 1, 2]
    for given, problem in (("0,1,0", "twice"), ("0,a", "whole numbers")):
        with pytest.raises(InputError, match=problem):
            arena.seeds_of(given)


def test_contenders_may_be_added_but_not_changed(tmp_path: Path) -> None:
    one, two = arena.Contender("one"), arena.Contender("two", settings={"model.depth": "3"})

    def agreed(tokens: float) -> arena.Agreement:
        return arena.Agreement(tmp_path / "arena.json", {"tokens": tokens}, {"set": {}})

    agreed(5).enter([one])
    agreed(5).enter([two])
    assert set(json.loads((tmp_path / "arena.json").read_text())["contenders"]) == {"one", "two"}
    with pytest.raises(InputError, match="Give it another name"):
        agreed(5).enter([one, arena.Contender("two", settings={"model.depth": "4"})])
    with pytest.raises(InputError, match="other settings"):
        agreed(6).enter([one])


def test_a_budget_in_seconds_becomes_steps_at_the_measured_pace() -> None:
    # completions are seen in bursts: single rows say little, their sum is right
    rows = [{"step": step, "time/step_ms": ms} for step, ms in enumerate((900.0, 0.01, 39.99), start=1)]
    measured = Summary(RunDirectory(Path("runs/a.pace")), status={"state": "done"}, rows=rows)
    assert arena.steps_in(3.0, arena.pace_of(measured, "a")) == 150
    with pytest.raises(TrainingError, match="pace of a"):
        arena.pace_of(Summary(RunDirectory(Path("runs/a.pace")), status={"state": "failed"}, rows=rows), "a")


def test_nothing_begins_after_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="goes on"):
        arena.train(tmp_path, "one.s0", "quickstart", {}, arena.Deadline(0))


# -- what it says ------------------------------------------------------------------------------------------------


def test_a_stored_curve_is_compared_at_equal_tokens_only(tmp_path: Path) -> None:
    (tmp_path / "curve.json").write_text(json.dumps({**CURVE, "rows": ROWS}))
    theirs = arena.Contender("theirs", curves=(tmp_path / "curve.json",))
    (line,) = arena.curve_lines(theirs, 3 * 64)
    assert line["val_loss"] == 5.0 and line["tokens"] == 192 and line["seed"] is None
    with pytest.raises(InputError, match="--tokens 192"):
        arena.curve_lines(theirs, 4 * 64)
    (tmp_path / "curve.json").write_text("[]")
    with pytest.raises(InputError, match="not a stored curve"):
        arena.curve_lines(theirs, 192)


def test_our_runs_are_paired_by_seed_and_curves_are_not() -> None:
    ours = {0: 3.50, 1: 3.60, 2: 3.40}
    groups = {"base": ours, "new": {seed: loss - 0.01 - 0.001 * seed for seed, loss in ours.items()}}
    table = arena.verdicts({**groups, "theirs": {"a.json": 3.6, "b.json": 3.62}}, noise=0.02).splitlines()
    assert [line.split()[0] for line in table] == ["contender", "new", "base", "theirs"]
    assert "-0.0110 ± 0.0006" in table[1] and "decided" in table[1] and "paired by 3 seeds" in table[1]
    assert "2 against 3, assumed noise 0.02" in table[3]


def test_stored_curves_are_never_paired_with_each_other_or_with_a_negative_seed(tmp_path: Path) -> None:
    """Two curves of one system at two rates share no weights with what stands beside them under the same number."""
    curves: dict[str, list[Path]] = {}
    for name, shift in (("slow", 0.0), ("fast", -0.1)):
        for seed in (0, 1):
            path = tmp_path / f"{name}{seed}.json"
            rows = [{"step": 3, "val_loss": 5.0 + shift + 0.2 * seed}]
            path.write_text(json.dumps({**CURVE, "rows": rows}))
            curves.setdefault(name, []).append(path)
    groups: dict[str, Any] = {"ours": {-1: 5.0, -2: 5.3}}
    for name, paths in curves.items():
        groups[name] = arena.results_of(arena.curve_lines(arena.Contender(name, curves=tuple(paths)), 192))
        assert len(groups[name]) == 2
    for base in groups:
        table = arena.verdicts({base: groups[base], **groups}, noise=0.02)
        assert table.count("2 against 2, assumed noise 0.02") == 2 and "paired" not in table


def test_runs_on_other_batches_or_held_out_text_are_not_compared() -> None:
    line = {"contender": "a", "seed": 0, "tokens": 640, "steps": 10, "held_out": "h", "data": "d"}
    arena.check_same_data([line, {**line, "contender": "b"}, {**line, "tokens": 1280, "data": "larger batch"}])
    with pytest.raises(InputError, match="other batches"):
        arena.check_same_data([line, {**line, "data": "e"}])
    with pytest.raises(InputError, match="different held-out"):
        arena.check_same_data([line, {**line, "held_out": "i"}])


def test_rows_in_order_are_the_windows_of_the_stored_curves() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 260, size).tolist() for size in (30, 7, 25)]
    rows = make_rows([{"input_ids": ids} for ids in documents], DatasetStyle.PMD, 8, tokenizer=Tokenizer.train([], 300))
    plan = DataPlan([[(Sampling("a"), rows)]], 3, 5, validation=[(Sampling("a"), rows)], validation_count=4)
    tokens = np.concatenate(documents)
    made = InOrder(plan, held_out=11)  # the stream has 7 whole windows
    for step in (0, 1, 4):
        expected = stream.batch_of(stream.windows(tokens, step, 3, 8))
        batch = made.batch(step)
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name], values)
        np.testing.assert_array_equal(made.batch(step, slice(1, 2))["input_ids"], batch["input_ids"][1:2])
    assert made.validation is not None and len(made.validation) == 11
    held_out = made.validation.batch(0, 11)
    np.testing.assert_array_equal(held_out["input_ids"], stream.windows(tokens, 0, 11, 8)[:, :-1])
    assert made.fingerprint != plan.fingerprint


# -- whole runs --------------------------------------------------------------------------------------------------

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(home: Path) -> Start:
    source = Path(arena.__file__).parents[1] / "src"

    def begin(*given: str, **variables: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        shared = {"BESSEMER_HOME": str(home), "PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": "1"}
        return subprocess.Popen(
            [sys.executable, arena.__file__, *given],
            env={**os.environ, **shared, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def finished(process: subprocess.Popen[str], code: int = 0) -> list[dict[str, Any]]:
    out, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, out + errors
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.long
def test_a_stopped_arena_goes_on_to_the_same_result(tmp_path: Path, start: Start, tiny: dict[str, object]) -> None:
    settings = words({key: value for key, value in tiny.items() if key != "training.steps"})
    common = ["--recipe", "quickstart", "--tokens", "1280", "--seeds", "0", "--json", *TWO]
    hold = Path(__file__).parents[1] / "faults" / "hold.py"
    common += ["--set", *settings, f"plugins=[{hold}]", "callbacks=[hold]"]
    process = start(str(tmp_path / "stopped"), *common, HOLD_AT="step 5", HOLD=str(tmp_path))
    deadline = time.monotonic() + TIMEOUT
    while not (tmp_path / "here").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert finished(process, arena.STOPPED) == []
    first = tmp_path / "stopped" / "runs" / "one.s0"
    assert json.loads((first / "status.json").read_text())["step"] == 5
    again = finished(start(str(tmp_path / "stopped"), *common))
    whole = finished(start(str(tmp_path / "whole"), *common))
    timed = ("train_seconds", "tokens_per_s")
    assert [{k: v for k, v in line.items() if k not in timed} for line in again] == [
        {k: v for k, v in line.items() if k not in timed} for line in whole
    ]
    assert [line["steps"] for line in again] == [10, 10] and again[0]["val_loss"] != again[1]["val_loss"]
    before = (first / "status.json").stat().st_mtime_ns
    assert finished(start(str(tmp_path / "stopped"), *common)) == again
    assert (first / "status.json").stat().st_mtime_ns == before  # read, not run


@pytest.mark.slow
def test_a_stored_curve_stands_beside_a_run_on_its_stream(tmp_path: Path, start: Start) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(10, 30))) + " <|bos|>." for _ in range(24)]
    parts = {"train-00000-of-00002": texts[:10], "train-00001-of-00002": texts[10:20], "val-00000-of-00001": texts[20:]}
    for name, rows in parts.items():
        pq.write_table(pa.table({"text": rows}), tmp_path / f"{name}.parquet")
    tokenizer = Tokenizer.train(texts, 300)
    tokenizer.save(tmp_path)
    curve = tmp_path / "nanochat_d8_s0.json"
    curve.write_text(json.dumps({**CURVE, "vocab": tokenizer.vocab_size, "rows": ROWS}))
    given = ["--tokens", "192", "--seeds", "0", "--stream", str(tmp_path), str(tmp_path), "--json"]
    given += ["--contender", "ours", "--curve", "theirs", str(curve), "--set", "model.head_dim=16"]
    theirs, ours = finished(start(str(tmp_path / "arena"), *given, "--any-stream"))
    assert theirs["val_loss"] == 5.0 and ours["steps"] == 3
    assert ours["val_loss"] == pytest.approx(np.log(tokenizer.vocab_size), abs=0.2)
    _, errors = (refused := start(str(tmp_path / "arena"), *given)).communicate(timeout=TIMEOUT)
    assert refused.returncode == 2 and "not the reference's" in errors


@pytest.mark.long
def test_seconds_are_steps_of_the_measured_pace(tmp_path: Path, start: Start, tiny: dict[str, object]) -> None:
    settings = words({key: value for key, value in tiny.items() if key != "training.steps"})
    common = ["--recipe", "quickstart", "--seconds", "0.5", "--seeds", "0", "--json", "--set", *settings]
    common += ["--contender", "one", "--contender", "two", "training.batch_size=16"]
    lines = finished(start(str(tmp_path), *common))
    paces = json.loads((tmp_path / "arena.json").read_text())["paces"]
    assert set(paces) == {"one", "two"}
    for line in lines:
        assert line["steps"] == arena.steps_in(0.5, paces[line["contender"]])
