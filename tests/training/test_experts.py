"""Runs of models with experts: resumed bit for bit, balanced, logged, fine-tuned whole and with adapters, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.tiny_hf import SFT, chatty_folder, load_folder, make_talks
from tests.reference.huggingface import some_ids
from tests.training.stops import StopAt
from tests.training.test_training_resume import one_device, rows

from bessemer.console import no_progress
from bessemer.errors import InputError, Stopped
from bessemer.generate import load_model
from bessemer.generate.export import export_run, export_run_adapters
from bessemer.job import find_run
from bessemer.training import launch
from bessemer.training.launch import build_trainer
from bessemer.training.persistence.checkpoints import saved_tree

EXPERTS = {
    "model.experts": 4,
    "model.experts_active": 2,
    "model.experts_shared": 1,
    "architecture.experts.bias_rate": 0.01,
    "training.steps": 4,
}


@pytest.mark.slow
def test_a_resumed_run_has_the_biases_of_the_uninterrupted_one(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases are no function of the data at hand: lost in a checkpoint, every later choice of experts is another."""
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())
    given = {**tiny, **EXPERTS}
    whole = launch.build_trainer("quickstart", given, name="whole", root=tmp_path)
    whole.run()
    first = launch.build_trainer("quickstart", given, name="part", root=tmp_path, callbacks=[StopAt(2)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    assert second.step == 2
    second.run()
    ends = [jax.device_get(saved_tree(trainer.state)) for trainer in (whole, second)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert rows(whole.run_directory.path) == rows(second.run_directory.path)
    biases = np.stack([whole.state.params[f"blocks_{n}"]["router_bias"] for n in range(whole.model.depth)])
    steps = biases / 0.01
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)  # moved by the rate, by nothing else
    assert np.any(biases) and np.abs(steps).max() <= 4.001
    row = next(row for row in reversed(rows(whole.run_directory.path)) if "loss" in row)
    assert row["experts/dropped"] == 0 and row["experts/balance"] >= 1
    assert 0 < row["experts/entropy"] <= np.log(4) + 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_folder(tmp_path_factory.mktemp("hub") / "tiny-moe", dtype="float32", case="qwen3-moe")


def tuned(folder: Path, root: Path, **more: Any) -> Any:
    """Two steps of SFT on eight devices."""
    given = {"init": str(folder), "training.dataset": str(make_talks(root)), "optimization.lr": 0.02, **more}
    trainer = build_trainer(None, {**SFT, **given}, name="tuned", root=root / "runs")
    trainer.run()
    return trainer


def logits(model: Any, params: Any) -> np.ndarray:
    return np.asarray(jax.jit(model.clone(precision="float32").apply)({"params": params}, some_ids(262, length=20)))


def exported_logits(root: Path) -> np.ndarray:
    run = find_run("tuned", root / "runs")
    export_run(run, root / "out", "hf", no_progress, dtype="float32")
    assert json.loads((root / "out/config.json").read_text())["num_experts"] == 7
    return logits(*load_folder(root / "out"))


@pytest.mark.slow
def test_sft_of_all_parameters_is_exported_as_it_was_trained(folder: Path, tmp_path: Path) -> None:
    trainer = tuned(folder, tmp_path)
    before = load_folder(folder)[1]["blocks_0"]
    after = load_model(trainer.run_directory)
    assert "router_bias" not in before  # an imported router has no place for one
    for name in ("router", "expert_gate", "expert_up", "expert_down"):
        assert np.abs(before[name] - after.params["blocks_0"][name]).max() > 1e-4
    np.testing.assert_array_equal(exported_logits(tmp_path), logits(after.model, after.params))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [pytest.param("none", marks=pytest.mark.long), "nf4"])
def test_adapters_stand_beside_every_expert(quantize: str, folder: Path, tmp_path: Path) -> None:
    trainer = tuned(folder, tmp_path, **{"lora.rank": 2, "lora.quantize": quantize})
    adapters = trainer.state.params["blocks_1"]["expert_down"]
    assert adapters["lora_a"].shape == (7, 20, 2) and adapters["lora_b"].shape == (7, 2, 36)
    assert np.all(np.abs(np.asarray(adapters["lora_b"])).max(axis=(1, 2)) > 1e-5)  # every expert was reached
    assert "router" not in trainer.state.params["blocks_1"]
    parts = trainer.model_parts
    assert 0 < parts.flops_per_token < 6 * parts.counts["total"]  # of frozen experts those that a token uses
    loaded = load_model(trainer.run_directory)
    wanted = logits(loaded.model, loaded.params)
    got = exported_logits(tmp_path)
    if quantize == "none":
        assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max()
    with pytest.raises(InputError, match="Export the merged model instead"):
        export_run_adapters(trainer.run_directory, tmp_path / "adapters")


def test_what_adapters_of_experts_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    given = {**SFT, "init": str(folder), "training.dataset": str(make_talks(tmp_path)), "lora.rank": 2}
    for setting in ({"lora.dora": True}, {"lora.dropout": 0.1}):
        with pytest.raises(InputError, match=r"expert_.*is a stack of experts"):
            build_trainer(None, {**given, **setting}, name="no", root=tmp_path)
