"""grpo.staleness=1: each rollout is sampled with the weights of the one before, while rewards are computed; the same
run after a stop at any step."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tests.tiny_run import tiny_tokenizer
from tests.training.test_training_resume import StopAt, assert_same, one_device, rows

from bessemer.errors import InputError, Stopped, StorageError, TrainingError
from bessemer.models.llama import Llama
from bessemer.report.metrics import MetricsFile
from bessemer.rl.ahead import AheadOfTraining, Background, Sampled, check_ahead
from bessemer.rl.rollout import FIELDS, TOKEN_FIELDS, Rollout
from bessemer.rl.sampler import Laps, Sampler
from bessemer.storage.files import ROLLOUT, ROLLOUT_AHEAD
from bessemer.training import launch

HERE = "tests.training.test_staleness"


def vowels(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [sum(letter in "aeiou " for letter in text) / 4 for text in completions]


def unlucky(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    raise ValueError("no such key")


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps a rollout, four rollouts."""
    folder = tmp_path_factory.mktemp("prompts")
    tiny_tokenizer().save(folder)
    lines = [json.dumps({"prompt": f"cats and dogs {n}"}) for n in range(60)]
    (folder / "cats.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "training.dataset": str(folder / "cats.jsonl"),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 7,
        "training.validation_steps": 8,
        "data.tokenizer": str(folder),
        "data.val_fraction": 0.2,
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "model.window": "L",
        "architecture.block_size": 32,
        "grpo.mini_batches": 2,
        "grpo.max_completion_length": 6,
        "grpo.temperature": 0.8,
        "grpo.staleness": 1,
        "grpo.overlong_penalty": 0.1,
        "grpo.rewards": [f"{HERE}:vowels"],
        "optimization.name": "adamw",
        "optimization.lr": 0.03,
        "logging.report_interval": 1,
        "logging.validation_interval": 5,
        "logging.checkpoint_interval": 1,
        "logging.keep_last": 20,
        "logging.progress": "none",
        "logging.preview_interval": 0,
    }


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", lambda settings: one_device())
        trainer = launch.build_trainer(None, settings, name="whole", root=tmp_path_factory.mktemp("runs"))
        calls, rewards_text = [], Sampler.rewards_text

        def watched(sampler: Sampler, chosen: Any, samples: Any, copies: int) -> str:
            calls.append((threading.current_thread().name, len(samples)))
            return rewards_text(sampler, chosen, samples, copies)

        patch.setattr(Sampler, "rewards_text", watched)
        trainer.run()
        trainer.calls = calls
    return trainer


@pytest.mark.slow
def test_every_rollout_after_the_first_is_one_rollout_old_and_says_so(whole: Any) -> None:
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    assert [row["staleness"] for row in found] == [0, 0, 2, 2, 2, 2, 2]
    assert found[0]["logprob_gap_max"] < 1e-4 and found[0]["ess"] == pytest.approx(1, abs=1e-6)
    assert all(row["logprob_gap"] > 1e-4 and row["ess"] < 1 - 1e-6 for row in found[2:])  # the weights moved
    assert all(row["clip_frac"] == 0 for row in found[::2])  # π_old is the policy at the first step of a rollout
    threads = [name for name, count in whole.calls if count == whole.passes.rows]
    assert threads == ["bessemer-rewards"] * 4, "one call per rollout, and none for a fifth, which no step needs"


@pytest.mark.slow
def test_the_time_of_a_step_is_still_divided_into_its_parts(whole: Any) -> None:
    parts = ("time/rollout_s", "time/reward_s", "time/score_s")
    for row in MetricsFile(whole.run_directory.metrics).rows():
        if "loss" in row and row["step"] % 2:  # the first step of a rollout
            others, seconds = sum(row[part] for part in parts), row["time/step_ms"] / 1e3
            assert row["time/train_s"] > 0
            assert row["time/train_s"] + others == pytest.approx(seconds * (1 - row["time/data_wait_pct"] / 100))
            assert row["time/reward_overlap_s"] >= 0


def test_the_sampler_is_that_of_the_weights_before_and_the_ratio_is_to_those_now(
    settings: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    """The weights move between the sampling of rollout 1 and its training."""
    trainer = launch.build_trainer(None, settings, name="moved", root=tmp_path)
    with trainer.topology.scope():
        trainer.ahead.rollout(0, 0, True, Laps())
        sampled = trainer.ahead.next.rollout
        real = sampled.rows["target_ids"] >= 0
        for name, then in zip(("policy", "model"), trainer.sampler.score(sampled.rows), strict=True):
            np.testing.assert_allclose(sampled.drawn[name][real], then[real], atol=2e-5)
        moved = jax.tree.map(lambda leaf: leaf * 1.2, trainer.state.params)
        trainer.state = trainer.state.replace(params=moved)
        now = trainer.sampler.score(sampled.rows)[0]
        made = trainer.ahead.rollout(1, 2, False, Laps())
    np.testing.assert_array_equal(made.rows["old_logprobs"], now)
    assert np.abs(now - sampled.drawn["policy"])[real].max() > 1e-3
    weights = np.minimum(np.exp(now - sampled.drawn["policy"]), trainer.settings.importance_cap)
    plain = trainer.sampler.advantages([], made.rewards["reward"].reshape(-1, 4)).reshape(-1, 1)
    np.testing.assert_allclose(made.rows["advantages"][real], (plain * weights)[real], rtol=1e-5, atol=1e-6)
    assert made.metrics["staleness"] == 2 and trainer.ahead.next is None


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.long), 4])
def test_stopped_in_a_rollout_or_between_two_and_resumed(
    step: int, settings: dict[str, Any], whole: Any, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(step)]).run()
    folder = tmp_path / f"part/checkpoints/step_{step:08}"
    assert (folder / ROLLOUT.name).is_file() == (step == 3)
    held = Rollout.load(folder / ROLLOUT_AHEAD.name)
    assert held.number == 2 and held.step == 2 and {"reward", f"{HERE}:vowels", "overlong_penalty"} <= set(held.rewards)
    again = launch.reopen(tmp_path / "part")
    assert again.step == step and again.ahead.waiting == "rollout 2"
    again.run()
    assert_same(again, whole)


def ahead(**changes: Any) -> Rollout:
    """A rollout of four rows of six tokens, two per prompt, as it is saved before it is scored."""
    rows = {name: np.zeros((4, 6), dtype) for name, dtype in TOKEN_FIELDS.items()}
    drawn = {"model": np.zeros((4, 6), np.float32), "policy": np.zeros((4, 6), np.float32)}
    drawn |= {"source": np.zeros(2, np.int64), "prompt": np.array([0, 3])}
    made = Rollout(2, rows, {"reward": np.zeros(4), "vowels": np.zeros(4)}, {}, drawn, step=2)
    for name, value in changes.items():
        part, _, key = name.partition("_")
        if not key:
            setattr(made, part, value)
        elif value is None:
            del getattr(made, part)[key]
        else:
            getattr(made, part)[key] = value
    return made


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_rollback_waits_for_rewards_that_are_being_computed(how: str, tmp_path: Path) -> None:
    """The next call of a reward would otherwise run beside the one that nobody needs any more."""
    ended: list[str] = []

    def rewards() -> str:
        time.sleep(0.2)
        ended.append(how)
        if how == "raise":
            raise ValueError("no such key")
        return ""

    made = AheadOfTraining(lambda: pytest.fail("nothing is sampled"))
    made.next = Sampled(ahead(), call=Background(rewards))
    made.load(tmp_path)
    assert ended == [how] and made.next is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rewards": {}}, "'reward' is missing"),
        ({"rewards_vowels": np.zeros(3)}, r"'vowels' is float64 \(3,\)"),
        ({"rewards_reward": np.full(4, np.nan)}, "'reward' is"),
        ({"drawn_model": None}, "'model' is missing"),
        ({"drawn_policy": np.zeros((4, 5), np.float32)}, "'policy' is"),
        ({"drawn_source": np.zeros(2)}, "'source' is float64"),
        ({"drawn_prompt": np.zeros(4, np.int64)}, "'prompt' is"),
        ({"rows_loss_mask": None}, "'loss_mask' is missing"),
        ({"rows_input_ids": np.full((4, 6), 300, np.int32)}, "from 300 to 300"),
        ({"step": None}, "which step"),
    ],
)
def test_a_rollout_ahead_of_another_run_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Whoever can write a checkpoint can write its checksums, too."""
    path, model = tmp_path / ROLLOUT_AHEAD.name, Llama(vocab_size=300, block_size=6)
    fields: dict[str, Any] = {name: ((6,), np.dtype(dtype)) for name, dtype in FIELDS.items()}
    for made, problem in ((ahead(), None), (ahead(**changes), named)):
        path.write_bytes(made.to_bytes())
        with contextlib.nullcontext() if problem is None else pytest.raises(StorageError, match=f"{path}.*{problem}"):
            check_ahead(Rollout.load(path), path, 4, 2, fields, model)


@pytest.mark.parametrize(("source", "prompt"), [(1, 0), (-1, 0), (0, 40), (0, -1)])
def test_a_rollout_ahead_names_prompts_of_this_run(source: int, prompt: int) -> None:
    sources = [range(40)]
    waiting = AheadOfTraining(lambda: SimpleNamespace(plan=SimpleNamespace(sources=sources)))
    assert waiting.chosen(ahead()) == [(sources[0], 0), (sources[0], 3)]
    drawn = {"drawn_source": np.array([0, source]), "drawn_prompt": np.array([0, prompt])}
    with pytest.raises(StorageError, match=f"names prompt {prompt} of source {source}"):
        waiting.chosen(ahead(**drawn))


@pytest.mark.slow
def test_a_rollout_sampled_ahead_is_dropped_when_staleness_is_given_up(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(3)]).run()
    again = launch.reopen(tmp_path / "part", {"grpo.staleness": 0}, change=True)
    again.run()
    found = [row for row in rows(tmp_path / "part") if "loss" in row]
    assert found[-1]["step"] == 7 and "staleness" not in found[-1] and found[-1]["logprob_gap_max"] < 1e-4


def test_a_reward_that_fails_in_the_thread_ends_the_run_with_its_name(settings: dict[str, Any], tmp_path: Path) -> None:
    given = settings | {"grpo.rewards": [f"{HERE}:unlucky"], "training.validation": False}
    with pytest.raises(TrainingError, match=r"the reward .*test_staleness:unlucky. failed: ValueError"):
        launch.build_trainer(None, given, name="run", root=tmp_path).run()


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("grpo.staleness=1 .* grpo.resample", {"grpo.resample": 1}),
        ("grpo.staleness=1 .* grpo.offline=logprobs", {"grpo.offline": "logprobs"}),
        ("grpo.staleness=1 .* grpo.exact", {"grpo.exact": True, "architecture.precision": "float32"}),
        ("grpo.staleness=1 .* environment", {"grpo.environment": "guess"}),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(
    match: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=match):
        launch.build_trainer(None, settings | changes, name="no", root=tmp_path)
