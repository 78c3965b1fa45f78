"""GRPOTrainer: rollouts from the live parameters, the same run after a stop, rewards that fail, stored completions."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tests.compilations import cache_at, counted_compilations
from tests.tiny_run import tiny_tokenizer
from tests.training.test_training_resume import StopAt, assert_same, rows
from tests.training.tiny_rl import grpo_settings

from bessemer.errors import InputError, Stopped, TrainingError
from bessemer.generate.weights import Quantizer
from bessemer.report.metrics import MetricsFile
from bessemer.rl import sampler
from bessemer.rl.prompts import end_ids
from bessemer.rl.rewards import Rewards, RewardSpec
from bessemer.storage.files import ROLLOUT
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import feed, launch

HERE = "tests.training.test_grpo"


def vowels(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    """Something that any text has more or less of, and that knows its row."""
    assert all(prompt == f"cats and dogs {right}" for prompt, right in zip(prompts, answer, strict=True))
    return [sum(letter in "aeiou " for letter in text) / 4 for text in completions]


def unlucky(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    raise ValueError("no such key")


async def later(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def huge(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [1e200 * n for n in range(len(completions))]


def narrow(prompts: Any, completions: Any, scale: float = 1.0) -> list[float]:
    return [scale] * len(completions)


def deaf(completions: Any) -> list[float]:
    return [0.0] * len(completions)


BASE = 3


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps a rollout (two passes of two parts), a reference renewed on the way, everything logged."""
    prompts = [{"prompt": f"cats and dogs {n}", "answer": n} for n in range(60)]
    changes = {
        "training.validation": True,
        "training.steps": 7,
        "training.validation_steps": 8,
        "data.val_fraction": 0.2,
        "model.window": "L",
        "grpo.num_iterations": 2,
        "grpo.sync_interval": 3,
        "grpo.rewards": [{"name": f"{HERE}:vowels"}, {"name": "length_penalty", "weight": 0.1}],
        "logging.validation_interval": 4,
    }
    return grpo_settings(tmp_path_factory.mktemp("prompts"), prompts, changes)


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = launch.build_trainer(None, settings, name="whole", root=tmp_path_factory.mktemp("runs"))
    before = feed.calls
    trainer.run()
    trainer.fetched = feed.calls - before
    return trainer


def test_rollouts_are_trained_on_and_reported(whole: Any) -> None:
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    names = {"reward", f"reward/{HERE}:vowels", "reward/length_penalty", "completion_len", "truncated"}
    assert all(names | {"kl", "clip_frac", "entropy", "logprob_gap"} <= row.keys() for row in found)
    assert found[0]["clip_frac"] == 0 and found[0]["kl"] == 0  # the policy is still the one that sampled
    assert max(row["clip_frac"] for row in found) > 0 and found[2]["kl"] > 0
    assert found[3]["kl"] < found[2]["kl"]  # the reference was renewed after step 3
    assert all(row["logprob_gap_max"] < 1e-4 for row in found)
    for row in found:  # sampler and trainer agree to rounding, so the weights that correct them are 1
        assert row["ratio_p01"] == pytest.approx(1, abs=1e-4) and row["ratio_p99"] == pytest.approx(1, abs=1e-4)
        assert row["ess"] == pytest.approx(1, abs=1e-6) and row["importance_capped"] == 0
    assert found[0]["reward"] == found[3]["reward"] != found[4]["reward"]  # a rollout lasts four steps
    assert [row["step"] for row in rows(whole.run_directory.path) if "val_reward" in row] == [0, 4, 7]
    assert all(stats["prompts"] > 0 and "PMD" not in name for name, stats in whole.data.plan.stats.items())
    trained = [row["target_tokens"] for row in found]
    assert trained[-1] == sum(np.diff(trained, prepend=0)) and trained[0] <= 8 * 6
    assert whole.sampler.engine.params is None and whole.sampler.engine._slots.rows is None  # nothing is held


def test_the_time_of_a_step_is_divided_into_its_parts(whole: Any) -> None:
    found = [row for row in MetricsFile(whole.run_directory.metrics).rows() if "loss" in row]
    parts = ("time/rollout_s", "time/reward_s", "time/score_s")
    sampled = [row for row in found if row["step"] in (1, 5)]  # a rollout lasts four steps
    for row in found:  # nothing of a step is left over
        assert row["time/train_s"] > 0
        rollout = sum(row[part] for part in parts) if row in sampled else 0.0
        seconds = row["time/step_ms"] / 1e3
        assert row["time/train_s"] + rollout == pytest.approx(seconds * (1 - row["time/data_wait_pct"] / 100))


def test_the_parts_of_a_rollout_leave_no_gap(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four readings of the clock, one at the start and one at the end of each part."""
    readings = itertools.count(10.0)
    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=lambda: next(readings)))
    with whole.topology.scope():
        found = whole.sampler.rollout(9).metrics
    parts = {name: value for name, value in found.items() if name.startswith("time/")}
    assert parts == {"time/rollout_s": 1.0, "time/reward_s": 1.0, "time/score_s": 1.0} and next(readings) == 14


def test_a_rollout_shows_how_far_it_is(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(whole, "show_progress", said.append)
    with whole.topology.scope():
        whole.sampler.rollout(9)
    rows = whole.passes.rows
    sampling = [text for text in said if text.startswith("rollout ")]
    assert sampling[0] == f"rollout 0/{rows}" and sampling[-1] == f"rollout {rows}/{rows}"
    assert said[len(sampling) :] == [f"rewards of {rows} completions", f"log-probabilities of {rows} completions"]


def test_a_rollout_of_other_prompts_compiles_nothing(whole: Any) -> None:
    with whole.topology.scope():
        whole.sampler.rollout(9)
        programs = whole.sampler.engine.compilations
        with counted_compilations() as made:
            chosen = [whole.sampler.rollout(number).rows["input_ids"] for number in (10, 11)]
    assert not np.array_equal(*chosen) and not made
    assert whole.sampler.engine.compilations == programs <= 4


@pytest.mark.slow
def test_scoring_is_compiled_ahead_from_shapes(whole: Any, tmp_path: Path) -> None:
    """What a thread compiles beside the step is what the first rollout scores with."""
    made = whole.sampler
    fresh = sampler.Sampler(**{name: getattr(made, name) for name in made.__dataclass_fields__})
    with cache_at(tmp_path) as (asked, found):
        fresh.compile_ahead(whole.functions.abstract_state.whole())
        del asked[:], found[:]
        rows = dict(whole.batch("train"))
        again = sampler.Sampler(**{name: getattr(made, name) for name in made.__dataclass_fields__})
        del asked[:], found[:]
        with whole.topology.scope():
            again.score(rows)
        assert len(asked) == len(found) > 0


def test_the_rollout_is_in_a_checkpoint_between_its_steps_only(whole: Any) -> None:
    held = {step: ROLLOUT.path(whole.checkpoint_manager.path(step)).is_file() for step in whole.checkpoints()}
    assert held == {2: True, 4: False, 6: True, 7: True}


def test_a_rollout_is_repeatable_and_cut_completions_can_be_masked(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, engine, given = whole.policy, whole.sampler.engine, []
    monkeypatch.setattr(
        engine, "update_params", lambda params, take=engine.update_params: (given.append(params), take(params))
    )
    with whole.topology.scope():
        one, two = (whole.sampler.rollout(9) for _ in range(2))
        whole.sampler.policy = replace(policy, overlong="mask")
        masked = whole.sampler.rollout(9)
    whole.sampler.policy = policy
    own = jax.tree.leaves(whole.state.params)
    assert all(mine is its for mine, its in zip(own, jax.tree.leaves(given[0]), strict=True)), "not a copy"
    for name, array in one.rows.items():
        np.testing.assert_array_equal(array, two.rows[name])
    prompts = np.where(one.rows["target_ids"] < 0, one.rows["input_ids"], 0)[:, :12].reshape(4, 4, 12)
    assert (prompts == prompts[:, :1]).all() and len(np.unique(prompts[:, 0], axis=0)) == 4
    np.testing.assert_allclose(one.rows["advantages"][:, 0].reshape(4, 4).sum(axis=1), 0, atol=1e-4)
    ends = set(end_ids(whole.tokenizer))
    cut = np.array([row[row >= 0][-1] not in ends for row in one.rows["target_ids"]])
    assert cut.any() and cut.mean() == one.metrics["truncated"]
    real = (one.rows["target_ids"] >= 0).astype(np.float32)
    np.testing.assert_array_equal(one.rows["loss_mask"], real)
    np.testing.assert_array_equal(masked.rows["loss_mask"], real * ~cut[:, None])
    assert (one.rows["old_logprobs"][real > 0] < 0).all() and (one.rows["old_logprobs"][real == 0] == 0).all()


END = 206  # a token that the untrained model often draws


def test_old_logprobs_of_the_sampler_are_those_of_the_distribution_drawn_from(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temperature, top-k and top-p are in them, and so is the end token; weights are π_old / μ, cut off at the cap."""
    monkeypatch.setattr(sampler, "end_ids", lambda tokenizer: (*end_ids(tokenizer), END))
    made = whole.sampler
    parts = {name: getattr(made, name) for name in made.__dataclass_fields__}
    parts["policy"] = replace(made.policy, temperature=0.7)
    filtered = replace(made.settings, top_k=8, top_p=0.8, old_logprobs="sampler")
    weighted = replace(filtered, old_logprobs="forward", importance_cap=1.0)
    with whole.topology.scope():
        given = sampler.Sampler(**parts | {"settings": filtered}).rollout(9)
        plain = sampler.Sampler(**parts | {"settings": replace(weighted, importance="none")}).rollout(9)
        capped = sampler.Sampler(**parts | {"settings": weighted}).rollout(9)
        logits = np.asarray(jax.jit(whole.model_parts.apply)(whole.state.params, given.rows["input_ids"]), np.float64)
    rows, real = given.rows, given.rows["target_ids"] >= 0
    wanted, model = (np.zeros(real.shape) for _ in range(2))
    for place in zip(*np.nonzero(real), strict=True):
        z, token = logits[place] / 0.7, rows["target_ids"][place]
        p = np.exp(z - z.max())
        model[place] = np.log(p[token] / p.sum())
        order = np.argsort(-p)[:8]
        kept = order[np.cumsum(p[order]) - p[order] < 0.8 * p[order].sum()]
        wanted[place] = np.log(p[token] / p[kept].sum())
        assert token in kept
    lasts = [int(row[row >= 0][-1]) for row in rows["target_ids"]]
    assert 0 < lasts.count(END) < len(lasts), "some completions end with their stop token"
    np.testing.assert_allclose(rows["old_logprobs"], wanted, atol=1e-4)
    np.testing.assert_allclose(plain.rows["old_logprobs"], model, atol=1e-4)
    np.testing.assert_array_equal(given.rows["advantages"], plain.rows["advantages"])
    ratio = np.where(real, np.minimum(np.exp(model - wanted), 1.0), 1.0)
    np.testing.assert_allclose(capped.rows["advantages"], plain.rows["advantages"] * ratio, rtol=1e-3, atol=1e-6)
    assert ratio[real].mean() < 0.9 and capped.metrics["ratio_p50"] < 0.95 and capped.metrics["logprob_gap_max"] < 1e-4


def test_a_quantized_sampler_is_measured_and_corrected_as_what_it_is(whole: Any) -> None:
    """With generate.weights=fp8 the recorded log-probabilities are those of the quantized weights, which drew the text;
    the gap to the trainer and the importance weights follow from them. Drafts change nothing."""
    made = whole.sampler
    parts = {name: getattr(made, name) for name in made.__dataclass_fields__}

    def rolled(**options: Any) -> Any:
        sampled = sampler.Sampler(**parts | {"settings": replace(made.settings, **options)})
        return sampled.rollout(9)

    eight = {"sampling_weights": "fp8", "importance_cap": 1.0}
    model = whole.model_parts.model
    with whole.topology.scope():
        given = rolled(**eight, old_logprobs="sampler", speculate="ngram", draft=2)
        plain, capped = rolled(**eight, importance="none"), rolled(**eight)
        trees = (Quantizer(model, "fp8")(whole.state.params), whole.state.params)
        call = jax.jit(lambda params, ids: jax.nn.log_softmax(model.apply({"params": params}, ids)))
        own, trained = (np.asarray(call(tree, given.rows["input_ids"]), np.float64) for tree in trees)
    targets = given.rows["target_ids"]
    real = targets >= 0
    own, trained = (np.take_along_axis(x, targets[..., None], -1)[..., 0] * real for x in (own, trained))
    np.testing.assert_allclose(given.rows["old_logprobs"], own, atol=1e-4)
    np.testing.assert_allclose(plain.rows["old_logprobs"], trained, atol=1e-4)
    for name in ("input_ids", "target_ids"):
        np.testing.assert_array_equal(given.rows[name], plain.rows[name])
    ratio = np.where(real, np.minimum(np.exp(trained - own), 1.0), 1.0)
    np.testing.assert_allclose(capped.rows["advantages"], plain.rows["advantages"] * ratio, rtol=1e-3, atol=1e-6)
    gap = np.abs(trained - own)[real]
    assert capped.metrics["logprob_gap"] == pytest.approx(gap.mean(), abs=1e-4)
    assert gap.mean() > 10 * whole.rollout.metrics["logprob_gap"]
    assert given.metrics["tokens_per_pass"] >= 1 and "tokens_per_pass" not in plain.metrics


@pytest.mark.parametrize("setting", ["generate.speculate=ngram", "generate.weights=fp8"])
def test_resume_refuses_another_way_to_sample(setting: str, whole: Any) -> None:
    with pytest.raises(InputError, match=rf"{setting.split('=')[0]} cannot be changed on resume.*add --change"):
        launch.reopen(whole.run_directory.path, [setting])


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, pytest.param(5, marks=pytest.mark.long)])
def test_stopped_in_the_middle_of_a_rollout_and_resumed(
    k: int, settings: dict[str, Any], whole: Any, tmp_path: Path
) -> None:
    first = launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(k)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    assert second.step == k and (second.rollout is not None) is (k % 4 != 0)
    second.run()
    assert_same(second, whole)


@pytest.mark.slow
def test_a_run_that_drafts_with_8_bit_weights_resumes_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    given = settings | {"generate.speculate": "ngram", "generate.weights": "fp8", "generate.draft": 2}
    given |= {"training.steps": 6, "grpo.sync_interval": 0}
    given |= {"grpo.temperature": 0.05, "grpo.max_completion_length": 12}  # the second rollout repeats itself
    one = launch.build_trainer(None, given, name="one", root=tmp_path)
    one.run()
    first = launch.build_trainer(None, given, name="part", root=tmp_path, callbacks=[StopAt(3)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, one)
    logged = [row for row in rows(one.run_directory.path) if "tokens_per_pass" in row]
    assert len(logged) == 6 and 1 < logged[-1]["tokens_per_pass"] <= 3
    assert logged[-1]["logprob_gap"] > 1e-4, "a fresh model's blocks add nothing; those of the second rollout do"


def test_what_cannot_work_is_said_before_anything_is_written(settings: dict[str, Any], tmp_path: Path) -> None:
    def refused(match: str, **changes: Any) -> None:
        given = settings | {key.replace("__", "."): value for key, value in changes.items()}
        with pytest.raises(InputError, match=match):
            launch.build_trainer(None, given, name="no", root=tmp_path)
        assert not (tmp_path / "no").exists()

    refused("whole number of groups", grpo__group_size=3)
    refused("nothing to compare", grpo__group_size=1)
    refused("set grpo.scale=false", grpo__baseline="rollout")
    refused("do not fit into", grpo__max_prompt_length=30)
    refused("needs pattern", grpo__rewards=["regex"])
    refused("is a setting of objective", objective="pretrain")
    refused("longer than 2 tokens", grpo__max_prompt_length=2)
    refused("this rollout is one completion", **ONE)
    refused("shortest attention window holds", generate__speculate="ngram", generate__draft=64)
    refused("nothing to quantize", generate__weights="int8", lora__rank=2, lora__quantize="int8")
    refused("at most 1000000.0, got", grpo__reward_timeout=1e12)


ONE: dict[str, Any] = {
    "grpo__group_size": 1,
    "grpo__baseline": "rollout",
    "grpo__scale": False,
    "grpo__mini_batches": 1,
    "training__batch_size": 1,
    "training__per_device_batch_size": 1,
}


@pytest.mark.parametrize(
    ("match", "reward"),
    [
        ("'test_grpo:BASE' is int, not a function", f"{__file__}:BASE"),
        ("asynchronous", f"{__file__}:later"),
        ("unexpected keyword argument 'scal'", {"name": f"{__file__}:narrow", "options": {"scal": 2}}),
        ("option 'prompts', which is passed", {"name": f"{__file__}:unlucky", "options": {"prompts": 2}}),
        ("unexpected keyword argument 'prompts'", f"{__file__}:deaf"),
        ("weight of the reward .* is inf", {"name": f"{__file__}:unlucky", "weight": float("inf")}),
        ("not a regular expression", {"name": "regex", "options": {"pattern": "(("}}),
        ("must be a text", {"name": "regex", "options": {"pattern": 3}}),
        ("'scale' is 0; it must be above 0", {"name": "length_penalty", "options": {"scale": 0}}),
        (r"prompts.jsonl row 3: the gsm8k reward found no number in the answer 'none'", "gsm8k"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_before_anything_is_written(
    match: str, reward: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": "say", "answer": "none" if n == 2 else n}) + "\n" for n in range(30)))
    given = settings | {"grpo.rewards": [reward], "training.dataset": str(data)}
    with pytest.raises(InputError, match=match):
        launch.build_trainer(None, given, name="no", root=tmp_path)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("grpo.max_turns", {"grpo.max_turns": 3}),
        ("grpo.reward_timeout", {"grpo.reward_timeout": 3.0, "grpo.environment": "guess", "grpo.rewards": None}),
        ("grpo.clip_eps_high", {"grpo.clip_eps_high": 0.3, "grpo.clip_eps": 0.0}),
        ("grpo.kl_estimator", {"grpo.kl_estimator": "k3", "grpo.kl_coef": 0.0}),
        ("grpo.sync_interval", {"grpo.kl_coef": 0.0}),
        ("grpo.top_k", {"grpo.top_k": 300}),
    ],
)
def test_a_setting_without_an_effect_is_named(
    key: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.build_trainer(None, settings | changes, name="noted", root=tmp_path)
    assert f"note: {key} has no effect" in capsys.readouterr().out


def test_few_prompts_without_held_out_ones_are_said(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"prompt": f"say {n}", "answer": "a"}) + "\n" for n in range(3)))
    given = settings | {"training.dataset": str(few), "data.val_fraction": 0.001}
    assert not launch.build_trainer(None, given, name="few", root=tmp_path).validates
    assert "no prompt is held out (data.val_fraction=0.001" in capsys.readouterr().out


def test_a_reward_that_fails_ends_the_run_with_its_name(settings: dict[str, Any], tmp_path: Path) -> None:
    given = settings | {"grpo.rewards": [f"{HERE}:unlucky"], "training.validation": False}
    trainer = launch.build_trainer(None, given, name="unlucky", root=tmp_path)
    with pytest.raises(TrainingError, match="unlucky' failed: ValueError: no such key"):
        trainer.run()
    assert trainer.run_directory.read_status()["exit_code"] == 3
    with pytest.raises(InputError, match="--trust"):  # code is not imported for a run from elsewhere
        (trainer.run_directory.path / "origin.json").unlink()
        launch.reopen(trainer.run_directory.path)


def test_a_reward_beyond_32_bits_ends_the_run(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided by a deviation that overflows it would be an advantage of 0, and otherwise a loss of NaN."""
    monkeypatch.setattr(whole.sampler, "rewards", Rewards([RewardSpec(f"{HERE}:huge")]))
    with whole.topology.scope(), pytest.raises(TrainingError, match=r"has a reward of 1\.5e\+201"):
        whole.sampler.rollout(9)


@pytest.mark.slow
def test_on_a_mesh_the_same_completions_and_the_same_update(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """data 4 × fsdp 2: the engine samples from the sharded parameters as they are."""
    given = settings | {"training.steps": 2, "training.validation": False, "architecture.precision": "float32"}
    given |= {"grpo.group_size": 8, "training.batch_size": 16, "grpo.mini_batches": 1}
    given |= {"optimization.name": "sgd", "optimization.lr": 0.1}  # Adam would make a step of a rounding error
    made = []
    for name, mesh, devices in (("one", {}, 1), ("eight", {"data": 4, "fsdp": 2}, 8)):
        topology = make_topology(TopologySettings(**mesh), devices=jax.devices()[:devices])
        monkeypatch.setattr(launch, "make_topology", lambda settings, made=topology: made)
        given["training.per_device_batch_size"] = 16 // devices
        trainer = launch.build_trainer(None, given, name=name, root=tmp_path)
        trainer.run()
        made.append(trainer)
    one, eight = made
    np.testing.assert_array_equal(one.rollout.rows["target_ids"], eight.rollout.rows["target_ids"])
    for left, right in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(eight.state.params), strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), atol=1e-5)


def stored(path: Path, logprobs: bool) -> str:
    lines = []
    for n in range(12):
        completions = ["a cat", "dogs", "the rain", "grey"]
        row: dict[str, Any] = {"prompt": f"say {n}", "completions": completions, "rewards": [1, 0, 0.5, n]}
        if logprobs:
            tokenizer = tiny_tokenizer()
            row["logprobs"] = [[-2.0] * (len(tokenizer.encode(text)) + 1) for text in completions]
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return str(path)


def test_stored_completions_are_batches_of_the_step(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings | {"grpo.offline": "logprobs", "grpo.mini_batches": 1, "grpo.num_iterations": 1}
    given["training.dataset"] = stored(tmp_path / "with.jsonl", True)
    trainer = launch.build_trainer(None, given, name="stored", root=tmp_path)
    assert "note: grpo.rewards has no effect with grpo.offline: rewards are stored" in capsys.readouterr().out
    batch = trainer.batch()
    assert batch["old_logprobs"].shape == (8, 32) and not trainer.validates
    assert (batch["old_logprobs"][batch["loss_mask"] > 0] == -2).all()
    groups = batch["advantages"].max(axis=1).reshape(2, 4)
    np.testing.assert_allclose(groups.sum(axis=1), 0, atol=1e-5)
    halves = [trainer.data.plan.batch(0, part)["input_ids"] for part in (slice(0, 3), slice(3, 8))]
    np.testing.assert_array_equal(np.concatenate(halves), batch["input_ids"])
    for name, line, says in (
        ("short", {"prompt": "a", "completions": ["b"], "rewards": [1]}, "'completions' needs grpo.group_size=4"),
        ("plain", {"prompt": "a", "completions": ["b"] * 4, "rewards": [1] * 4}, "no 'logprobs'"),
        ("nan", {"prompt": "a", "completions": ["b"] * 4, "rewards": [1, 2, 3, None]}, "one finite number each"),
        ("ids", {"prompt": "a", "completions": [[1, 300]] * 4, "rewards": [1] * 4}, "outside the tokenizer"),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(InputError, match=says):
            wrong = given | {"training.dataset": str(tmp_path / f"{name}.jsonl")}
            launch.build_trainer(None, wrong, name=name, root=tmp_path)


@pytest.mark.slow
def test_stored_completions_without_logprobs_train_against_the_reference(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    given = settings | {"grpo.offline": "reference", "training.dataset": stored(tmp_path / "s.jsonl", False)}
    trainer = launch.build_trainer(None, given, name="stored", root=tmp_path)
    trainer.run()
    found = [row for row in rows(trainer.run_directory.path) if "loss" in row]
    assert found[0]["clip_frac"] == 0 and found[2]["kl"] > 0 and {"reward", "completion_len"} <= found[0].keys()
    assert found[3]["kl"] < found[2]["kl"]  # renewed after step 3
