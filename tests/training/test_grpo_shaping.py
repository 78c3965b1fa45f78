"""The soft overlong penalty and the entropy of the policy: in a run, in its metrics, and in its saved state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.training.test_training_resume import StopAt, assert_same, rows
from tests.training.tiny_rl import grpo_settings

from bessemer.errors import InputError, Stopped
from bessemer.objectives.grpo import GrpoSettings
from bessemer.rl.rewards import OVERLONG, overlong_penalty
from bessemer.storage.files import ROLLOUT
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import launch

HERE = "tests.training.test_grpo_shaping"
TARGET, RATE, START = 9.0, 0.01, 0.02


def letters(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    prompts = [{"prompt": f"cats and dogs {n}"} for n in range(40)]
    changes = {
        "training.batch_size": 16,
        "training.steps": 4,
        "model.window": "L",
        "architecture.precision": "float32",
        "grpo.overlong_penalty": 0.5,
        "grpo.overlong_buffer": 4,
        "grpo.entropy_coef": START,
        "grpo.entropy_target": TARGET,
        "grpo.entropy_rate": RATE,
        "grpo.rewards": [f"{HERE}:letters"],
        "logging.checkpoint_interval": 1,
    }
    return grpo_settings(tmp_path_factory.mktemp("prompts"), prompts, changes)


@pytest.fixture(scope="module")
def whole(settings: dict[str, Any], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = launch.build_trainer(None, settings, name="whole", root=tmp_path_factory.mktemp("runs"))
    trainer.run()
    return trainer


def test_the_penalty_rises_over_the_buffer() -> None:
    found = overlong_penalty([1, 15, 16, 18, 19, 20], 20, 4)
    np.testing.assert_array_equal(found, [0, 0, 0, -0.5, -0.75, -1])
    assert GrpoSettings(max_completion_length=64).buffer == 13 and GrpoSettings(overlong_buffer=3).buffer == 3


@pytest.mark.slow
def test_the_penalty_is_a_reward_of_its_own(whole: Any) -> None:
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    for row in found:
        total = row[f"reward/{HERE}:letters"] + 0.5 * row[f"reward/{OVERLONG}"]
        assert row["reward"] == pytest.approx(total) and row[f"reward/{OVERLONG}"] < 0
    held = load_file(ROLLOUT.path(whole.checkpoint_manager.path(3)))
    lengths = (held["rows/target_ids"] >= 0).sum(axis=1)
    np.testing.assert_array_equal(held[f"rewards/{OVERLONG}"], overlong_penalty(lengths, 6, 4))
    shaped = held[f"rewards/{HERE}:letters"] + 0.5 * held[f"rewards/{OVERLONG}"]
    np.testing.assert_array_equal(held["rewards/reward"], shaped)


@pytest.mark.slow
def test_the_coefficient_follows_the_target_and_is_saved(whole: Any) -> None:
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    coef = START
    for row in found:
        assert row["entropy_coef"] == pytest.approx(coef, rel=1e-5)
        coef = min(max(coef + RATE * (TARGET - row["entropy"]), 0), 0.1)
    assert len({row["entropy_coef"] for row in found}) == 4 and coef > START
    assert float(whole.state.entropy_offset) == pytest.approx(coef - START, rel=1e-4)


@pytest.mark.slow
def test_a_branch_changes_the_target_and_does_not_switch_it_off(whole: Any) -> None:
    path, longer = whole.run_directory.path, {"training.steps": 6}
    again = launch.reopen(path, {"grpo.entropy_target": 1.0, **longer}, change=True)
    assert float(again.state.entropy_offset) == float(whole.state.entropy_offset)
    with pytest.raises(InputError, match="entropy_target cannot be switched off"):
        launch.reopen(path, {"grpo.entropy_target": None, **longer}, change=True)


@pytest.mark.slow
def test_stopped_and_resumed_the_coefficient_goes_on(settings: dict[str, Any], whole: Any, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(3)]).run()
    again = launch.reopen(tmp_path / "part")
    assert float(again.state.entropy_offset) != 0
    again.run()
    assert_same(again, whole)
    np.testing.assert_array_equal(np.asarray(again.state.entropy_offset), np.asarray(whole.state.entropy_offset))


@pytest.mark.long
def test_the_bonus_is_the_same_on_a_mesh_and_in_other_micro_batches(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device in one micro-batch, in four, and data 4 × fsdp 2: the same update; without the bonus another one."""
    given = settings | {"training.steps": 2, "optimization.name": "sgd", "optimization.lr": 0.1}
    given |= {"grpo.rewards": [{"name": "length_penalty", "options": {"scale": 6}}], "training.max_grad_norm": 0}
    given |= {"grpo.temperature": 0.2, "grpo.entropy_coef_max": 5}  # the entropy of a cold policy has a steep gradient
    made = {}
    for name, mesh, devices, micro, coef in (
        ("one", {}, 1, 16, 2.0),
        ("parts", {}, 1, 4, 2.0),
        ("eight", {"data": 4, "fsdp": 2}, 8, 2, 2.0),
        ("without", {}, 1, 16, 0.0),
    ):
        topology = make_topology(TopologySettings(**mesh), devices=jax.devices()[:devices])
        monkeypatch.setattr(launch, "make_topology", lambda settings, made=topology: made)
        changed = given | {"training.per_device_batch_size": micro, "grpo.entropy_coef": coef}
        if not coef:
            changed = {key: value for key, value in changed.items() if not key.startswith("grpo.entropy")}
        trainer = launch.build_trainer(None, changed, name=name, root=tmp_path)
        trainer.run()
        made[name] = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.params)]
    for name in ("parts", "eight"):
        for left, right in zip(made["one"], made[name], strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)
    apart = max(np.abs(left - right).max() for left, right in zip(made["one"], made["without"], strict=True))
    assert apart > 1e-4  # 4.8e-4: the tolerance above is a fiftieth of it


def test_what_has_no_effect_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    for match, changes in (
        ("set that too", {"grpo.overlong_penalty": 0}),
        ("grpo.overlong_buffer=7 is more than", {"grpo.overlong_buffer": 7}),
        ("an episode has several", {"grpo.environment": {"name": "guess"}}),
        ("rewards are stored", {"grpo.offline": "logprobs"}),
        ("set that too", {"grpo.entropy_target": None}),
        ("is above grpo.entropy_coef_max=0.01", {"grpo.entropy_coef_max": 0.01}),
    ):
        with pytest.raises(InputError, match=match):
            launch.build_trainer(None, settings | changes, name="no", root=tmp_path)
