"""grpo.router_replay: what the sampler's routers chose is recorded, saved with the rollout, and trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from tests.faults.harness import HOLDING, assert_resumes, call, finish, hold, steps_saved, train, until
from tests.training.test_training_resume import StopAt, assert_same, rows
from tests.training.tiny_rl import grpo_settings

from bessemer.errors import InputError, Stopped
from bessemer.generate import Engine, Request, SamplingOptions
from bessemer.models.llama import Llama
from bessemer.models.moe import EXPERT_IDS, ROUTING, recorded
from bessemer.rl import sampler
from bessemer.rl.prompts import end_ids
from bessemer.rl.rollout import Rollout, fit_routes
from bessemer.storage.files import ROLLOUT
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import launch

WORLDS = Path(__file__).with_name("worlds.py")
LAYERS, ACTIVE = 2, 2


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps a rollout, prompts of several lengths, a llama with experts in both layers."""
    prompts = [{"prompt": "cats and dogs " * (n % 3) + str(n), "number": n} for n in range(40)]
    changes = {
        "training.steps": 6,
        "model.family": "llama",
        "model.depth": LAYERS,
        "model.experts": 6,
        "model.experts_active": ACTIVE,
        "model.expert_width": 16,
        "architecture.block_size": 48,
        "grpo.num_iterations": 2,
        "grpo.sync_interval": 3,
        "grpo.rewards": [
            {"name": "length_penalty", "options": {"scale": 6}},
            {"name": "regex", "options": {"pattern": ".*[a-m].*"}},
        ],
        "optimization.lr": 0.02,
    }
    return grpo_settings(tmp_path_factory.mktemp("prompts"), prompts, changes)


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = launch.build_trainer(None, settings, name="whole", root=tmp_path_factory.mktemp("runs"))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def everything(settings: dict[str, Any]) -> dict[str, Any]:
    """Sampled one rollout ahead, prompts by pass rate, packed, with a penalty and a target for the entropy."""
    return settings | {
        "model.depth": 1,
        "grpo.staleness": 1,
        "grpo.pack": True,
        "grpo.curriculum": "pass_rate",
        "grpo.pass_rate_low": -0.5,
        "grpo.pass_rate_high": 0.3,
        "grpo.overlong_penalty": 0.5,
        "grpo.entropy_target": 2.0,
        "logging.checkpoint_interval": 1,
    }


@pytest.mark.slow
def test_stopped_with_every_part_of_a_rollout_and_resumed(everything: dict[str, Any], tmp_path: Path) -> None:
    """At step 3 of 6, with four steps per rollout: one rollout is in use, one is sampled ahead, rates are measured. A
    branch without the replay of experts then trains on what was sampled with it, by its own routers."""
    whole = launch.build_trainer(None, everything, name="whole", root=tmp_path)
    whole.run()
    with pytest.raises(Stopped):
        launch.build_trainer(None, everything, name="part", root=tmp_path, callbacks=[StopAt(3)]).run()
    again = launch.reopen(tmp_path / "part")
    assert again.step == 3 and again.rollout is not None and again.ahead is not None and again.ahead.next is not None
    assert EXPERT_IDS in again.rollout.rows and EXPERT_IDS in again.ahead.next.rollout.rows
    again.run()
    assert_same(again, whole)
    for replayed in (False, True):
        branch = launch.reopen(tmp_path / "part", {"grpo.router_replay": replayed}, step=3, change=True)
        assert (EXPERT_IDS in branch.ahead.next.rollout.rows) == replayed
        branch.run()
        last = rows(tmp_path / "part")[-1]
        assert last["step"] == 6 and np.isfinite(last.get("loss", 0.0))


def another(whole: Any, **changes: Any) -> sampler.Sampler:
    """The run's sampler with other settings."""
    parts = {name: getattr(whole.sampler, name) for name in whole.sampler.__dataclass_fields__}
    return sampler.Sampler(**parts | {"settings": replace(whole.settings, **changes)})


def assert_covered(made: Rollout) -> np.ndarray:
    """Every input of a row has recorded experts, and no padding has; return EXPERT_IDS."""
    routes, inputs = made.rows[EXPERT_IDS], made.rows["segment_ids"] > 0
    assert routes.shape == (*inputs.shape, LAYERS, ACTIVE) and routes.dtype == np.int16
    assert ((routes >= 0) == inputs[..., None, None]).all() and routes.max() < 6
    assert (routes[..., 0] != routes[..., 1])[inputs].all()
    return routes


def own_choices(whole: Any, made: Rollout) -> np.ndarray:
    """What a pass over whole rows chooses by itself, (N, T, layers, k)."""
    model, ids = whole.model, made.rows["input_ids"]

    @jax.jit
    def choose(params: Any, ids: Any) -> Any:
        cache = model.init_cache(*ids.shape)
        return recorded(model.apply({"params": params}, ids, cache, method="decode", mutable=[ROUTING])[1])

    return np.asarray(choose(whole.state.params, ids))


def test_drafts_record_no_experts_and_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"router_replay.*generate.speculate=none"):
        launch.build_trainer(None, settings | {"generate.speculate": "ngram"}, name="drafts", root=tmp_path)
    assert not (tmp_path / "drafts").exists()


@pytest.mark.slow
def test_groups_that_replace_flat_ones_bring_their_experts(whole: Any) -> None:
    with whole.topology.scope():
        made = another(whole, resample=2).rollout(3)
    assert made.metrics["resample/drawn"] >= len(made.rows["input_ids"]) // whole.settings.group_size
    assert_covered(made)
    assert made.metrics["routed_apart"] == 0


@pytest.mark.slow
def test_what_is_replayed_is_what_the_sampler_chose(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts that a group shares and were padded, for completions that ended and such that were cut."""
    monkeypatch.setattr(sampler, "end_ids", lambda tokenizer: (*end_ids(tokenizer), *range(100, 112)))
    with whole.topology.scope():
        made, plain = another(whole).rollout(9), another(whole, router_replay=False).rollout(9)
        again = another(whole, router_replay=False)
        moved = {**made.rows, EXPERT_IDS: np.where(made.rows[EXPERT_IDS] < 0, -1, (made.rows[EXPERT_IDS] + 2) % 6)}
        wrong = whole.sampler.score(moved)[0]
        assert not again.routes and EXPERT_IDS not in plain.rows and "routed_apart" not in plain.metrics
    routes, inputs = assert_covered(made), made.rows["segment_ids"] > 0
    assert 0.1 < made.metrics["truncated"] < 0.9 and len(set(inputs.sum(axis=1))) > 3
    np.testing.assert_array_equal(np.sort(routes, -1)[inputs], np.sort(own_choices(whole, made), -1)[inputs])
    assert made.metrics["routed_apart"] == 0  # float32 on a CPU: both choose alike
    for name, array in plain.rows.items():
        np.testing.assert_array_equal(array, made.rows[name])
    real = made.rows["target_ids"] >= 0
    assert np.abs(wrong - made.rows["old_logprobs"])[real].mean() > 0.01  # they are used


@pytest.mark.slow
def test_the_training_pass_replays(whole: Any) -> None:
    """Gradients change with the recorded experts; a reference goes by its own router."""
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    assert all(row["routed_apart"] == 0 and row["logprob_gap_max"] < 1e-4 for row in found)
    assert found[0]["kl"] < 1e-10 and found[0]["clip_frac"] == 0
    part = dict(whole.passes.take(whole.rollout, 0))
    part[EXPERT_IDS] = np.where(part[EXPERT_IDS] < 0, -1, (part[EXPERT_IDS] + 2) % 6)
    micro = {name: array[:4] for name, array in part.items()}
    with whole.topology.scope():

        @jax.jit
        def loss(batch: Any) -> Any:
            total, _, sums = whole.state.objective(whole.state.params, batch, None)
            return total, sums["kl"]

        own = {name: array for name, array in micro.items() if name != EXPERT_IDS}
        replayed, by_itself = loss(micro), loss(own)
    assert abs(replayed[0] - by_itself[0]) > 1e-3 and replayed[1] != by_itself[1]


@pytest.mark.slow
def test_the_saved_rollout_has_the_choices_and_one_without_is_trained_with(whole: Any, tmp_path: Path) -> None:
    path = ROLLOUT.path(whole.checkpoint_manager.path(2))
    saved = Rollout.load(path)
    assert_covered(saved)
    del saved.rows[EXPERT_IDS]  # a checkpoint of before the setting
    (tmp_path / ROLLOUT.name).write_bytes(saved.to_bytes())
    whole.rollout, kept = Rollout.load(tmp_path / ROLLOUT.name), whole.rollout
    fit_routes(whole.rollout.rows, whole.route_fields)
    assert (whole.rollout.rows[EXPERT_IDS] == -1).all() and whole.batch(step=3)[EXPERT_IDS].shape[1:] == (48, 2, 2)
    whole.rollout = kept


@pytest.mark.slow
def test_the_engine_records_through_rounds_buckets_and_slots() -> None:
    """More samples than slots, prompts of several widths, one of a single token: as one row alone."""
    model = Llama(
        depth=2, width=32, head_dim=16, vocab_size=80, block_size=64, experts=6, experts_active=2, expert_width=8
    )
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32)))["params"]
    prompts = [(5,), tuple(range(3, 12)), tuple(range(40, 75)), (7, 8)]
    options = {"capacity": 64, "end_ids": [9], "steps": 4, "routes": True}

    def run(slots: int) -> list[Any]:
        engine = Engine(model, params, slots=slots, **options)
        asked = [Request(p, 9, SamplingOptions(1.0), n=3, seed=3) for p in prompts]
        return engine.generate(asked)

    few, many = run(5), run(16)
    for one, other in zip(few, many, strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a == b and a.routes.shape == (len(one.prompt_ids) + len(a.ids) - 1, LAYERS, ACTIVE)
            np.testing.assert_array_equal(a.routes, b.routes)
    assert Engine(model, params, slots=2, capacity=64).generate([Request((5, 6), 2)])[0].samples[0].routes is None


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, pytest.param(5, marks=pytest.mark.long)])
def test_stopped_in_the_middle_of_a_rollout_and_resumed(
    k: int, settings: dict[str, Any], whole: Any, tmp_path: Path
) -> None:
    first = launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(k)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    assert second.step == k and EXPERT_IDS in second.rollout.rows
    second.run()
    assert_same(second, whole)


@pytest.mark.long
def test_killed_between_two_steps_of_a_rollout(settings: dict[str, Any], tmp_path: Path, home: Path) -> None:
    given = settings | {"logging.checkpoint_interval": 1, "training.validation": "false"}
    given["grpo.rewards"] = "[{name: length_penalty, options: {scale: 6}}]"
    del given["logging.preview_interval"]  # the comparison reads previews
    whole, run = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    code, output = call(home, *train(given, whole))
    assert code == 0, output
    process = hold(home, "step 3", tmp_path / "hold", *train(given | HOLDING, run))
    assert until(process, lambda: steps_saved(run) >= 2)
    process.kill()
    finish(process)
    assert process.returncode == -9
    assert_resumes(run, whole, home)


@pytest.mark.long
def test_turns_keep_their_experts_and_observations_have_those_of_prefill(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    given = {name: value for name, value in settings.items() if name != "grpo.rewards"}
    given |= {"grpo.environment": {"name": f"{WORLDS}:Relay"}, "architecture.block_size": 96, "training.steps": 1}
    trainer = launch.build_trainer(None, given, name="episodes", root=tmp_path)
    trainer.run()
    made = trainer.rollout
    routes, inputs = assert_covered(made), made.rows["segment_ids"] > 0
    observed = (made.rows["target_ids"] < 0) & inputs
    assert observed.sum() > made.rows["target_ids"].shape[0] * 10 and made.metrics["env/turns"] == 3
    assert made.metrics["routed_apart"] == 0 and routes.shape[0] == 16


@pytest.mark.long
def test_on_a_mesh_the_same_choices_and_the_same_update(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings | {"training.steps": 2, "architecture.precision": "float32", "grpo.mini_batches": 1}
    given |= {"grpo.group_size": 8, "training.batch_size": 16, "optimization.name": "sgd", "optimization.lr": 0.1}
    made = []
    for name, mesh, devices in (("one", {}, 1), ("eight", {"data": 2, "fsdp": 2, "expert": 2}, 8)):
        topology = make_topology(TopologySettings(**mesh), devices=jax.devices()[:devices])
        monkeypatch.setattr(launch, "make_topology", lambda settings, made=topology: made)
        trainer = launch.build_trainer(
            None, given | {"training.per_device_batch_size": 16 // devices}, name=name, root=tmp_path
        )
        trainer.run()
        made.append(trainer)
    one, eight = made
    for name in ("target_ids", EXPERT_IDS):
        np.testing.assert_array_equal(one.rollout.rows[name], eight.rollout.rows[name])
    for left, right in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(eight.state.params), strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), atol=1e-5)
