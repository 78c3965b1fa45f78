"""Models by their name on the hub (a hub's cache on disk stands in for the network), and adapters for PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tests.interop.tiny_hf import config_of_case, make_folder
from tests.tiny_run import make_run

from bessemer.checkpoint import Checkpoints
from bessemer.errors import InputError, StorageError
from bessemer.generate.export import export_run_adapters
from bessemer.interop.folder import Folder, fetched
from bessemer.job import RunDirectory
from bessemer.storage.weights import WeightFile
from bessemer.training.setup.initial_weights import find_start


def test_a_model_is_found_by_its_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of the hub's own cache: what was downloaded once is used again, without a network."""
    stored = tmp_path / "cache" / "models--acme--tiny"
    (stored / "refs").mkdir(parents=True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    (stored / "refs" / "main").write_text(commit)
    make_folder(stored / "snapshots" / commit, config_of_case("smollm"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Folder(fetched("hf:acme/tiny")).model.hf_type == "llama"
    assert fetched(f"hf:acme/tiny@{commit}") == fetched("hf:acme/tiny@main")
    assert find_start("hf:acme/tiny", tmp_path)[0].name == commit
    with pytest.raises(StorageError, match="hf:acme/other cannot be fetched"):
        fetched("hf:acme/other")
    with pytest.raises(InputError, match="OWNER/NAME"):
        fetched("hf:tiny")


def adapted(root: Path, more: str = "", **trained: np.ndarray) -> RunDirectory:
    """A run whose checkpoint holds adapters, as low-rank training leaves them."""
    run = RunDirectory(root / "adapted").create()
    lora = f"lora: {{rank: 2, alpha: 8.0, rank_stabilized: true{more}}}"
    config = f"model: {{family: llama, vocab_size: 300}}\n{lora}\ninit: models/base\n"
    tree: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for name, array in trained.items():
        block, matrix, part = name.split(".")
        tree.setdefault(block, {}).setdefault(matrix, {})[part] = jnp.asarray(array)
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.save(3, {"params": tree}, files={"config.yaml": config}, wait=True)
    checkpoints.close()
    return run


def test_adapters_are_written_as_peft_reads_them(tmp_path: Path) -> None:
    """y = x W + s·x A B there and here: lora_A is (r, fan_in), lora_B (fan_out, r), s = α/√r by use_rslora."""
    random = np.random.default_rng(0)
    a, b = random.standard_normal((6, 2)).astype("f4"), random.standard_normal((2, 10)).astype("f4")
    run = adapted(tmp_path, **{"blocks_1.up.lora_a": a, "blocks_1.up.lora_b": b})
    export_run_adapters(run, tmp_path / "out")
    file = WeightFile(tmp_path / "out/adapter_model.safetensors")
    module = "base_model.model.model.layers.1.mlp.up_proj"
    assert set(file.entries) == {f"{module}.lora_A.weight", f"{module}.lora_B.weight"}
    np.testing.assert_array_equal(file.read(f"{module}.lora_A.weight"), a.T)
    np.testing.assert_array_equal(file.read(f"{module}.lora_B.weight"), b.T)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["up_proj"]
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 8.0, True)


def test_dora_and_ranks_by_pattern_are_written_as_peft_reads_them(tmp_path: Path) -> None:
    """`lora_magnitude_vector` holds one length per output; matrices of another rank stand in `rank_pattern`."""
    zeros = {"a": np.zeros((6, 2), "f4"), "b": np.zeros((2, 10), "f4"), "m": np.arange(10, dtype="f4")}
    small = {"a": np.zeros((6, 1), "f4"), "b": np.zeros((1, 4), "f4"), "m": np.ones(4, "f4")}
    trained = {f"blocks_0.up.lora_{part}": array for part, array in zeros.items()}
    trained |= {f"blocks_1.q.lora_{part}": array for part, array in small.items()}
    run = adapted(tmp_path, ", dora: true, dropout: 0.25, rank_pattern: {blocks_1/q: 1}", **trained)
    export_run_adapters(run, tmp_path / "out")
    file = WeightFile(tmp_path / "out/adapter_model.safetensors")
    lengths = "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"
    np.testing.assert_array_equal(file.read(lengths), zeros["m"])
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["use_dora"] and config["lora_dropout"] == 0.25
    assert config["rank_pattern"] == {"model.layers.1.self_attn.q_proj": 1}
    assert config["target_modules"] == ["q_proj", "up_proj"]


def test_what_peft_has_no_place_for_is_refused(tmp_path: Path) -> None:
    array = np.zeros((4, 2), "f4")
    run = adapted(tmp_path, **{"blocks_0.q.lora_a": array, "blocks_0.q.whole": array})
    with pytest.raises(InputError, match="'blocks_0/q/whole' is trained but is not an adapter"):
        export_run_adapters(run, tmp_path / "out")
    plain = make_run(tmp_path, steps=(10,))
    with pytest.raises(InputError, match="no adapter"):
        export_run_adapters(plain, tmp_path / "out")
