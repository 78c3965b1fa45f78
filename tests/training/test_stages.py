"""Stages: what begins where, what is kept, and that a run stopped around a boundary is the same run."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.test_guard import Record, _no_report, assert_same_run, quick, rows, same_leaves  # noqa: F401 -- fixtures

import bessemer as bm
from bessemer.checkpoint import Checkpoints
from bessemer.config import field
from bessemer.errors import InputError, Stopped, StorageError
from bessemer.generate.load import load_model
from bessemer.models.gpt import GPT
from bessemer.registry import jobs
from bessemer.training import launch
from bessemer.training.kl_trainer import KLDivergenceTrainer, KLDivergenceTrainerConfig
from bessemer.training.persistence import reference
from bessemer.training.stages import Stage, one_each, plan

pytestmark = pytest.mark.usefixtures("on_one_device")

FIRST, STEPS = 5, 9
"""Updates of the first stage, and of both."""


class PoisonedPlan:
    """The data of a run, with weights that make the loss infinite at some data steps."""

    def __init__(self, plan: Any, poison: list[int]):
        self.plan, self.poison = plan, poison

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Any]:
        batch = dict(self.plan.batch(step, rows))
        if step in self.poison:
            batch["loss_mask"] = np.full_like(batch["loss_mask"], np.inf)
        return batch


@dataclasses.dataclass
class LeashedConfig(KLDivergenceTrainerConfig):
    poison: list[int] = field("training/poison", default_factory=list, help="data steps")


@jobs.register("leashed")
class LeashedTrainer(KLDivergenceTrainer[LeashedConfig, GPT]):
    default_callbacks = ("checkpoint", "metric_logger", "validation", "preview", "time_limit")

    def configure_dataloaders(self) -> Any:
        data = super().configure_dataloaders()
        return dataclasses.replace(data, plan=PoisonedPlan(data.plan, self.settings.poison))  # type: ignore[arg-type]


class Watch(Record):
    """Also: the reference and β of every update, and a crash wherever it is asked for."""

    def __init__(self, crash_after: int = -1, **how: int):
        super().__init__(**how)
        self.crash_after = crash_after
        self.betas: dict[int, float] = {}
        self.references: dict[int, Any] = {}

    def on_optimizer_step(self, loop: Any) -> None:
        super().on_optimizer_step(loop)
        state = loop.trainer.state
        self.betas[loop.step] = float(state.beta)
        self.references[loop.step] = jax.tree.map(np.asarray, state.reference)
        if loop.step == self.crash_after:
            raise RuntimeError("killed")


@pytest.fixture(scope="module")
def leashed(tiny: dict[str, object], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Five steps on one corpus and four on words the first has never seen, checkpoints every three."""
    other = tmp_path_factory.mktemp("other") / "other.jsonl"
    rng = random.Random(1)
    words = ["zinc", "quartz", "opal", "jade", "onyx", "beryl", "topaz", "garnet", "pearl", "amber"]
    texts = [" ".join(rng.choice(words) for _ in range(30)) for _ in range(20)]
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        **{key: value for key, value in tiny.items() if key != "training.steps"},
        "job": "leashed",
        "objective": "kl",
        "training.dataset": [[{"name": str(corpus)}], [{"name": str(other)}]],
        "training.tokens": [FIRST * 128, (STEPS - FIRST) * 128],
        "training.per_device_batch_size": 8,
        "training.validation_steps": 4,
        "model.depth": 1,
        "optimization.name": "adamw",
        "optimization.lr": 3e-3,
        "optimization.schedule": "rewarm",
        "optimization.stage_reset": True,
        "optimization.kl.beta": 0.5,
        "optimization.kl.estimator": "exact",
        "logging.validation_interval": -1,
        "logging.keep_last": 1,
    }


def run(settings: dict[str, object], root: Path, name: str, watch: Watch | None = None) -> Any:
    parts: dict[str, Any] = {"callbacks": [watch]} if watch else {}
    trainer = launch.build_trainer("quickstart", settings, name=name, root=root, **parts)
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def whole(leashed: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Watch]:
    watch = Watch()
    with quick(home):
        return run(leashed, tmp_path_factory.mktemp("runs"), "whole", watch), watch


def stored(trainer: Any) -> dict[int, Any]:
    """The references of a run on the disk, by step."""
    manager, shapes = (Checkpoints(trainer.run_directory.path / "reference"), trainer.functions.abstract_state.params)
    found = {step: manager.restore(step, {"params": shapes})["params"] for step in manager.committed()}
    return {step: jax.tree.map(np.asarray, params) for step, params in found.items()}


def assert_same_references(a: Any, b: Any) -> None:
    assert list(stored(a)) == list(stored(b)) and same_leaves(stored(a), stored(b))


def test_the_plan_of_stages() -> None:
    starts = [0, 10, 30, 40]
    assert plan([0], 7) == (Stage(1, 0, 7),)
    assert [stage.reference for stage in plan(starts, 50, referred=True)] == [0] * 4
    once = plan(starts, 50, betas=[0, 0.1, 0, 1], refresh=[False] * 4)
    assert [(stage.start, stage.end, stage.beta, stage.reference) for stage in once] == [
        (0, 10, 0, None),
        (10, 30, 0.1, 10),
        (30, 40, 0, None),
        (40, 50, 1, 10),
    ]
    often = plan(starts, 50, betas=[0.1] * 4, refresh=[False, True, False, True])
    assert [stage.reference for stage in often] == [0, 10, 10, 40]
    assert one_each("x", [0.3], 3, 0.0) == [0.0, 0.3, 0.3] and one_each("x", [0.3], 1, 0.0) == [0.3]
    with pytest.raises(InputError, match="x has 2 entries but the run has 3 stages"):
        one_each("x", [1, 2], 3, 0)


@pytest.mark.slow
def test_a_reference_from_the_second_stage_on(whole: tuple[Any, Watch]) -> None:
    """The first stage has none and its program costs less; the second is held to the parameters at the boundary."""
    trainer, watch = whole
    assert [watch.references[step] is None for step in range(1, STEPS + 1)] == [True] * 5 + [False] * 4
    assert list(watch.betas.values()) == [0.0] * 5 + [0.5] * 4
    for step in range(FIRST + 1, STEPS + 1):
        assert same_leaves(watch.references[step], watch.params[FIRST])
    assert list(stored(trainer)) == [FIRST]
    first, second = trainer.functions_by_reference[False], trainer.functions
    assert first.compiled and second.compiled and first.abstract_state.reference is None
    flops = [functions.train_step.cost_analysis()["flops"] for functions in (first, second)]
    assert flops[0] < 0.85 * flops[1]
    logged = [row for row in rows(trainer.run_directory.path) if "loss" in row]
    assert [row["stage"] for row in logged] == [1] * 5 + [2] * 4
    assert ["kl" in row and "kl_nll" in row for row in logged] == [False] * 5 + [True] * 4
    assert abs(logged[5]["kl"]) < 1e-6 < logged[-1]["kl"], "the first update of the stage starts from the reference"
    np.testing.assert_allclose(logged[-1]["loss"], logged[-1]["nll"] + 0.5 * logged[-1]["kl"], rtol=1e-6)


def test_the_end_of_a_stage_is_judged_and_kept(whole: tuple[Any, Watch]) -> None:
    """Validated and saved without an interval asking, kept although keep_last is 1, and usable by its step."""
    trainer, watch = whole
    directory = trainer.run_directory
    assert [row["step"] for row in rows(directory.path) if "val_loss" in row] == [0, FIRST, STEPS]
    assert trainer.checkpoint_manager.committed() == [FIRST, STEPS]
    listed = json.loads((directory.path / "stages.json").read_text())
    assert [(stage["name"], stage["beta"], stage["reference"]) for stage in listed] == [
        ("stage-1", 0.0, None),
        ("stage-2", 0.5, FIRST),
    ]
    with pytest.raises(InputError, match="it has stage-1, stage-2"):
        load_model(directory, step="stage-3")
    assert all((directory.path / stage["checkpoint"] / "COMMIT").is_file() for stage in listed)
    assert same_leaves(load_model(directory, step="stage-1").params, watch.params[FIRST])


def test_the_optimizer_begins_anew(whole: tuple[Any, Watch]) -> None:
    """Adam has counted the updates of the second stage alone, and the schedule has warmed up again."""
    trainer, _ = whole
    counts = {
        int(leaf) for leaf in jax.tree.leaves(trainer.state.opt_state) if leaf.ndim == 0 and leaf.dtype == np.int32
    }
    assert counts == {STEPS - FIRST}


@pytest.mark.parametrize("stop", [*(pytest.param(k, marks=pytest.mark.slow) for k in (3, 7)), FIRST])
def test_stopped_in_any_stage_and_resumed(
    stop: int, leashed: dict[str, object], whole: tuple[Any, Watch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        run(leashed, tmp_path, "part", Watch(stop_at=stop))
    before = stored(launch.reopen(tmp_path / "part"))
    if stop > FIRST:
        monkeypatch.setattr(reference, "take", lambda *_: pytest.fail("the reference is never taken again"))
    again = launch.reopen(tmp_path / "part")
    assert again.step == stop and list(before) == ([FIRST] if stop > FIRST else [])
    again.run()
    assert_same_run(again, whole[0])
    assert_same_references(again, whole[0])
    shutil.rmtree(tmp_path / "part/reference")
    with pytest.raises(StorageError, match="reference"):
        launch.reopen(tmp_path / "part")


@pytest.mark.parametrize("committed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_just_after_the_boundary(
    committed: bool, leashed: dict[str, object], whole: tuple[Any, Watch], tmp_path: Path
) -> None:
    """The reference is on the disk, no checkpoint of the second stage is; perhaps not even that of the boundary."""
    settings = {**leashed, "logging.keep_last": 20}
    with pytest.raises(RuntimeError):
        run(settings, tmp_path, "part", Watch(crash_after=FIRST + 1))
    if not committed:
        shutil.rmtree(tmp_path / "part/checkpoints" / f"step_{FIRST:08d}")
    again = launch.reopen(tmp_path / "part")
    assert again.step == (FIRST if committed else 3) and list(stored(again)) == [FIRST]
    again.run()
    assert_same_run(again, whole[0])
    assert_same_references(again, whole[0])


@pytest.fixture(scope="module")
def rolling(leashed: dict[str, object]) -> dict[str, object]:
    """One infinite loss is a reason to go back to the last of the checkpoints at 3 and 6."""
    guard = {"guard.max_bad_steps": 1, "guard.spike_sigma": 50.0, "guard.spike_action": "rollback"}
    return {**leashed, **guard, "logging.keep_last": 20}


@pytest.mark.slow
def test_a_rollback_across_the_boundary_takes_the_reference_again(rolling: dict[str, object], tmp_path: Path) -> None:
    """Step 6 fails: back to 3, where there is none, and on with other batches to another step 5."""
    settings = {**rolling, "training.poison": [FIRST]}
    watch = Watch()
    trainer = run(settings, tmp_path, "whole", watch)
    back = [step for step, _ in watch.batches].index(4, 4)
    assert [step for step, _ in watch.batches][back:] == [4, 5, 6, 7, 8, 9]
    assert watch.references[4] is None and same_leaves(watch.references[9], watch.params[FIRST])
    assert trainer.loop_state.rollbacks == 1 and list(stored(trainer)) == [FIRST]
    with pytest.raises(RuntimeError):
        run(settings, tmp_path, "part", Watch(crash_in_rollback=1))
    again = launch.reopen(tmp_path / "part")
    again.run()
    assert_same_run(again, trainer)
    assert_same_references(again, trainer)


@pytest.mark.slow
def test_a_rollback_within_the_stage_keeps_the_reference(rolling: dict[str, object], tmp_path: Path) -> None:
    """That of a run with the same guard which never went back: it is the same program."""
    (tmp_path / "clean").mkdir()
    straight, watch = Watch(), Watch()
    clean = run({**rolling, "training.poison": [99]}, tmp_path / "clean", "whole", straight)
    trainer = run({**rolling, "training.poison": [6]}, tmp_path, "whole", watch)
    assert trainer.loop_state.rollbacks == 1 and [step for step, _ in watch.batches].count(7) == 2
    assert clean.loop_state.rollbacks == 0
    assert_same_references(trainer, clean)
    assert same_leaves(watch.references[9], straight.params[FIRST])


@pytest.mark.slow
def test_four_stages(leashed: dict[str, object], tmp_path: Path) -> None:
    """Weights and refreshed references a stage; two programs serve them all; stopped where a new one is due."""
    first, second = leashed["training.dataset"]  # type: ignore[misc]
    settings = {
        **leashed,
        "training.dataset": [first, second, first, second],
        "training.tokens": [2 * 128] * 4,
        "data.crossfade": "linear",
        "data.crossfade_share": 0.5,
        "optimization.kl.beta": [0, 0.5, 0, 2],
        "optimization.kl.refresh": [False, False, False, True],
    }
    watch = Watch()
    trainer = run(settings, tmp_path, "whole", watch)
    assert list(watch.betas.values()) == [0, 0, 0.5, 0.5, 0, 0, 2, 2]
    held = [None if at is None else at for at in watch.references.values()]
    assert held[0] is held[1] is held[4] is held[5] is None
    assert same_leaves(held[3], watch.params[2]) and same_leaves(held[7], watch.params[6])
    assert trainer.checkpoint_manager.committed() == [2, 4, 6, 8]
    assert trainer.run_directory.log.read_text().count("compiled   in") == 2
    with pytest.raises(Stopped):
        run(settings, tmp_path, "part", Watch(stop_at=6))
    again = launch.reopen(tmp_path / "part")
    again.run()
    assert_same_run(again, trainer)
    once = run({**settings, "optimization.kl.refresh": False}, tmp_path, "once", kept := Watch())
    assert same_leaves(kept.references[8], kept.params[2]) and list(stored(once)) == [2]


def test_names_and_defaults() -> None:
    assert bm.KLDivergenceTrainer is KLDivergenceTrainer and bm.KLDivergenceTrainerConfig is KLDivergenceTrainerConfig
    settings = KLDivergenceTrainerConfig()
    assert settings.total_tokens == [10**9, 10**8] and settings.objective == "kl"
    assert settings.datasets == [[bm.Sampling("fineweb", 1.0, bm.DatasetStyle.PMD)]] * 2
    assert bm.KLConfig().beta == (0.1,) and bm.KLConfig().estimator == "nll"
    assert "beta" in {entry.name for entry in dataclasses.fields(bm.KLDivergenceTrainState)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimization.kl.beta": [0, 0.1, 0.2]}, "optimization.kl.beta has 3 entries but the run has 2 stages"),
        ({"training.tokens": 1280, "training.dataset": "A"}, "nothing to be regularized toward"),
        ({"objective": "pretrain"}, "is for objective=kl"),
        ({"training.steps": 1, "training.tokens": None}, "too few for 2 stages"),
    ],
    ids=["weights", "one-stage", "objective", "steps"],
)
def test_what_cannot_be(
    change: dict[str, object], message: str, leashed: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    settings = {**leashed, **change}
    if change.get("training.dataset"):
        settings["training.dataset"] = str(corpus)
    if "objective" in change:
        settings = {key: value for key, value in settings.items() if not key.startswith("optimization.kl")}
    settings = {key: value for key, value in settings.items() if value is not None}
    with pytest.raises(InputError, match=message):
        launch.build_trainer("kl", settings, name="a", root=tmp_path)


def test_a_horizon_in_steps_is_divided_as_the_tokens_are(leashed: dict[str, object], tmp_path: Path) -> None:
    """The recipe's stages are as 8 to 3."""
    settings = {key: value for key, value in leashed.items() if key != "training.tokens"}
    settings |= {"training.steps": 14, "optimization.kl.estimator": "nll"}
    trainer = launch.build_trainer("kl", settings, name="a", root=tmp_path)
    assert trainer.data.stage_starts == [0, 10] and trainer.steps == 14
    assert "does not steer" in trainer.derived["optimization.kl.estimator"]["reason"], "said at the start"


def divergence(trainer: Any) -> float:
    """Mean over held-out tokens of the second corpus of Σ_v p (log p − log q), in float64 from the logits: the final
    parameters against those of the checkpoint at the end of the first stage."""
    held_out = trainer.data.validation
    ids = held_out.read(0, held_out.count)["input_ids"]
    logs = []
    for step in (trainer.steps, trainer.stages[0].end):
        loaded = load_model(trainer.run_directory, step=step)
        logits = np.asarray(loaded.model.apply({"params": loaded.params}, ids), np.float64)
        logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    p, q = logs
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.slow
def test_a_larger_weight_keeps_the_policy_closer(
    leashed: dict[str, object], whole: tuple[Any, Watch], tmp_path: Path
) -> None:
    """In four steps already; the long version is below."""
    free, tight = (run({**leashed, "optimization.kl.beta": [0, beta]}, tmp_path, f"beta-{beta}") for beta in (0, 10))
    assert divergence(free) > divergence(whole[0]) > divergence(tight) > 0
    assert stored(free) == {} and free.state.reference is None


@pytest.mark.long
def test_the_divergence_falls_with_the_weight(leashed: dict[str, object], tmp_path: Path) -> None:
    """β = 0, .1, 1, 10 on words that the first stage never saw."""
    settings = {**leashed, "training.tokens": [60 * 128, 40 * 128], "optimization.stage_reset": False}
    found = [
        divergence(run({**settings, "optimization.kl.beta": [0, beta]}, tmp_path, f"beta-{beta}"))
        for beta in (0, 0.1, 1, 10)
    ]
    assert all(looser > tighter for looser, tighter in pairwise(found)), found
    assert found[0] > 10 * found[-1], found
