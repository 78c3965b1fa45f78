"""A plan says what training would do: the dial's check values, the same derived numbers, memory, time, curves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bessemer.config import resolve
from bessemer.errors import InputError
from bessemer.optim import build_optimizer
from bessemer.plan import make_plan, render, sample_curves, write_curves
from bessemer.plan import trainer as planning
from bessemer.plan.document import BLOCKS, sparkline
from bessemer.plan.trainer import VOCABULARY, planned_trainer
from bessemer.registry import schedules
from bessemer.training import launch
from bessemer.training.output import write_setup
from bessemer.training.setup.microbatch import StepMemory
from bessemer.training.setup.schema import schema_of

PNG = b"\x89PNG\r\n"


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.topology import make_topology

    for room in (planning, launch):
        monkeypatch.setattr(room, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))


@pytest.mark.slow
def test_depth_12_through_the_command_line(
    cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """One JSON document, the check values, a picture, and no run; the dataset is left open by the recipe."""
    words = ("plan", "pretrain", "model.depth=12", "--no-compile")
    result = cli(*words, "--json", "--plot", "p/curves.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["model"]["width"] == 768 and plan["model"]["vocab_size"] == 32_768
    assert plan["model"]["parameters"]["scaling"] == 110_100_480
    assert plan["model"]["parameters"]["total"] == 286_261_730
    assert plan["horizon"]["batch_tokens"] == 2**19 and plan["horizon"]["steps"] == 2205
    assert plan["horizon"]["tokens_per_scaling_parameter"] == pytest.approx(10.5, rel=1e-3)
    assert plan["flops"]["total"] == plan["flops"]["per_token"] * plan["horizon"]["tokens"]
    assert "not trained yet" in plan["derived"]["model.vocab_size"]["reason"]
    assert all(entry["reason"] for entry in plan["derived"].values())
    assert plan["derived"]["model.width"] == {
        "value": 768,
        "reason": "depth 12 · aspect 64, up to a multiple of head_dim 128",
    }
    assert plan["derived"]["model.heads"]["value"] == 6
    rates = {row["group"]: row for row in plan["optimizer"]["groups"]}
    assert rates["matrix"]["lr"] == 0.02 and rates["matrix"]["weight_decay"] == pytest.approx(0.2, rel=1e-3)
    assert plan["memory"] is None and plan["time"]["bound"] is True and plan["time"]["seconds"] > 0
    assert plan["plot"] == "p/curves.png" and (tmp_path / "p/curves.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]
    text = render(plan)
    assert "110,100,480" in text and "286,261,730" in text and "524,288" in text and BLOCKS[-1] in text


@pytest.mark.parametrize(
    ("depth", "width", "scaling", "batch"), [(20, 1280, 435_159_040, 2**20), (24, 1536, 729_808_896, 2**20)]
)
def test_deeper_check_values(depth: int, width: int, scaling: int, batch: int) -> None:
    trainer: Any = planned_trainer("pretrain", [f"model.depth={depth}"], compiles=False)
    assert trainer.model.shape.width == width
    assert trainer.model_parts.counts["scaling"] == scaling
    assert trainer.tokens_per_step == batch


def test_the_same_numbers_as_training(tiny: dict[str, object], tmp_path: Path) -> None:
    """What train writes to derived.json is what plan showed, before the data was prepared and after."""
    settings = {
        **tiny,
        "data.root": str(tmp_path / "store"),
        "training.batch_tokens": -1,
        "training.tokens": 2_000_000,
        "model.vocab_size": 320,
    }
    for key in ("training.batch_size", "training.steps", "training.per_device_batch_size"):
        del settings[key]
    settings["training.batch_tokens"] = -1
    before = planned_trainer({"objective": "pretrain"}, settings, compiles=False)
    assert before.tokenizer is None and not (tmp_path / "store").exists()
    trained = launch.build_trainer({"objective": "pretrain"}, settings, name="a", root=tmp_path / "runs")
    after: Any = planned_trainer({"objective": "pretrain"}, settings)
    assert trained.derived == after.derived == before.derived | trained.derived
    assert trained.steps == before.steps == after.steps
    assert after.epochs == pytest.approx(trained.data.plan.epoch(trained.steps))
    assert trained.config["optimization/weight_decay"] == after.config["optimization/weight_decay"]


def test_a_mixture_is_accepted_or_refused_as_by_training(tiny: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(corpus.read_bytes())

    def both(mixture: list[Any]) -> list[Any]:
        settings = {**tiny, "training.dataset": [mixture], "training.per_device_batch_size": 1}
        planned = planned_trainer("quickstart", settings, compiles=False)
        return [planned, launch.build_trainer("quickstart", settings, name="a", root=tmp_path / "runs")]

    for trainer in both([{"name": str(corpus), "rate": 2}, str(other)]):
        shares = trainer.derived["training.dataset shares"]
        assert shares == {"value": f"66.7% {corpus}, 33.3% {other}", "reason": "rates 2 : 1"}
    for wrong, message in (
        ([{"name": str(corpus), "rate": 0}, str(other)], "rates are above 0"),
        ([str(corpus), str(corpus)], "appears twice"),
    ):
        for build in (planned_trainer, launch.build_trainer):
            with pytest.raises(InputError, match=message):
                build("quickstart", {**tiny, "training.dataset": [wrong]})


def dialled(*words: str) -> Any:
    small = ("model.depth=2", "model.vocab_size=512", "training.per_device_batch_size=1")
    return planned_trainer("pretrain", [*small, *words], compiles=False)


def test_a_ratio_is_above_0_or_the_presets() -> None:
    with pytest.raises(InputError, match=r"training\.ratio.*above 0, or -1, got -5"):
        dialled("training.ratio=-5")


def test_the_dial_moves_what_the_optimizer_has() -> None:
    """Ratio and decay are the preset's; an optimizer with one rate has that rate scaled; what is given stays."""
    classic, july = dialled(), dialled("optimization.preset=july2026")
    for trainer, ratio, decay in ((classic, 10.5, 0.2), (july, 12.0, 0.28)):
        assert trainer.config["training/ratio"] == ratio
        assert trainer.derived["reference tokens"]["reason"].startswith(f"{ratio:g} · ")
        assert trainer.derived["training.steps"]["reason"].startswith(f"training.ratio: {ratio:g} · ")
        assert trainer.derived["optimization.weight_decay"]["reason"].startswith(f"{decay:g} · ")
        rows = {row.group: row for row in groups_of(trainer)}
        assert rows["matrix"].decay == trainer.derived["optimization.weight_decay"]["value"]
        assert rows["matrix"].lr == 0.02 * trainer.derived["optimization.lr_multiplier"]["value"]
    multiplier = classic.config["optimization/lr_multiplier"]
    assert multiplier == (2**18 / 2**19) ** 0.5
    adamw = dialled("optimization.name=adamw")
    assert adamw.derived["optimization.lr"]["value"] == groups_of(adamw)[0].lr == 3e-4 * multiplier
    assert "optimization.lr_multiplier" not in adamw.derived
    given = dialled("optimization.lr_multiplier=0.5")
    assert given.config["optimization/lr_multiplier"] == 0.5
    assert given.derived["optimization.lr_multiplier"]["reason"].startswith("given, in place of 0.7071 = √")
    assert given.config["optimization/weight_decay"] == classic.config["optimization/weight_decay"]
    rate = dialled("optimization.name=adamw", "optimization.lr=0.002")
    assert groups_of(rate)[0].lr == 0.002 and "given" in rate.derived["optimization.lr"]["reason"]


@pytest.mark.parametrize("horizon", ["training.ratio=-1", "training.ratio=20", "training.steps=100"])
def test_rates_and_decay_follow_a_given_batch(horizon: str) -> None:
    """As nanochat's do: √(B/2^19) for the rates, times D_ref/D for the decay. A given multiplier turns that off."""
    derived = dialled(horizon)
    tokens = derived.tokens_per_step
    for batch in (8, tokens // 2048):
        trainer = dialled(horizon, f"training.batch_size={batch}")
        multiplier = (batch * 2048 / 2**19) ** 0.5
        assert trainer.config["optimization/lr_multiplier"] == multiplier
        assert "√(B/B_ref)" in trainer.derived["optimization.lr_multiplier"]["reason"]
        assert groups_of(trainer)[0].lr == 0.02 * multiplier
    assert trainer.config["optimization/weight_decay"] == derived.config["optimization/weight_decay"]
    assert trainer.steps == derived.steps
    given = dialled(horizon, "training.batch_size=8", "optimization.lr_multiplier=1.5")
    assert given.config["optimization/lr_multiplier"] == 1.5
    assert given.config["optimization/weight_decay"] is None  # the preset's own
    assert "do not follow the batch" in given.derived["optimization.lr_multiplier"]["reason"]


@pytest.mark.parametrize("recipe", ["quickstart", "toy"])
def test_shipped_recipes_keep_their_effective_rates(recipe: str) -> None:
    """They have a batch and a number of steps of their own: nothing is scaled, also where only the batch is changed."""
    preset = resolve(schema_of, recipe, [])
    for words in ([], ["training.batch_size=64"]):
        planned = planned_trainer(recipe, words, compiles=False)
        assert "optimization.lr_multiplier" not in planned.derived
        for key in ("optimization/lr_multiplier", "optimization/weight_decay", "optimization/matrix_lr"):
            assert planned.config[key] == preset[key]


def test_a_given_batch_is_followed_once_also_after_a_resume(tiny: dict[str, object], tmp_path: Path) -> None:
    settings = {**tiny, "training.ratio": 0.5}
    del settings["training.steps"]
    first = launch.build_trainer({"objective": "pretrain"}, settings, name="a", root=tmp_path)
    first.run_directory.create()
    write_setup(first.plan, first.branches)
    again = launch.reopen(tmp_path / "a")
    for key in ("optimization/lr_multiplier", "optimization/weight_decay"):
        assert again.config[key] == first.config[key]
    assert again.steps == first.steps


def groups_of(trainer: Any) -> Any:
    return trainer.functions.optimizer.describe(trainer.functions.abstract_state.params)


def test_a_resumed_run_keeps_the_table_of_its_first_start(tiny: dict[str, object], tmp_path: Path) -> None:
    """The dial's numbers are settings by then; why they are what they are stays in derived.json."""
    settings = {**tiny, "training.batch_tokens": -1, "training.tokens": 2_000_000}
    for key in ("training.batch_size", "training.steps"):
        del settings[key]
    first = launch.build_trainer({"objective": "pretrain"}, settings, name="a", root=tmp_path)
    first.run_directory.create()
    write_setup(first.plan, first.branches)
    saved = json.loads(first.run_directory.derived.read_text())
    again = launch.reopen(tmp_path / "a")
    assert "reference tokens" in saved and "reference tokens" not in again.derived
    assert again.steps == first.steps and again.config.values == first.config.values  # nothing is scaled twice
    write_setup(again.plan, again.branches)
    assert json.loads(first.run_directory.derived.read_text()) == saved
    context = replace(again.context, config=again.config.replace({"optimization/weight_decay": 0.5}, "a test"))
    changed_plan = replace(again.plan, context=context)
    again.note_derived("training.steps", 7, "training.steps, given")
    write_setup(changed_plan, again.branches)
    changed = json.loads(first.run_directory.derived.read_text())
    assert "optimization.weight_decay" not in changed and changed["training.steps"]["value"] == 7


@pytest.mark.slow
def test_memory_and_time_of_a_tiny_model(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    plan = make_plan("quickstart", tiny, say=said.append)
    memory, parameters = plan["memory"], plan["model"]["parameters"]["total"]
    assert StepMemory(10, 9, 8, 7).total == 18
    assert memory["total"] == (memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"])
    assert memory["arguments"] > 2 * 4 * parameters, "weights and momentum in float32, and more"
    assert memory["aliased"] >= 2 * 4 * parameters, "the state is donated: it is counted once"
    assert memory["fits"] is True and 2**30 < memory["limit"] * jax.local_device_count() < 2**50
    assert memory["temporaries"] > 0 and any("--no-compile" in line for line in said)
    spent = plan["time"]
    assert spent["share_of_matrix_rate"] > 0 and "2048³ product" in spent["measured"]
    rate = spent["matrix_flops_per_s"] * spent["share_of_matrix_rate"]
    assert spent["seconds"] == pytest.approx((plan["flops"]["total"] + spent["optimizer_flops"]) / rate)
    assert spent["optimizer_flops"] > 0 and list(tmp_path.iterdir()) == []
    again = make_plan("quickstart", tiny)["memory"]  # now the program comes from the cache
    assert {**again, "compile_seconds": 0} == {**memory, "compile_seconds": 0}
    assert "≈" in render(plan) and "fits into" in render(plan)
    assert "DOES NOT FIT" in render({**plan, "memory": {**memory, "fits": False}})


def test_what_is_assumed_and_what_is_refused(corpus: Path, tmp_path: Path) -> None:
    def plan(*words: str) -> Any:
        return planned_trainer("pretrain", ["model.depth=2", *words], compiles=False)

    assumed = plan("data.tokenizer=auto")
    assert assumed.config["model/vocab_size"] == VOCABULARY
    assert assumed.derived["model.vocab_size"]["reason"].startswith("assumed")
    given = plan("model.vocab_size=500")
    assert given.model.vocab_size == 500 and "model.vocab_size" not in given.derived
    with pytest.raises(InputError, match=r"training\.epochs needs the length of the data"):
        plan("training.epochs=2", f"training.dataset={corpus}", f"data.root={tmp_path}")
    with pytest.raises(InputError, match="did you mean"):
        plan("model.dept=3")
    recipe = {"objective": "pretrain", "training": {"steps": "???"}}
    with pytest.raises(InputError, match=r"leaves 'training\.steps' open"):
        planned_trainer(recipe, compiles=False)


def test_lookup_rows_are_shared_out_evenly_without_data() -> None:
    words = ["model.depth=4", "architecture.lookup.after_layers=[1]", "model.vocab_size=512"]
    trainer: Any = planned_trainer("pretrain", words, compiles=False)
    rows = trainer.model.shape.lookup.rows
    assert trainer.model.allocation.rows == rows and "assumed" in trainer.derived["lookup rows"]["reason"]


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_is_drawn_with_its_corners(name: str, tmp_path: Path) -> None:
    optimizer = build_optimizer("muon", lambda cls: cls(), 1000, schedule=name, boundaries=(0, 400))
    assert optimizer.schedule is not None
    curves = sample_curves(optimizer, 1000, points=11)
    corners = [corner for corner in optimizer.schedule.corners if corner < 1000]
    assert set(corners) <= set(curves["steps"]) and curves["steps"][0] == 0 and curves["steps"][-1] == 999
    for corner in corners:
        place = curves["steps"].index(corner)
        assert curves["lrm"][place] == pytest.approx(float(optimizer.schedule(corner)))
    assert curves["momentum"][0] == pytest.approx(0.85) and max(curves["momentum"]) == pytest.approx(0.95)
    assert curves["weight_decay"][0] == pytest.approx(0.2)
    assert curves["weight_decay"][-1] == pytest.approx(0.2 / 1000, rel=1e-3)
    file = write_curves(curves, tmp_path / f"{name}.png")
    assert file is not None and file.read_bytes().startswith(PNG)


def test_curves_of_other_optimizers(tmp_path: Path) -> None:
    import optax

    adamw = sample_curves(build_optimizer("adamw", lambda cls: cls(), 50), 50)
    assert set(adamw) == {"steps", "lrm", "weight_decay"} and set(adamw["weight_decay"]) == {np.float32(0.01).item()}
    bare = sample_curves(build_optimizer(optax.sgd(0.1), lambda cls: cls(), 50), 50)
    assert set(bare) == {"steps"} and write_curves(bare, tmp_path / "none.png") is None
    with pytest.raises(InputError, match=r"\.png"):
        write_curves(adamw, tmp_path / "curves.jpg")


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]) == BLOCKS
    assert len(set(sparkline([0, 10], [0.5, 0.5]))) == 1
    assert sparkline([0, 10], [0.85, 0.95]) == BLOCKS[0] + BLOCKS[-1], "a narrow range is stretched"
    assert sparkline([0, 10], [0.5, 1.0])[0] == BLOCKS[0] and sparkline([0, 10], [1.0, 0.25])[1] == BLOCKS[2]
