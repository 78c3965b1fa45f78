"""Runs with bf16 parameters (training.param_dtype) and 8-bit moments (optimization.state_dtype)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.training.stops import StopAt
from tests.training.test_training_resume import assert_same, one_device, rows

from bessemer.checkpoint import Checkpoints
from bessemer.console import no_progress
from bessemer.doctor import Diagnosis, examine_checkpoints
from bessemer.errors import InputError, Stopped
from bessemer.generate.export import export_run
from bessemer.generate.load import load_model
from bessemer.optim.state import is_narrow
from bessemer.storage.weights import WeightFile
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import launch
from bessemer.training.feed import fetch

NARROW = {"training.param_dtype": "bfloat16", "optimization.state_dtype": "int8"}
MOST_INT8, MOST_NARROW = 0.002, 0.006  # largest relative difference of a loss in 30 steps; measured: 4.8e-4, 2.1e-3
Settings = dict[str, object]


@pytest.fixture(scope="module")
def settings(tiny: Settings) -> Settings:
    """Thirty steps of AdamW in two micro-batches, with a weight average."""
    return {
        **tiny,
        "training.steps": 30,
        "training.validation": False,
        "training.ema": 0.9,
        "optimization.name": "adamw",
        "optimization.lr": 0.01,
        "logging.checkpoint_interval": 10,
    }


@pytest.fixture(scope="module")
def run(settings: Settings, on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a finished run with these settings, trained once."""
    made: dict[str, Any] = {}

    def trained(**more: object) -> Any:
        name = json.dumps(more)
        if name not in made:
            trainer = launch.build_trainer(
                "quickstart", {**settings, **more}, name="run", root=tmp_path_factory.mktemp("runs")
            )
            trainer.run()
            made[name] = trainer
        return made[name]

    return trained


pytestmark = pytest.mark.usefixtures("on_one_device")


def losses(trainer: Any) -> np.ndarray:
    return np.asarray([row["loss"] for row in rows(trainer.run_directory.path) if "loss" in row])


def is_matrix(leaf: Any) -> bool:
    return leaf.ndim > 1


@pytest.mark.slow
def test_matrices_are_bf16_and_the_rest_and_the_average_are_float32(run: Callable[..., Any]) -> None:
    state = run(**NARROW).state
    for leaf in jax.tree.leaves(state.params):
        assert leaf.dtype == (jnp.bfloat16 if is_matrix(leaf) else jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.ema)} == {"float32"}


@pytest.mark.slow
def test_eight_bit_moments_follow_the_losses_of_float32(run: Callable[..., Any]) -> None:
    exact, found = losses(run()), losses(run(**{"optimization.state_dtype": "int8"}))
    assert len(exact) == 30 and exact[-1] < 0.8 * exact[0]
    assert np.abs(found / exact - 1).max() < MOST_INT8


@pytest.mark.slow
def test_bf16_parameters_and_eight_bit_moments_follow_the_losses_of_float32(run: Callable[..., Any]) -> None:
    exact, found = losses(run()), losses(run(**NARROW))
    assert np.abs(found / exact - 1).max() < MOST_NARROW


@pytest.mark.slow
def test_bytes_of_the_state_and_of_its_checkpoint(run: Callable[..., Any]) -> None:
    wide, narrow = run(), run(**NARROW)
    expected = 0
    for leaf in jax.tree.leaves(wide.state.params):
        expected += leaf.size * (2 if is_matrix(leaf) else 4)
        blocks = -(-leaf.shape[-1] // 256) * (leaf.size // leaf.shape[-1]) if leaf.ndim else 0
        expected += 2 * (leaf.size + 4 * blocks if is_narrow(leaf) else 4 * leaf.size)
    held = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves((t.state.params, t.state.opt_state)))
        for name, t in (("wide", wide), ("narrow", narrow))
    }
    assert held["narrow"] == expected + 4  # and Adam's count
    assert held["narrow"] < 0.5 * held["wide"]
    saved = Checkpoints(narrow.run_directory.checkpoints).leaves(30)
    kinds = {dtype for name, (dtype, _) in saved.items() if name.startswith("opt_state")}
    assert {"int8", "uint8"} <= kinds


def test_resume_is_bit_identical(run: Callable[..., Any], settings: Settings, tmp_path: Path) -> None:
    first = launch.build_trainer(
        "quickstart", {**settings, **NARROW}, name="part", root=tmp_path, callbacks=[StopAt(13)]
    )
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    assert second.step == 13
    second.run()
    assert_same(second, run(**NARROW))


@pytest.mark.slow
def test_rounding_does_not_depend_on_the_accumulation(
    run: Callable[..., Any], settings: Settings, tmp_path: Path
) -> None:
    """One micro-batch in place of two: sums in another order, so a few of the weights differ by one rounding."""
    whole = {**settings, **NARROW, "training.per_device_batch_size": 8, "training.steps": 2}
    halves = {**whole, "training.per_device_batch_size": 4}
    found = []
    for name, chosen in (("whole", whole), ("halves", halves)):
        trainer = launch.build_trainer("quickstart", chosen, name=name, root=tmp_path)
        trainer.run()
        found.append([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(trainer.state.params)])
    equal = [np.mean(a == b) for a, b in zip(*found, strict=True) if a.size > 1000]
    assert min(equal) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"fsdp": 2, "tensor": 2}, pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.long)]
)
def test_a_mesh_is_one_device(
    mesh: dict[str, int], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    topology = make_topology(TopologySettings(**{"data": 1, **mesh}), devices=jax.devices()[:4])
    monkeypatch.setattr(launch, "make_topology", lambda settings: topology)
    more = {**NARROW, "training.steps": 5, "training.per_device_batch_size": -1}
    trainer = launch.build_trainer("quickstart", {**settings, **more}, name="mesh", root=tmp_path)
    codes = [leaf for leaf in jax.tree.leaves(trainer.state.opt_state) if leaf.dtype == jnp.uint8]
    assert codes
    assert all(leaf.addressable_shards[0].data.size < leaf.size for leaf in codes)
    trainer.run()
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())
    alone = launch.build_trainer("quickstart", {**settings, **more}, name="alone", root=tmp_path)
    alone.run()
    np.testing.assert_allclose(losses(trainer), losses(alone), rtol=2e-3)
    for a, b in zip(jax.tree.leaves(trainer.state.params), jax.tree.leaves(alone.state.params), strict=True):
        a, b = (np.asarray(fetch(leaf), np.float32) for leaf in (a, b))
        assert np.mean(np.abs(a - b)) < 1e-3 * max(1e-3, np.abs(b).mean())


def test_the_model_is_loaded_judged_and_exported_in_its_dtype(run: Callable[..., Any], tmp_path: Path) -> None:
    trainer = run(**NARROW)
    loaded = load_model(trainer.run_directory)
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(trainer.state.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    held = WeightFile(trainer.run_directory.model / "model.safetensors").signature()
    assert {dtype for dtype, shape in held.values() if len(shape) > 1} == {"bfloat16"}
    assert {dtype for dtype, _ in WeightFile(trainer.run_directory.model / "ema.safetensors").signature().values()} == {
        "float32"
    }
    export_run(trainer.run_directory, tmp_path / "out", "safetensors", no_progress)
    found = Diagnosis(trainer.run_directory.name, "done")
    examine_checkpoints(trainer.run_directory, Checkpoints(trainer.run_directory.checkpoints), found, None)
    assert not [finding for finding in found.findings if finding.level == "error"]


def test_another_run_starts_from_bf16_weights_in_float32(
    run: Callable[..., Any], settings: Settings, tmp_path: Path
) -> None:
    trainer = run(**NARROW)
    more = {**settings, "init": str(trainer.run_directory.path), "training.steps": 1}
    more = {key: value for key, value in more.items() if not key.startswith(("model.", "data.tokenizer"))}
    second = launch.build_trainer("quickstart", more, name="next", root=tmp_path)
    for a, b in zip(jax.tree.leaves(second.state.params), jax.tree.leaves(trainer.state.params), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b, np.float32))


@pytest.mark.slow
def test_frozen_parameters_are_bf16_too(settings: Settings, tmp_path: Path) -> None:
    more = {**settings, **NARROW, "training.freeze": ["embedding"], "training.steps": 2}
    trainer = launch.build_trainer("quickstart", more, name="frozen", root=tmp_path)
    trainer.run()
    assert trainer.state.frozen["embedding"].dtype == jnp.bfloat16
    loaded = load_model(trainer.run_directory)
    np.testing.assert_array_equal(
        np.asarray(loaded.params["embedding"], np.float32), np.asarray(trainer.state.frozen["embedding"], np.float32)
    )


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("word", ["training.param_dtype=float32", "optimization.state_dtype=float32"])
def test_a_run_does_not_resume_in_another_dtype(word: str, change: bool, run: Callable[..., Any]) -> None:
    place = run(**NARROW).run_directory.path
    setting = word.partition("=")[0].replace(".", r"\.")
    with pytest.raises(InputError, match=rf"{setting} cannot be changed on resume"):
        launch.reopen(place, [word], change=change)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora.rank": 4, "training.param_dtype": "bfloat16"}, "lora.base_dtype"),
        ({"training.param_dtype": "float16"}, "float32, bfloat16"),
        ({"optimization.name": "muon", "optimization.state_dtype": "int8"}, "adamw.*lion"),
        ({"optimization.name": "adafactor", "optimization.state_dtype": "int8"}, "adamw.*lion"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    more: Settings, words: str, settings: Settings, tmp_path: Path
) -> None:
    if "optimization.name" in more:
        settings = {key: value for key, value in settings.items() if key != "optimization.lr"}
    with pytest.raises(InputError, match=words):
        launch.build_trainer("quickstart", {**settings, **more}, name="no", root=tmp_path)
