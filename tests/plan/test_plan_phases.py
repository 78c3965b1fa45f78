"""Plans of jobs of phases: every phase is planned with the model that the one before will give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from click.testing import CliRunner

from bessemer.cli.plan import command
from bessemer.config import recipe_names, resolve
from bessemer.errors import InputError
from bessemer.plan import trainer as planning
from bessemer.plan.trainer import planned_phases, planned_trainer
from bessemer.topology import make_topology
from bessemer.training.setup.schema import schema_of


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))


def test_every_phase_has_the_model_of_the_first() -> None:
    phases = planned_phases("speedrun-gpu", ["phases.pretrain.model.depth=2", "phases.sft.training.steps=7"])
    assert [phase.name for phase in phases] == ["pretrain", "sft", "grpo"]
    made: list[Any] = [planned_trainer(phase.recipe, phase.overrides, compiles=False) for phase in phases]
    assert {trainer.plan.model.model.depth for trainer in made} == {2}
    assert {trainer.plan.model.model.vocab_size for trainer in made} == {16_384}
    assert [trainer.settings.block_size for trainer in made] == [1024, 512, 512]
    assert [trainer.settings.objective for trainer in made] == ["pretrain", "sft", "grpo"]
    assert made[1].plan.data.steps == 7 and made[2].config["init"] is None


def test_a_phase_that_is_left_out_and_settings_of_the_job_are_planned() -> None:
    phases = planned_phases("speedrun-gpu", ["phases.sft=null", "seed=3"])
    assert [phase.name for phase in phases] == ["pretrain", "grpo"] and all("seed=3" in one.overrides for one in phases)
    assert planned_phases("quickstart") == []


def test_a_mistake_in_a_phase_is_an_error() -> None:
    with pytest.raises(InputError, match="stepz"):
        planned_phases("speedrun-gpu", ["phases.grpo.training.stepz=3"])


def test_the_command_shows_one_plan_per_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = CliRunner().invoke(command, ["demo", "phases.grpo=null", "--no-compile", "--json"])
    assert asked.exit_code == 0, asked.output
    plan = json.loads(asked.stdout)
    assert list(plan["phases"]) == ["pretrain", "sft"] and plan["recipe"] == "demo"
    for name, one in plan["phases"].items():
        assert one["recipe"] == f"demo, phase {name}" and one["plot"] == f"plots/plan-demo-{name}.png"
        assert Path(one["plot"]).is_file() and one["model"]["depth"] == 2


def test_old_names_do_not_hide_a_recipe() -> None:
    assert {"demo", "demo-gpu", "speedrun-gpu"} <= set(recipe_names()) and "speedrun" not in recipe_names()
    assert resolve(schema_of, "speedrun").values == resolve(schema_of, "demo").values
    grpo = resolve(schema_of, "speedrun-gpu", allow_open=True)["phases"]["grpo"]
    assert grpo["grpo"]["rewards"] == ["gsm8k"]
