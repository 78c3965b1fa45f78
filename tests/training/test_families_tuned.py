"""SFT, LoRA, QLoRA and GRPO from a Gemma folder, and GRPO from one with experts (test_experts.py has the rest): what
should move moves, and what is exported is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interop.tiny_hf import SFT, chatty_folder, load_folder, make_talks
from tests.training.test_experts import logits
from tests.training.test_training_resume import one_device, rows

from bessemer.console import no_progress
from bessemer.generate import load_model
from bessemer.generate.export import export_run, export_run_adapters
from bessemer.job import find_run
from bessemer.storage.weights import WeightFile
from bessemer.training import launch
from bessemer.training.launch import build_trainer

pytestmark = pytest.mark.slow
CASES = ("gemma3", "qwen3-moe", "qwen3.5", "qwen3-next")
GRPO: dict[str, Any] = {
    "job": "GRPOTrainer",
    "objective": "grpo",
    "architecture.block_size": 48,
    "training.batch_size": 8,
    "training.per_device_batch_size": 4,
    "training.steps": 2,
    "training.validation": False,
    "grpo.max_completion_length": 6,
    "grpo.rewards": [{"name": "tests.training.test_families_tuned:letters"}],
    "optimization.name": "adamw",
    "optimization.lr": 0.01,
    "logging.report_interval": 1,
    "logging.progress": "none",
}


def letters(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Something that any text has more or less of."""
    return [sum(ord(letter) % 7 for letter in text) / 7 for text in completions]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    hub = tmp_path_factory.mktemp("hub")
    made = {case: chatty_folder(hub / case, dtype="float32", case=case) for case in CASES}
    for case in ("qwen3.5", "qwen3-next"):
        # their drawn states are read near 0 at some tokens, and normed: with 1e-6 the rounding of a merge was 4.2e-5
        config = made[case] / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.01}))
    return made


def exported(root: Path) -> np.ndarray:
    """Logits of the exported model."""
    export_run(find_run("tuned", root / "runs"), root / "out", "hf", no_progress, dtype="float32")
    return logits(*load_folder(root / "out"))


@pytest.mark.parametrize("how", [{}, {"lora.rank": 2}, {"lora.rank": 2, "lora.quantize": "nf4"}], ids=str)
def test_gemma_is_tuned_whole_and_with_adapters(how: dict[str, Any], folders: Any, tmp_path: Path) -> None:
    given = {"init": str(folders["gemma3"]), "training.dataset": str(make_talks(tmp_path)), "optimization.lr": 0.02}
    trainer = build_trainer(None, {**SFT, **given, **how}, name="tuned", root=tmp_path / "runs")
    trainer.run()
    before, loaded = load_folder(folders["gemma3"]), load_model(trainer.run_directory)
    block = trainer.state.params["blocks_1"]
    if how:
        assert np.abs(np.asarray(block["down"]["lora_b"])).max() > 1e-4
        assert "attention_post_norm" not in block  # norms are frozen
    else:
        for name in ("q", "down", "attention_post_norm", "q_norm"):
            assert np.abs(before[1]["blocks_1"][name] - loaded.params["blocks_1"][name]).max() > 1e-4
    found, wanted = exported(tmp_path), logits(loaded.model, loaded.params)
    assert np.abs(wanted - logits(*before)).max() > 1e-3
    if "lora.quantize" not in how:  # an export merges into the weights at full precision
        assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gemma3_text"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"lora.rank": 2}, marks=pytest.mark.long),
        {"lora.rank": 2, "lora.quantize": "nf4"},
    ],
    ids=str,
)
def test_delta_layers_are_tuned_whole_and_with_adapters(how: dict[str, Any], folders: Any, tmp_path: Path) -> None:
    given = {"init": str(folders["qwen3.5"]), "training.dataset": str(make_talks(tmp_path)), "optimization.lr": 0.02}
    trainer = build_trainer(None, {**SFT, **given, **how}, name="tuned", root=tmp_path / "runs")
    trainer.run()
    before, loaded = load_folder(folders["qwen3.5"]), load_model(trainer.run_directory)
    block = trainer.state.params["blocks_0"]
    if how:
        assert all(np.abs(np.asarray(block[name]["lora_b"])).max() > 1e-4 for name in ("delta_qkv", "delta_out"))
        assert "delta_decay" not in block and "delta_conv" not in block  # frozen
    else:
        for name in ("delta_qkv", "delta_z", "delta_b", "delta_conv", "delta_decay", "delta_dt", "delta_norm"):
            assert np.abs(before[1]["blocks_0"][name] - loaded.params["blocks_0"][name]).max() > 1e-4, name
    found, wanted = exported(tmp_path), logits(loaded.model, loaded.params)
    assert np.abs(wanted - logits(*before)).max() > 1e-3
    if "lora.quantize" not in how:
        assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen3_5_text"
    if how:
        export_run_adapters(trainer.run_directory, tmp_path / "adapters")
        names = set(WeightFile(tmp_path / "adapters" / "adapter_model.safetensors").entries)
        layer = "base_model.model.model.layers.0.linear_attn"
        assert {f"{layer}.{part}.lora_A.weight" for part in ("in_proj_qkv", "in_proj_z", "out_proj")} <= names


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("qwen3-moe", {"lora.rank": 2}),
        ("gemma3", {}),
        pytest.param("qwen3-next", {"lora.rank": 2}, marks=pytest.mark.long),
        pytest.param("qwen3-next", {}, marks=pytest.mark.long),
        pytest.param("qwen3-moe", {}, marks=pytest.mark.long),
        pytest.param("gemma3", {"lora.rank": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_reinforcement_from_a_folder(
    case: str, how: dict[str, Any], folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampler and trainer agree to rounding; of a model with experts the choices are replayed."""
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(12)))
    given = {"init": str(folders[case]), "training.dataset": str(prompts), **GRPO, **how}
    if case == "gemma3":
        given["grpo.temperature"] = 10.0  # its drawn weights make logits of ±50: all samples of a group were the same
    trainer = build_trainer(None, given, name="tuned", root=tmp_path / "runs")
    trainer.run()
    found = [row for row in rows(trainer.run_directory.path) if "loss" in row]
    assert len(found) == 2 and all(row["logprob_gap_max"] < 1e-4 for row in found)
    assert [row.get("routed_apart") for row in found] == ([None, None] if case == "gemma3" else [0, 0])
    assert any(row["flat_groups"] < 1 for row in found) and found[1]["kl"] > 0
    loaded = load_model(trainer.run_directory)
    wanted = logits(loaded.model, loaded.params)
    assert np.abs(wanted - logits(*load_folder(folders[case]))).max() > 1e-3
    assert np.abs(exported(tmp_path) - wanted).max() < 2e-5 * np.abs(wanted).max()
