"""grpo.pack: several completions per row give the loss, the gradients and the run of one completion per row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.test_training_resume import StopAt, assert_same, rows
from tests.training.tiny_rl import build, grpo_settings

from bessemer.data.rows.rows import COMPLETIONS
from bessemer.errors import InputError, Stopped
from bessemer.objectives.grpo import GrpoSettings, grpo
from bessemer.rl.rollout import completion_rows, pack_rows
from bessemer.rl.sampler import Sampler
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import launch
from bessemer.training.step import used_micro_batches

pytestmark = pytest.mark.usefixtures("on_one_device")
BLOCK = 32


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps a rollout of sixteen completions; a row has room for two or three, and a micro-batch for two rows."""
    prompts = [{"prompt": "cats" * (n % 3) + str(n), "answer": n} for n in range(40)]
    changes = {
        "training.steps": 6,
        "training.per_device_batch_size": 2,
        "architecture.precision": "float32",
        "grpo.num_iterations": 2,
        "grpo.sync_interval": 3,
        "grpo.rewards": [
            {"name": "length_penalty", "options": {"scale": 6}},
            {"name": "regex", "options": {"pattern": ".*[a-m].*"}},
        ],
        "optimization.name": "sgd",  # Adam would make a step of a rounding error
        "optimization.lr": 0.1,
        "grpo.pack": True,
    }
    return grpo_settings(tmp_path_factory.mktemp("prompts"), prompts, changes)


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = build(settings, tmp_path_factory.mktemp("runs"), "whole")
    trainer.run()
    return trainer


def completions(seed: int = 0) -> dict[str, np.ndarray]:
    """Eight completions of several lengths; one is masked, one has not a single token."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 200, n).tolist() for n in (3, 3, 8, 8, 5, 5, 1, 1)]
    texts = [rng.integers(0, 200, n).tolist() for n in (1, 6, 9, 2, 24, 4, 3, 0)]
    masks = [[float(at % 4 != 1) for at in range(len(text))] for text in texts]  # observations have no loss
    made = completion_rows(prompts, texts, masks, BLOCK, 7)
    made["loss_mask"][2] = 0  # cut, with grpo.overlong=mask
    made["advantages"][:] = rng.standard_normal((8, 1))
    made["old_logprobs"][:] = np.where(made["target_ids"] >= 0, -5 + rng.standard_normal((8, BLOCK)), 0)
    return made


def test_completions_keep_their_tokens_and_positions_and_are_counted() -> None:
    given = completions()
    given["expert_ids"] = np.where(given["segment_ids"] > 0, given["positions"], -1)[..., None, None].astype(np.int16)
    packed, wanted = pack_rows(given, given["loss_mask"] > 0), given["loss_mask"].any(axis=1)
    assert packed.used == 2 < wanted.sum() == 6
    assert packed.rows[COMPLETIONS][:, 0].sum() == 8 and (packed.rows[COMPLETIONS][packed.used :] == 0).all()
    for name, array in packed.rows.items():
        if name == COMPLETIONS:
            continue
        assert array.shape == given[name].shape and array.dtype == given[name].dtype
        for one in np.flatnonzero(wanted):
            row, start, length = packed.places[one], packed.starts[one], packed.lengths[one]
            if name == "segment_ids":
                assert len(set(array[row, start : start + length])) == 1
            else:
                np.testing.assert_array_equal(array[row, start : start + length], given[name][one, :length])
    empty = packed.rows["segment_ids"] == 0
    assert (packed.rows["input_ids"][empty] == 7).all() and (packed.rows["target_ids"][empty] == -1).all()
    assert (packed.rows["expert_ids"][empty] == -1).all() and (packed.rows["loss_mask"][empty] == 0).all()
    values = packed.unpacked(packed.rows["old_logprobs"])
    np.testing.assert_array_equal(values[wanted], given["old_logprobs"][wanted])


def test_a_rollout_without_a_wanted_completion_has_blank_rows() -> None:
    packed = pack_rows(completions(), np.zeros((8, BLOCK), bool))
    assert packed.used == 0 and packed.rows[COMPLETIONS][0, 0] == 8 and (packed.rows["target_ids"] == -1).all()


@pytest.mark.parametrize("normalization", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_loss_and_gradients_are_those_of_one_completion_per_row(normalization: str, ratio: str, whole: Any) -> None:
    given, apply = completions(), whole.model_parts.apply
    policy = GrpoSettings(normalization=normalization, ratio=ratio, kl_coef=0.1, temperature=0.8, entropy_coef=0.01)
    other = jax.tree.map(lambda x: x * 0.9, whole.state.params)

    def loss(params: Any, batch: Any) -> tuple[Any, Any]:
        total, weight, sums = grpo(apply, params, batch, None, policy, other)
        return total / weight, {**sums, "weight": weight}

    packed = pack_rows(given, given["loss_mask"] > 0)
    batch = {name: array[: packed.used] for name, array in packed.rows.items()}
    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    with whole.topology.scope():
        (one, sums), gradients = compute(whole.state.params, given)
        (two, its_sums), its_gradients = compute(whole.state.params, batch)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    for name, value in sums.items():
        np.testing.assert_allclose(value, its_sums[name], rtol=1e-5, err_msg=name)
    for left, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(its_gradients), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5 * max(1e-2, float(np.abs(left).max())))
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradients)) > 1e-3


def test_scores_are_those_of_one_completion_per_row(whole: Any) -> None:
    made = whole.sampler
    parts = {name: getattr(made, name) for name in made.__dataclass_fields__}
    with whole.topology.scope():
        one, two = (
            Sampler(**parts | {"settings": replace(made.settings, pack=pack)}).rollout(9) for pack in (False, True)
        )
    for name in ("input_ids", "target_ids", "segment_ids", "loss_mask"):
        np.testing.assert_array_equal(one.rows[name], two.rows[name])  # a rollout is stored one completion per row
    np.testing.assert_allclose(one.rows["old_logprobs"], two.rows["old_logprobs"], atol=1e-5)
    np.testing.assert_allclose(one.rows["advantages"], two.rows["advantages"], atol=1e-4)
    assert two.metrics["logprob_gap_max"] < 1e-4


def test_micro_batches_without_a_completion_are_not_computed(whole: Any) -> None:
    """Blank rows hold NaN here: one that was read would be in the loss."""
    batch = jax.tree.map(np.asarray, whole.device_part(whole.step - 1 + whole.data_offset))
    used = int(used_micro_batches(batch))
    assert 0 < used < whole.functions.accumulate_steps == len(batch["input_ids"])
    assert not batch[COMPLETIONS][used:].any()
    poisoned = batch | {"advantages": batch["advantages"].copy(), "old_logprobs": batch["old_logprobs"].copy()}
    poisoned["advantages"][used:] = poisoned["old_logprobs"][used:] = np.nan
    poisoned["loss_mask"] = batch["loss_mask"].copy()
    poisoned["loss_mask"][used:] = 1
    step = jax.jit(type(whole).train_step, static_argnums=3)
    with whole.topology.scope():
        found = [step(whole.state, one, whole.functions.key, len(batch["input_ids"])) for one in (batch, poisoned)]
    (state, loss, meta), (other, same, _) = found
    assert np.isfinite(loss) and loss == same and meta["packed_rows"] == (batch[COMPLETIONS] > 0).sum() < 8
    for left, right in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_run_is_that_of_unpacked_rows_to_rounding(whole: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    plain = build(settings, tmp_path, "plain", grpo__pack=False)
    plain.run()
    found, wanted = ([row for row in rows(made.run_directory.path) if "loss" in row] for made in (whole, plain))
    assert all(0 < row["packed_rows"] < 8 and row.get("time/mfu") is None for row in found)
    for one, two in zip(found, wanted, strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy", "clip_frac", "reward", "target_tokens", "completion_len"):
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-5), (name, one["step"])
    assert "packed_rows" not in wanted[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "staleness"), [pytest.param(3, 0, marks=pytest.mark.long), pytest.param(4, 0, marks=pytest.mark.long), (3, 1)]
)
def test_stopped_in_a_packed_rollout_and_resumed(
    k: int, staleness: int, whole: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    given = settings | {"grpo.staleness": staleness}
    if staleness:
        whole = build(given, tmp_path, "whole")
        whole.run()
    first = launch.build_trainer(None, given, name="part", root=tmp_path, callbacks=[StopAt(k)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    assert second.step == k and (second.rollout is not None) is (k != 4)
    second.run()
    assert_same(second, whole)
    with pytest.raises(InputError, match=r"grpo\.pack cannot be changed on resume"):
        launch.reopen(tmp_path / "part", ["grpo.pack=false"])


@pytest.mark.slow
def test_on_a_mesh_the_same_update(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data 4 × fsdp 2, two micro-batches: sequences are summed and blank micro-batches left out as on one device."""
    given = settings | {"training.steps": 2, "training.batch_size": 16, "grpo.group_size": 8, "grpo.mini_batches": 1}
    given |= {"objective": "gspo", "grpo.kl_coef": 0.01, "grpo.num_iterations": 2, "grpo.clip_eps": 0.2}
    made = []
    for name, mesh, devices in (("one", {}, 1), ("eight", {"data": 4, "fsdp": 2}, 8)):
        topology = make_topology(TopologySettings(**mesh), devices=jax.devices()[:devices])
        monkeypatch.setattr(launch, "make_topology", lambda settings, made=topology: made)
        made.append(build(given, tmp_path, name, training__per_device_batch_size=8 // devices))
        made[-1].run()
    one, eight = made
    np.testing.assert_array_equal(one.rollout.rows["target_ids"], eight.rollout.rows["target_ids"])
    assert one.functions.accumulate_steps == eight.functions.accumulate_steps == 2
    for left, right in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(eight.state.params), strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), atol=1e-5)


def test_what_cannot_be_packed_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    for changes, match in (
        ({"architecture__document_mask": False}, "see each other"),
        ({"grpo__exact": True}, "use one of them"),
        ({"grpo__offline": "reference"}, "stored one per row"),
    ):
        with pytest.raises(InputError, match=match):
            build(settings, tmp_path, "no", **changes)
        assert not (tmp_path / "no").exists()
