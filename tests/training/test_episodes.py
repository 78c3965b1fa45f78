"""Multi-turn rollouts: what is trained is what was sampled, in the order it was said; environments that fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.training.test_training_resume import StopAt, assert_same, rows
from tests.training.tiny_rl import build, grpo_settings

from bessemer.data.tokenize.chat import render
from bessemer.errors import InputError, Stopped, TrainingError
from bessemer.generate.engine import Engine
from bessemer.objectives.grpo import group_advantages
from bessemer.rl.episodes import EpisodeSampler
from bessemer.training import launch

WORLDS = Path(__file__).with_name("worlds.py")


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Episodes of three turns, four steps a rollout, in a model that says anything."""
    prompts = [{"number": n} for n in range(60)]
    changes = {
        "training.validation": True,
        "training.steps": 6,
        "training.validation_steps": 8,
        "data.val_fraction": 0.2,
        "model.window": "L",
        "architecture.block_size": 64,
        "grpo.environment": {"name": f"{WORLDS}:Relay"},
        "grpo.num_iterations": 2,
        "grpo.max_completion_length": 5,
        "grpo.slots": 6,
        "logging.validation_interval": 4,
        "logging.preview_interval": -1,
        "logging.preview_prompts": ["held-out"],
    }
    return grpo_settings(tmp_path_factory.mktemp("episodes"), prompts, changes)


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = build(settings, tmp_path_factory.mktemp("runs"), "whole")
    trainer.run()
    return trainer


def test_episodes_are_trained_on_and_reported(whole: Any) -> None:
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    names = {"reward", "reward/worlds:Relay", "completion_len", "env/turns", "env/failures", "env/timeouts"}
    assert all(names | {"env/retries", "env/errors", "kl", "entropy"} <= row.keys() for row in found)
    assert found[0]["env/turns"] == 3 and found[0]["env/failures"] == 0 and found[0]["truncated"] == 0
    assert found[0]["clip_frac"] == 0 and found[0]["kl"] == 0
    assert all(row["logprob_gap_max"] < 1e-4 for row in found)  # of sampled tokens only
    judged = [row for row in rows(whole.run_directory.path) if "val_reward" in row]
    assert [row["step"] for row in judged] == [0, 4, 6] and all(row["val_turns"] == 3 for row in judged)
    assert "workers" not in whole.sampler.__dict__, "no process is left behind"
    assert (whole.run_directory.path / "samples.jsonl").read_text(), "previews do without prompts in the rows"


def test_trained_ids_are_the_sampled_ids(whole: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every turn is sampled after exactly the ids that precede it in the row, and stands in the row as it was sampled;
    what the environment said is in between, as a user's turn, and is no target."""
    asked: list[Any] = []

    def submit(self: Engine, request: Any, submit: Any = Engine.submit) -> Any:
        handle = submit(self, request)
        asked.append(handle)
        return handle

    monkeypatch.setattr(Engine, "submit", submit)
    sampler = whole.sampler
    with whole.topology.scope():
        made = sampler.rollout(9)
    sampler.close()
    turns = [(handle.request, sample) for handle in asked for sample in handle.samples.values()]
    tokenizer, starts = whole.tokenizer, {}
    assert len(turns) == 3 * len(sampler.played) == 3 * 16
    for request, sample in turns:
        starts.setdefault(tuple(request.prompt_ids), []).append(sample)
    for number, episode in enumerate(sampler.played):
        inputs, targets = made.rows["input_ids"][number], made.rows["target_ids"][number]
        mask = made.rows["loss_mask"][number]
        length = int(made.rows["segment_ids"][number].sum())
        whole_row = [*inputs[:length].tolist(), int(targets[length - 1])]
        first = len(whole_row) - len(episode.ids)
        assert tuple(whole_row[first:]) == episode.ids
        place, said = first, []
        while place < len(whole_row):
            if not episode.mask[place - first]:
                place += 1
                continue
            end = place
            while end < len(whole_row) and episode.mask[end - first]:
                end += 1
            sampled = [sample.ids for sample in starts[tuple(whole_row[:place])]]
            assert tuple(whole_row[place:end]) in sampled
            np.testing.assert_array_equal(targets[place - 1 : end - 1], whole_row[place:end])
            said.append(whole_row[place:end])
            place = end
        assert len(said) == 3
        trained = np.array([0] * first + list(episode.mask))[1:]
        np.testing.assert_array_equal(mask[:length], trained)
        assert (targets[:length][trained == 0] == -1).all() and (targets[length:] == -1).all()
        assert (made.rows["old_logprobs"][number][:length][trained == 0] == 0).all()
        assert (made.rows["old_logprobs"][number][:length][trained == 1] < 0).all()
        # between the turns: the user's turn with the observation as text, whatever names of tokens it holds
        text = tokenizer.decode(
            said[0][:-1] if said[0][-1] in (tokenizer.bos_id, tokenizer.specials["<|assistant_end|>"]) else said[0]
        )
        message = {"role": "user", "content": f"<|bos|>{len(text)}"}
        between = render([message], tokenizer)[1:]
        begin = first + len(said[0])
        closed = (
            []
            if said[0][-1] in (tokenizer.bos_id, tokenizer.specials["<|assistant_end|>"])
            else [tokenizer.specials["<|assistant_end|>"]]
        )
        assert whole_row[begin : begin + len(between) + len(closed)] == [*closed, *between]


def test_a_rollout_is_repeatable_whatever_the_workers_and_each_episode_has_its_seed(whole: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sampler, settings = whole.sampler, whole.sampler.settings
    spec = replace(settings.environment, options={"log": str(log)})
    made = []
    with whole.topology.scope():
        for workers in (2, 1, 3):
            sampler.settings = replace(settings, environment=spec, environment_workers=workers)
            made.append(sampler.rollout(9))
            sampler.close()
    sampler.settings = settings
    for other in made[1:]:
        for name, array in made[0].rows.items():
            np.testing.assert_array_equal(array, other.rows[name])
    resets = [line for line in map(json.loads, log.read_text().splitlines()) if "row" in line]
    assert len(resets) == 3 * 16 and len({line["seed"] for line in resets}) == 16
    assert len({line["row"] for line in resets}) == 4


def test_turns_prefill_what_is_new_and_are_those_of_whole_prefills(whole: Any) -> None:
    """With a slot per episode, the second and third turn compute an observation and the newest sampled token. The next
    rollout, of the same prompts, continues nothing of the one before, which has other weights in training."""
    sampler, settings = whole.sampler, whole.sampler.settings
    few, made = sampler.engine, []
    sampler.settings = replace(settings, slots=16)
    del sampler.engine
    try:
        for reuse in (True, True, False):
            sampler.engine.reuse = reuse
            engine, before = sampler.engine, (sampler.engine.prompt_tokens, sampler.engine.reused_tokens)
            with whole.topology.scope():
                made.append(sampler.rollout(9))
            prompts, reused = engine.prompt_tokens - before[0], engine.reused_tokens - before[1]
            lengths = [(sample.ids, np.diff(sample.mask, prepend=0)) for sample in sampler.played]
            held = sum(int(np.flatnonzero(edges == -1)[turn]) - 1 for _, edges in lengths for turn in (0, 1))
            starts = [len(row) for row in _prompts(made[-1], sampler)]
            assert reused == (held + 2 * sum(starts) if reuse else 0) and prompts > reused
    finally:
        sampler.close()
        sampler.settings, sampler.engine = settings, few
    for name, array in made[0].rows.items():
        np.testing.assert_array_equal(array, made[1].rows[name], err_msg=name)
        np.testing.assert_allclose(array, made[2].rows[name], atol=2e-5, err_msg=name)


def _prompts(made: Any, sampler: EpisodeSampler) -> list[list[int]]:
    """Return the prompt of each episode."""
    lengths = made.rows["segment_ids"].sum(axis=1) + 1
    each = zip(made.rows["input_ids"], lengths, sampler.played, strict=True)
    return [inputs[: length - len(episode.ids)].tolist() for inputs, length, episode in each]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "nan", "text", "short", "blank", "object", "counts", "hang", "die"])
def test_a_failing_environment_ends_the_run_or_is_skipped_and_counted(
    how: str, whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler, settings = whole.sampler, whole.sampler.settings
    rowed = [source.columns[place]["number"] for source, place in whole.prompts.prompts(9)]
    bad = sorted(rowed)[1]  # one of the four prompts fails
    spec = replace(settings.environment, name=f"{WORLDS}:Faulty", options={"how": how, "bad": bad})
    patience = {"environment_timeout": 2.0 if how == "hang" else 60.0, "environment_retries": 0 if how == "hang" else 1}
    sampler.settings = replace(settings, environment=spec, **patience)
    try:
        with whole.topology.scope(), pytest.raises(TrainingError, match=r"worlds:Faulty' failed at .* turn 2: .*"):
            sampler.rollout(9)
        sampler.close()
        sampler.settings = replace(sampler.settings, on_environment_error="skip")
        with whole.topology.scope():
            made = sampler.rollout(9)
    finally:
        sampler.close()
        sampler.settings = settings
    failed = np.repeat(np.array(rowed) < bad, 4)
    assert failed.sum() == 4 and made.metrics["env/failures"] == 4
    assert made.metrics["env/timeouts"] == (4 if how == "hang" else 0)
    assert made.metrics["env/errors"] == (0 if how == "hang" else 8)
    assert made.metrics["env/retries"] >= (0 if how == "hang" else 4)
    for name in ("loss_mask", "advantages"):
        assert not made.rows[name][failed].any() and made.rows[name][~failed].any()
    assert (made.rows["target_ids"][failed] == -1).all()
    assert "4 of 16 episodes of 'worlds:Faulty' failed and are skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_retry_replays_the_episode(whole: Any, tmp_path: Path) -> None:
    """What fails once is repeated in a new process, and the rollout is the one without the failure."""
    sampler, settings = whole.sampler, whole.sampler.settings
    with whole.topology.scope():
        try:
            undisturbed = sampler.rollout(9)
            sampler.close()
            options = {"how": "die", "bad": 1000, "times": str(tmp_path), "at_most": 1}
            spec = replace(settings.environment, name=f"{WORLDS}:Faulty", options=options)
            sampler.settings = replace(settings, environment=spec)
            made = sampler.rollout(9)
            spec = replace(settings.environment, name=f"{WORLDS}:Moody")
            sampler.settings = replace(settings, environment=spec)
            sampler.close()
            with pytest.raises(TrainingError, match="answered differently when its episode was replayed"):
                sampler.rollout(9)
        finally:
            sampler.close()
            sampler.settings = settings
    assert made.metrics["env/failures"] == 0 and made.metrics["env/retries"] >= 16 == made.metrics["env/errors"]
    for name, array in undisturbed.rows.items():
        np.testing.assert_array_equal(array, made.rows[name])


def test_episodes_end_at_the_last_turn_and_where_the_block_is_full(whole: Any) -> None:
    sampler, settings = whole.sampler, whole.sampler.settings
    with whole.topology.scope():
        try:
            sampler.settings = replace(settings, max_turns=2)
            two = sampler.rollout(9)
            sampler.settings = replace(
                settings, environment=replace(settings.environment, options={"turns": 99}), max_turns=99
            )
            sampler.close()
            full = sampler.rollout(9)
        finally:
            sampler.close()
            sampler.settings = settings
    assert two.metrics["env/turns"] == 2 and two.metrics["truncated"] == 1
    assert full.metrics["truncated"] == 1 and full.metrics["env/turns"] > 3
    assert (full.rows["segment_ids"].sum(axis=1) <= 64).all()


@pytest.mark.slow
def test_stopped_between_two_steps_of_a_rollout_and_resumed(
    settings: dict[str, Any], whole: Any, tmp_path: Path
) -> None:
    first = launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(3)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    assert second.step == 3 and second.rollout is not None
    second.run()
    assert_same(second, whole)


def test_what_cannot_work_is_said_before_anything_is_written(settings: dict[str, Any], tmp_path: Path) -> None:
    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=match):
            build(settings, tmp_path, "no", **changes)
        assert not (tmp_path / "no").exists()

    refused("unknown environment 'gues'.*guess", grpo__environment="gues")
    refused("not a class derived", grpo__environment=f"{WORLDS}:json")
    refused("options of the environment .* do not fit", grpo__environment={"name": "guess", "options": {"hi": 3}})
    refused("GRPO and its family", grpo__offline="reference")


def test_rewards_beside_an_environment_are_added(whole: Any) -> None:
    trainer = whole
    sampler: EpisodeSampler = trainer.sampler
    from bessemer.rl.rewards import Rewards, RewardSpec

    sampler.rewards = Rewards([RewardSpec("length_penalty", 2.0, {"scale": 10.0})])
    try:
        with trainer.topology.scope():
            made = sampler.rollout(9)
    finally:
        sampler.rewards = None
        sampler.close()
    lengths = np.array([sum(sample.mask) for sample in sampler.played])
    own = np.array([sample.reward for sample in sampler.played])
    np.testing.assert_allclose(made.rewards["reward"], own - 2 * np.minimum(1, lengths / 10))


def test_advantages_of_the_episodes_that_are_kept() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 9.0], [2.0, 9.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    kept = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
    found = group_advantages(rewards, kept=kept)
    np.testing.assert_array_equal(found[0, :3], group_advantages(rewards[:1, :3])[0])
    np.testing.assert_array_equal(found[2], group_advantages(rewards[2:])[0])
    assert found[0, 3] == 0 and not found[1].any()
    over_all = group_advantages(rewards, "rollout", False, kept)
    np.testing.assert_allclose(over_all[kept], rewards[kept] - rewards[kept].mean())
    assert not over_all[~kept].any()
