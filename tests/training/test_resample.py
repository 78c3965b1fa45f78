"""Dynamic sampling: groups of equal rewards are replaced by those of other prompts, counted; the same after a stop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny_run import tiny_tokenizer
from tests.training.test_training_resume import StopAt, assert_same, rows
from tests.training.tiny_rl import build, grpo_settings

from bessemer.data import Sampling
from bessemer.errors import InputError, Stopped
from bessemer.generate import Result, Sample
from bessemer.objectives.grpo import SampledSettings
from bessemer.rl.prompts import Chosen, PromptPlan, PromptRows
from bessemer.rl.rollout import Passes
from bessemer.rl.selection import Groups, check_resampling, replace_flat
from bessemer.training import launch

HERE = "tests.training.test_resample"
WORLDS = Path(__file__).with_name("worlds.py")
PROMPTS = 40


def uneven(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    """Nothing for prompts with an odd number; the others' completions differ."""
    return [0.0 if n % 2 else sum(map(ord, text)) % 97 / 97 for text, n in zip(completions, answer, strict=True)]


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps a rollout, in which about half of the prompts give flat groups."""
    prompts = [{"prompt": f"cats and dogs {n}", "answer": n, "number": n} for n in range(PROMPTS)]
    changes = {
        "training.batch_size": 16,
        "training.per_device_batch_size": 8,
        "training.steps": 4,
        "model.window": "L",
        "grpo.resample": 3,
        "grpo.rewards": [f"{HERE}:uneven"],
        "logging.checkpoint_interval": 1,
    }
    return grpo_settings(tmp_path_factory.mktemp("prompts"), prompts, changes)


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = build(settings, tmp_path_factory.mktemp("runs"), "whole")
    trainer.run()
    return trainer


def plan(seed: int = 0, count: int = PROMPTS) -> PromptPlan:
    made = PromptRows([{"prompt": f"cat {n}"} for n in range(count)], "cats", tiny_tokenizer(), 32, longest=20)
    return PromptPlan([(Sampling("cats"), made)], [], Passes(16, 2, seed=seed), 0)


def groups(chosen: Chosen, flat: set[int]) -> Groups:
    """One group of two of each prompt, flat for those numbers, rewarded with the number."""
    rewards = np.array([[place, place + (place not in flat)] for _, place in chosen], float)
    results = [[Result((place,), (Sample(0, (1,), (0.0,), "", "stop"),) * 2, 0)] for _, place in chosen]
    return Groups(results, {"reward": rewards}, np.ptp(rewards, axis=1) == 0)


def test_flat_groups_are_replaced_by_those_of_unused_prompts_and_counted() -> None:
    prompts, flat = plan(), set(range(0, PROMPTS, 2))
    drawn: list[list[int]] = []

    def draw(turn: int, chosen: Chosen) -> Groups:
        drawn.append([place for _, place in chosen])
        return groups(chosen, flat)

    first = prompts.prompts(3)
    places = [place for _, place in first]
    made = replace_flat(groups(first, flat), first, 20, lambda turn: prompts.others(3, turn), draw)
    kept = [results[0].prompt_ids[0] for results in made.groups.results]
    assert [new for old, new in zip(places, kept, strict=True) if old not in flat] == [p for p in places if p % 2]
    assert not made.groups.flat.any() and all(place % 2 for place in kept)
    np.testing.assert_array_equal(made.groups.rewards["reward"][:, 0], kept)
    every = [*places, *itertools.chain(*drawn)]
    assert len(set(every)) == len(every) == made.drawn  # no prompt twice in a rollout
    open_groups = sum(place in flat for place in places)
    for some in drawn:
        assert len(some) == open_groups  # a round draws what is missing
        open_groups -= sum(place not in flat for place in some)
    total = sum(2 * place + (place not in flat) for place in every) / (2 * len(every))
    assert made.metrics == {
        "flat_groups": 0.0,
        "resample/rounds": len(drawn),
        "resample/drawn": len(every),
        "resample/discarded": len(every) - 8,
        "resample/reward": pytest.approx(total),
    }


def test_prompts_of_a_round_are_a_function_of_data_seed_rollout_and_round() -> None:
    def drawn(plan: PromptPlan, number: int, turn: int) -> list[int]:
        return [place for _, place in plan.others(number, turn)]

    one, same, other = plan(), plan(), plan(1)
    assert drawn(one, 2, 2) == drawn(same, 2, 2)  # asked in another order
    assert drawn(one, 2, 1) != drawn(one, 2, 2) != drawn(one, 3, 2) and drawn(one, 2, 1) != drawn(other, 2, 1)
    assert [drawn(one, 0, 1) == [place for _, place in one.prompts(0)]] == [False]


def test_groups_that_stay_flat_or_have_no_prompt_left_are_kept() -> None:
    """All prompts give flat groups; there are 12 of them, and the first eight are used."""
    prompts = plan(count=12)
    first = prompts.prompts(0)
    every = set(range(12))
    made = replace_flat(
        groups(first, every), first, 9, lambda turn: prompts.others(0, turn), lambda turn, chosen: groups(chosen, every)
    )
    assert made.drawn == 12 and made.groups.flat.all()
    assert [results[0].prompt_ids[0] for results in made.groups.results] == [place for _, place in first]
    assert made.metrics["resample/discarded"] == 4 and made.metrics["flat_groups"] == 1


@pytest.mark.slow
def test_a_run_trains_on_groups_that_differ_and_shows_the_cost(whole: Any, settings: dict[str, Any]) -> None:
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    assert len(found) == 4
    for row in found:
        assert row["resample/drawn"] - row["resample/discarded"] == 8 and row["resample/drawn"] > 8
        assert 1 <= row["resample/rounds"] <= 3 and row["reward"] > row["resample/reward"] > 0
    made = whole.sampler
    with whole.topology.scope():
        one, two = made.rollout(5), made.rollout(5)
        made.settings, given = type(made.settings)(**{**vars(made.settings), "resample": 0}), made.settings
        plain = made.rollout(5)
        made.settings = given
    assert 0 < one.metrics["time/resample_s"] <= one.metrics["time/rollout_s"] + one.metrics["time/reward_s"]
    for name, array in one.rows.items():
        np.testing.assert_array_equal(array, two.rows[name])
    rewards, before = (made.rewards["reward"].reshape(8, 4) for made in (one, plain))
    flat = np.ptp(before, axis=1) == 0
    assert flat.any() and (np.ptp(rewards, axis=1) == 0).mean() == one.metrics["flat_groups"] < flat.mean()
    teaches = np.repeat(~flat, 4)
    for name in ("input_ids", "target_ids", "loss_mask"):  # groups that taught something stay where they are
        np.testing.assert_array_equal(one.rows[name][teaches], plain.rows[name][teaches])
    np.testing.assert_array_equal(rewards[~flat], before[~flat])
    np.testing.assert_allclose(one.rows["advantages"][:, 0].reshape(8, 4).sum(axis=1), 0, atol=1e-4)
    before_answers = np.cumsum(one.rows["target_ids"] >= 0, axis=1) == 0
    prompts = np.where(before_answers, one.rows["input_ids"], 0)
    assert len(np.unique(prompts, axis=0)) == 8, "eight prompts, each with its own completions"
    real = one.rows["target_ids"] >= 0
    assert (one.rows["old_logprobs"][real] < 0).all() and one.metrics["logprob_gap_max"] < 1e-4


def test_what_cannot_be_resampled_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    for match, changes in (
        ("grpo.resample .* grpo.baseline=rollout", {"grpo.baseline": "rollout", "grpo.scale": False}),
        ("grpo.resample .* grpo.offline=logprobs trains on stored", {"grpo.offline": "logprobs"}),
    ):
        with pytest.raises(InputError, match=match):
            launch.build_trainer(None, settings | changes, name="no", root=tmp_path)
    with pytest.raises(InputError, match=r"grpo\.resample .* with a teacher"):
        check_resampling(1, SampledSettings())


@pytest.mark.slow
def test_stopped_between_the_steps_of_a_resampled_rollout(settings: dict[str, Any], whole: Any, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(3)]).run()
    again = launch.reopen(tmp_path / "part")
    assert again.step == 3 and again.rollout is not None
    again.run()
    assert_same(again, whole)


@pytest.mark.slow
def test_episodes_are_resampled_too_and_failures_are_no_reason_to_stop(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Groups of rows below 20 fail in every episode: they are flat, and so are the groups of rounds that only fail."""
    given = settings | {
        "grpo.environment": {"name": f"{WORLDS}:Faulty", "options": {"how": "raise"}},
        "grpo.on_environment_error": "skip",
        "grpo.environment_retries": 0,
        "architecture.block_size": 64,
        "training.steps": 2,
    }
    del given["grpo.rewards"]
    trainer = build(given, tmp_path)
    trainer.run()
    found = next(row for row in rows(trainer.run_directory.path) if "loss" in row)
    assert found["resample/drawn"] > 8 and found["env/failures"] > 0
    kept = np.array([sample.kept for sample in trainer.sampler.played]).reshape(8, 4)
    assert found["flat_groups"] >= 1 - kept.any(axis=1).mean()
    mask = trainer.rollout.rows["loss_mask"].any(axis=1).reshape(8, 4)
    np.testing.assert_array_equal(mask, kept)
