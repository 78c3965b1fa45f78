"""grpo.curriculum: prompts by a column or by measured pass rates, a function of saved state, the same after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.tiny_run import tiny_tokenizer
from tests.training.test_training_resume import StopAt, assert_same, one_device, rows

from bessemer.data import Sampling
from bessemer.errors import InputError, Stopped, StorageError
from bessemer.rl.prompts import PromptPlan, PromptRows
from bessemer.rl.rollout import Passes
from bessemer.rl.selection import ByColumn, ByPassRate, build_curriculum
from bessemer.storage.files import PASS_RATES
from bessemer.storage.weights import to_bytes
from bessemer.training import launch

PROMPTS = 40


def half_solved(prompts: Any, completions: Any, n: Any, **columns: Any) -> list[float]:
    """1 for even rows, otherwise something between."""
    return [1.0 if row % 2 == 0 else 0.1 + len(text) % 7 / 9 for row, text in zip(n, completions, strict=True)]


def source(count: int = PROMPTS, number: int = 0, column: str = "level") -> PromptRows:
    """Row n has difficulty 100 − n: the last is the easiest."""
    data = [{"prompt": f"cat {n}", column: 100 - n} for n in range(count)]
    return PromptRows(data, "cats", tiny_tokenizer(), 32, longest=20, number=number)


def plan(curriculum: Any, *sources: PromptRows, seed: int = 0) -> PromptPlan:
    made = PromptPlan([(Sampling(f"cats{s.number}"), s) for s in sources], [], Passes(16, 2, seed=seed), 0)
    made.curriculum = curriculum
    return made


def places(made: PromptPlan, number: int, of: int = 0) -> list[int]:
    return [place for rows, place in made.prompts(number) if rows.number == of]


def test_a_column_opens_from_the_easiest_quarter_to_all_prompts() -> None:
    cats = source()
    made, free = plan(ByColumn("level", 0.25, 6, [cats]), cats), plan(None, cats)
    for number in range(8):
        share = min(1.0, 0.25 + 0.75 * number / 6)
        found, before = places(made, number), places(free, number)
        hardest = PROMPTS - np.ceil(share * PROMPTS)  # rows from here on are allowed
        assert len(set(found)) == 8 and min(found) >= hardest
        assert all(old == new for old, new in zip(before, found, strict=True) if old >= hardest)
        replaced = sum(old < hardest for old in before)
        assert made.report == {"curriculum/replaced": replaced, "curriculum/share": pytest.approx(share, abs=0.025)}
        assert places(made, number) == found, "asked twice, the same"
    assert places(made, 7) == places(free, 7)
    other = plan(made.curriculum, cats, seed=1)
    assert places(other, 0) != places(made, 0)


def test_each_source_of_a_mixture_has_its_own_order_and_keeps_its_share() -> None:
    two = source(), source(20, number=1)
    made, free = plan(ByColumn("level", 0.5, 100, two), *two), plan(None, *two)
    for number in range(3):
        assert [rows.number for rows, _ in made.prompts(number)] == [rows.number for rows, _ in free.prompts(number)]
        assert all(place >= 19 for place in places(made, number)) and all(p >= 9 for p in places(made, number, 1))


def test_where_no_other_prompt_is_left_the_drawn_one_stays() -> None:
    cats = source(10)
    made, free = plan(ByColumn("level", 0.1, 1000, [cats]), cats), plan(None, cats)
    found = places(made, 0)
    assert len(set(found)) == 8 and 9 in found and len(set(found) - set(places(free, 0))) <= 1


def test_solved_and_hopeless_prompts_rest_and_come_back() -> None:
    cats = source()
    rates = ByPassRate(0.0, 1.0, 3, [cats])
    assert rates.allowed(cats, 0).all()
    rewards = np.array([[0, 0], [1, 1], [0, 1], [0.2, 0.1]], float)
    rates.measure(5, [(cats, place) for place in (3, 4, 5, 6)], rewards.ravel())
    assert np.flatnonzero(~rates.allowed(cats, 6)).tolist() == [3, 4]
    assert np.flatnonzero(~rates.allowed(cats, 8)).tolist() == [3, 4] and rates.allowed(cats, 9).all()
    rates.measure(6, [(cats, 3)], np.array([1.0, 0.0]))
    assert np.flatnonzero(~rates.allowed(cats, 7)).tolist() == [4]
    made = plan(rates, cats)
    assert all(4 not in places(made, number) for number in (6, 7, 8))
    assert all(place != 4 for number in (6, 7, 8) for _, place in made.others(number, 1))


def test_episodes_that_failed_are_no_part_of_a_pass_rate() -> None:
    """Their rewards are the mean of all others, so that a solved prompt would look unsolved and a broken one solved."""
    cats = source()
    rates = ByPassRate(0.0, 1.0, 3, [cats])
    rates.measure(4, [(cats, 2), (cats, 3)], np.array([0.5, 0.7, 0.5, 0.7]))
    kept = np.array([True, False, False, False])
    rates.measure(5, [(cats, 2), (cats, 3)], np.array([1.0, 0.4, 0.4, 0.4]), kept)
    assert rates.rates[0][2] == 1 and rates.when[0][2] == 5
    assert rates.rates[0][3] == 0.6 and rates.when[0][3] == 4


def test_measured_rates_are_read_back_exactly_and_damage_is_named(tmp_path: Path) -> None:
    cats = source()
    one, two = ByPassRate(0, 1, 3, [cats]), ByPassRate(0, 1, 3, [cats])
    one.measure(7, [(cats, 2), (cats, 9)], np.array([1 / 3, 0.1, 0, 1]))
    assert not two.load(tmp_path)
    (tmp_path / PASS_RATES.name).write_bytes(one.to_bytes())
    assert two.load(tmp_path)
    np.testing.assert_array_equal(one.rates[0], two.rates[0])
    np.testing.assert_array_equal(one.when[0], two.when[0])
    assert not ByPassRate(0, 1, 3, [source(12)]).load(tmp_path), "of other prompts"
    (tmp_path / PASS_RATES.name).write_bytes(one.to_bytes()[:40])
    with pytest.raises(StorageError, match=r"the pass rates .* cannot be read"):
        two.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("rates/0", np.zeros((PROMPTS, 2))),
        ("rates/0", np.zeros(())),
        ("rates/0", np.zeros(PROMPTS, np.int64)),
        ("when/0", np.zeros(PROMPTS - 1, np.int64)),
        ("when/0", np.zeros(PROMPTS, np.float32)),
    ],
)
def test_pass_rates_of_another_form_are_refused(name: str, array: np.ndarray, tmp_path: Path) -> None:
    """Whoever can write a checkpoint can write its checksums, too."""
    good = {"rates/0": np.zeros(PROMPTS), "when/0": np.zeros(PROMPTS, np.int64)}
    (tmp_path / PASS_RATES.name).write_bytes(to_bytes(good | {name: array}, {}))
    with pytest.raises(StorageError, match=r"the pass rates .*pass-rates"):
        ByPassRate(0, 1, 3, [source()]).load(tmp_path)


def test_rows_without_a_difficulty_are_named() -> None:
    with pytest.raises(InputError, match=r"grpo.curriculum=hard needs a finite number .* cats row 1 lacks it"):
        ByColumn("hard", 0.25, 4, [source()])
    given = SimpleNamespace(curriculum="pass_rate", pass_rate_low=1.0, pass_rate_high=0.5)
    with pytest.raises(InputError, match=r"grpo.pass_rate_low=1 must be below"):
        build_curriculum(given, [source()], 4, 1)  # type: ignore[arg-type]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())
    tiny_tokenizer().save(tmp_path / "tokenizer")
    lines = [json.dumps({"prompt": f"cats and dogs {n}", "n": n}) for n in range(PROMPTS)]
    (tmp_path / "cats.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "training.dataset": str(tmp_path / "cats.jsonl"),
        "training.batch_size": 8,
        "training.per_device_batch_size": 8,
        "training.steps": 16,
        "training.validation": False,
        "data.tokenizer": str(tmp_path / "tokenizer"),
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "model.window": "L",
        "architecture.block_size": 32,
        "grpo.mini_batches": 2,
        "grpo.group_size": 2,
        "grpo.max_completion_length": 6,
        "grpo.curriculum": "pass_rate",
        "grpo.rewards": ["tests.training.test_curriculum:half_solved"],
        "optimization.name": "adamw",
        "optimization.lr": 0.01,
        "logging.report_interval": 1,
        "logging.checkpoint_interval": 1,
        "logging.keep_last": 20,
        "logging.progress": "none",
        "logging.preview_interval": 0,
    }


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
def test_solved_prompts_are_replaced_and_a_stopped_run_is_the_same(
    staleness: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """40 prompts, eight a rollout: the second pass over them begins with rollout 5."""
    given = settings | {"grpo.staleness": staleness}
    whole = launch.build_trainer(None, given, name="whole", root=tmp_path)
    whole.run()
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    assert all(row["curriculum/replaced"] == 0 for row in found[: 2 * 5]) and found[0]["curriculum/share"] == 1
    assert all(row["curriculum/replaced"] > 0 for row in found[2 * 5 :])
    assert all(row["curriculum/share"] < 0.8 for row in found[2 * 5 :])
    rates = whole.pass_rates.rates[0]
    assert (rates[::2] == 1).all() and (rates[1::2] < 1).all()
    assert whole.pass_rates.when[0][::2].max() <= 4 + staleness, "solved prompts were sampled again"
    for step in (11, 12):
        with pytest.raises(Stopped):
            launch.build_trainer(None, given, name=f"part{step}", root=tmp_path, callbacks=[StopAt(step)]).run()
        again = launch.reopen(tmp_path / f"part{step}")
        assert np.isfinite(again.pass_rates.rates[0]).sum() > 0
        again.run()
        assert_same(again, whole)
        np.testing.assert_array_equal(again.pass_rates.rates[0], whole.pass_rates.rates[0])


def test_what_a_curriculum_needs_is_said(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.build_trainer(None, settings | {"grpo.curriculum_start": 0.5}, name="run", root=tmp_path)
    assert "note: grpo.curriculum_start has no effect" in capsys.readouterr().out
    made = launch.build_trainer(None, settings | {"grpo.curriculum": "n"}, name="two", root=tmp_path)
    assert made.derived["grpo.curriculum_steps"]["value"] == 8
    with pytest.raises(InputError, match=r"grpo.curriculum is about prompts"):
        launch.build_trainer(None, settings | {"grpo.offline": "logprobs"}, name="no", root=tmp_path)
