"""`init`: a run takes tokenizer and shapes from the one it starts from, and refuses what contradicts the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tests.faults.in_place import one_device
from tests.tiny_run import make_run, tiny_params

from bessemer.config import Origin, OriginKind
from bessemer.data import DatasetStyle, Sampling
from bessemer.errors import InputError, Stopped
from bessemer.job import RunDirectory
from bessemer.job.trust import saved_tree
from bessemer.plan.trainer import planned_trainer
from bessemer.training import launch
from bessemer.training.callbacks.evaluation import Evaluation
from bessemer.training.setup.init_recipe import state_of, trained_first
from bessemer.training.setup.initial_weights import inherited_plugins
from bessemer.training.setup.schema import schema_of
from bessemer.training.trainer import BaseTrainer

SETTINGS = {
    "training.steps": 2,
    "training.batch_size": 8,
    "training.per_device_batch_size": 8,
    "training.validation_steps": 8,
    "data.val_fraction": 0.2,
    "optimization.name": "adamw",
    "logging.progress": "none",
}


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device, and no plots."""
    monkeypatch.setattr(launch, "make_topology", one_device)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_run(folder, "start")
    return folder


@pytest.fixture
def start(made: Path, tmp_path: Path) -> Path:
    """A run with the settings depth 2, width 32, 300 tokens, and weights at steps 10 and 20."""
    return shutil.copytree(made, tmp_path / "own") / "runs/start"


def build(start: Path, recipe: str = "quickstart", **settings: object) -> BaseTrainer:
    data = {"training.dataset": str(start.parent.parent / "cats.jsonl")}
    given = SETTINGS | data | {key.replace("__", "."): value for key, value in settings.items()}
    return launch.build_trainer(recipe, {**given}, name="child", root=start.parent)


def same_weights(trainer: BaseTrainer, step: int) -> bool:
    same = jax.tree.map(lambda one, other: bool((one == other).all()), trainer.state.params, tiny_params(step))
    return all(jax.tree.leaves(same))


def test_tokenizer_and_shapes_come_from_the_start_over_the_recipe(start: Path) -> None:
    trainer = build(start, init=str(start))
    assert trainer.model.width == 32 and trainer.model.depth == 2  # the recipe says 128 and 3
    assert trainer.tokenizer is not None and trainer.tokenizer.vocab_size == 300  # the recipe says train:1024
    assert trainer.model.block_size == 256  # what the recipe or the caller says about the length stays
    assert trainer.config["init"].endswith("step_00000020")
    note = trainer.derived["init"]
    assert "the tokenizer" in note["reason"] and "model.width=32" in note["reason"]
    assert same_weights(trainer, 20)


def test_an_older_checkpoint_and_the_callers_own_words(start: Path) -> None:
    trainer = build(start, init=str(start / "checkpoints/step_00000010"), architecture__block_size=16, model__depth=2)
    assert trainer.config["init"].endswith("step_00000010") and trainer.model.block_size == 16
    assert same_weights(trainer, 10)


@pytest.mark.parametrize("fresh", [True, False])
def test_only_a_fresh_model_mutes_gradients_that_are_rounding_noise(start: Path, fresh: bool) -> None:
    """From trained weights ρ, ξ and backout have real gradients, and the first step follows them."""
    small = {"model__depth": 2, "model__width": 32, "model__head_dim": 16, "data__tokenizer": "train:300"}
    trainer = build(start, **small) if fresh else build(start, init=str(start))
    params = trainer.state.params
    gradients = jax.tree.map(lambda p: jax.numpy.full(p.shape, 1e-8), params)
    tx, state = trainer.functions.optimizer.tx, trainer.state.opt_state
    updates, _ = tx.update(gradients, state, params, step=jax.numpy.int32(0))
    silent = {name for name in params if not any(leaf.any() for leaf in jax.tree.leaves(updates[name]))}
    assert silent == ({"rho", "xi", "backout_scale"} if fresh else set())


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"model__depth": 3}, r"do not fit this model.*Leave out model.depth=3 \(it was 2\)"),
        ({"architecture__value_embeddings": False}, "Leave out architecture.value_embeddings=False"),
        ({"data__tokenizer": "train:290"}, "another tokenizer.*Leave data.tokenizer out"),
    ],
)
def test_a_contradiction_is_bad_input_with_the_fix(start: Path, setting: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build(start, init=str(start), **setting)
    assert not (start.parent / "child").exists()


@pytest.mark.slow
def test_the_run_goes_on_when_its_start_is_gone(start: Path) -> None:
    """config.yaml is complete and the tokenizer kept: a killed run is the same run, wherever the start went."""
    trainer = build(start, init=str(start), architecture__block_size=16)
    trainer.run()
    log = trainer.run_directory.log.read_text()
    assert "this model, before" in log and "untrained" not in log, "it began with trained weights"
    saved = trainer.run_directory.config.read_text()
    shutil.rmtree(start)
    again = launch.reopen(start.parent / "child")
    assert again.step == 2 and again.config.to_yaml() == saved
    assert again.tokenizer is not None and again.tokenizer.vocab_size == 300


def test_data_of_ones_own_is_not_judged_by_the_demonstration(start: Path, capsys: pytest.CaptureFixture) -> None:
    """`bessemer train sft init=RUN training.dataset=FILE`: nothing about reversing strings is measured."""
    rows = [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(60)]
    file = start.parent / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = build(start, "sft", init=str(start), architecture__block_size=32, training__dataset=str(file))
    (callback,) = [one for one in trainer.make_callbacks() if isinstance(one, Evaluation)]
    callback.on_train_begin(SimpleNamespace(trainer=trainer, step=0))  # type: ignore[arg-type]
    assert callback.tasks == [] and "exact:toy-reverse is left out" in capsys.readouterr().out


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_fine_tuning_learns_a_toy_task(tmp_path: Path) -> None:
    """The demonstration, shorter than `bessemer train sft`: reversed strings that it has never seen."""
    quiet = {"logging.progress": "none", "logging.validation_interval": -1}
    launch.build_trainer("toy", {**quiet, "training.steps": 200}, name="base", root=tmp_path).run()
    tuned = {**quiet, "init": "base", "training.steps": 100, "eval.limit": 128}
    launch.build_trainer("sft", tuned, name="tuned", root=tmp_path).run()
    results = [json.loads(path.read_text()) for path in (tmp_path / "tuned/eval").glob("exact-toy-reverse_*.json")]
    before, after = sorted(results, key=lambda result: result["step"])
    assert before["value"] < 0.1 and after["value"] > 0.6, (before["value"], after["value"], after["wrong"])
    assert "exact:toy-reverse" in (tmp_path / "tuned/report.md").read_text()


def test_a_plan_of_a_chain_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("second.yaml").write_text("training: {dataset: toy-text, steps: 3, batch_size: 8}\ninit: recipe:toy\n")
    planned = planned_trainer("second.yaml", ["init=recipe:second.yaml"], compiles=False)
    assert planned.model.width == 64 and planned.model.vocab_size == 268 and not Path("runs").exists()


def test_a_run_whose_objective_chose_the_style_is_that_of_the_recipe(start: Path) -> None:
    """`recipe:sft` is found again: rows of conversations are packed, which the recipe does not say."""
    trainer = build(start, "sft", init=str(start), architecture__block_size=32, training__dataset="toy-sort")
    origin = Origin(OriginKind.RECIPE, "sft")
    own = trainer.config.replace({"training/dataset": [[Sampling("toy-reverse", style=DatasetStyle.PACKED)]]}, origin)
    trainer.run_directory.create().config.write_text(own.to_yaml())
    assert state_of(trainer.run_directory, "sft") == "started"
    other = trainer.config.replace({"training/dataset": [[Sampling("toy-sort", style=DatasetStyle.PACKED)]]}, origin)
    trainer.run_directory.config.write_text(other.to_yaml())
    with pytest.raises(InputError, match="is not what recipe sft would train"):
        state_of(trainer.run_directory, "sft")


def test_data_that_is_missing_is_refused_before_another_run_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "trl-lib/Capybara", "*.parquet"):
        with pytest.raises(InputError, match=r"does not exist|no file matches"):
            launch.build_trainer("sft", {"training.dataset": name}, name="mine", root=tmp_path / "runs")
    assert not list(tmp_path.glob("runs/*"))


def test_what_stops_a_run_that_others_start_from_says_once_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """finetune-lora starts from toy-start, which starts from toy; data without `init` would train that tiny model."""

    def train(recipe: str, directory: RunDirectory, passed: dict[str, Any], again: bool) -> None:
        if recipe == "toy-start":
            trained_first(launch.resolve(schema_of, recipe), tmp_path, train)
        raise Stopped("stopped after step 46 of 400. Continue with: bessemer resume runs/toy-base")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    config = launch.resolve(schema_of, "finetune-lora", {"training.dataset": "chats.jsonl"})
    with pytest.raises(Stopped) as caught:
        trained_first(config, tmp_path, train)
    assert str(caught.value).count("or run the same command again") == 1
    assert capsys.readouterr().out.count("no init is given") == 1


def test_a_cycle_of_recipes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, other in (("one", "two"), ("two", "one")):
        Path(f"{name}.yaml").write_text(f"training: {{dataset: toy-text, steps: 3}}\ninit: recipe:{other}.yaml\n")
    with pytest.raises(InputError, match=r"cycle: two\.yaml from one\.yaml from two\.yaml"):
        launch.build_trainer("one.yaml", [], name="child")


def test_code_of_a_start_from_elsewhere_is_not_imported(start: Path) -> None:
    """A directory that says its model is code of its own: naming it as `init` is not trusting it."""
    for config in (*start.glob("checkpoints/*/config.yaml"), start / "config.yaml"):
        changed = config.read_text().replace("family: gpt", "family: 'evil:Model'")
        tree = saved_tree(config)
        config.write_text(changed)
    with pytest.raises(InputError, match=r"model\.family=evil:Model"):
        inherited_plugins(
            start / "checkpoints/step_00000020", saved_tree(config), launch.resolve(schema_of, "quickstart")
        )
    assert inherited_plugins(start, tree, launch.resolve(schema_of, "quickstart")) == {}


RECIPE = """\
training: {dataset: DATA, steps: 2, batch_size: 8, per_device_batch_size: 8, validation_steps: 8}
data: {val_fraction: 0.2}
logging: {progress: none, preview_interval: 0}
"""
SHAPES = "model: {depth: 2, width: 32, head_dim: 16, window: L}\narchitecture: {block_size: 16}\n"


@pytest.mark.slow
def test_a_recipe_is_trained_first_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A chain of two; found again by the next run, continued when it was stopped, refused when the recipe changed."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    recipe = RECIPE.replace("DATA", "cats.jsonl")
    Path("one.yaml").write_text(recipe + SHAPES + "data.tokenizer: train:300\n")
    Path("two.yaml").write_text(recipe + "init: recipe:one.yaml\n")
    launch.build_trainer("two.yaml", ["init=recipe:two.yaml"], name="last")
    assert "recipe:two.yaml is trained first" in capsys.readouterr().out
    runs = [json.loads(Path(f"runs/{name}-base/status.json").read_text()) for name in ("one", "two")]
    assert [(run["state"], run["step"]) for run in runs] == [("done", 2)] * 2
    assert "one-base/checkpoints/step_00000002" in Path("runs/two-base/config.yaml").read_text()

    Path("runs/two-base/status.json").write_text(json.dumps({"state": "stopped", "exit_code": 75, "step": 2}))
    last = launch.build_trainer("quickstart", {**SETTINGS, "init": "recipe:two.yaml"}, name="other")
    assert "two.yaml is continued first" in capsys.readouterr().out
    assert last.model.width == 32 and last.config["init"].endswith("two-base/checkpoints/step_00000002")

    Path("two.yaml").write_text(recipe.replace("steps: 2", "steps: 3") + "init: recipe:one.yaml\n")
    with pytest.raises(InputError, match=r"training.steps 2 there, 3 in the recipe.*init=.*two-base"):
        state_of(RunDirectory(Path("runs/two-base")), "two.yaml")
