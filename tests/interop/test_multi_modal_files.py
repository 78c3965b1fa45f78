"""Text models inside multi-modal checkpoints: qwen3.5 with its vision tower and multi-token prediction left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.interop.tiny_hf import make_folder
from tests.reference.huggingface import MORE, SIZES, drawn

from bessemer.errors import InputError
from bessemer.interop.folder import Folder, import_folder
from bessemer.training.setup.initial_weights import find_start

CONFIG = {**SIZES, **MORE["qwen3.5-moe-tied"]}
EXTRA = {
    "model.visual.blocks.0.attn.qkv.weight": (12, 4),
    "model.visual.merger.norm.bias": (4,),
    "mtp.fc.weight": (8, 4),
}


def wrapped(path: Path, plain: Folder) -> Path:
    """The weights of `plain` as the hub's files hold them: another prefix, stacked experts, other parts beside them."""
    arrays = {name: file.read(name) for name, file in plain.files.items()}
    experts = [name for name in arrays if ".mlp.experts." in name]
    made = {name: array for name, array in arrays.items() if name not in experts}
    for stack in sorted({name.split(".experts.")[0] for name in experts}):
        parts: dict[str, list[np.ndarray]] = {
            part: [arrays[f"{stack}.experts.{e}.{part}.weight"] for e in range(CONFIG["num_experts"])]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = [np.concatenate(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        made[f"{stack}.experts.gate_up_proj"] = np.stack(both)
        made[f"{stack}.experts.down_proj"] = np.stack(parts["down_proj"])
    made = {name.replace("model.", "model.language_model.", 1): array for name, array in made.items()}
    made |= {name: drawn(name, shape) for name, shape in EXTRA.items()}
    path.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in made.items()}, path / "model.safetensors")
    whole: dict[str, Any] = {"model_type": "qwen3_5_moe", "text_config": CONFIG, "vision_config": {"depth": 1}}
    (path / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": True}))
    return path


def test_the_text_model_of_a_multi_modal_checkpoint_is_the_text_model_alone(tmp_path: Path) -> None:
    plain = Folder(make_folder(tmp_path / "text", CONFIG))
    folder = Folder(wrapped(tmp_path / "whole", plain))
    assert folder.settings == plain.settings and folder.settings["model/hf_type"] == "qwen3_5_moe_text"
    assert folder.signature() == plain.signature()
    for name in plain.signature():
        np.testing.assert_array_equal(folder.read(name), plain.read(name), err_msg=name)
    _, lines = import_folder(folder.path, tmp_path / "run")
    assert "left out   2 weights of the vision tower: they have no place here" in lines
    assert "left out   1 weights of multi-token prediction: they have no place here" in lines
    _, noted = find_start(str(folder.path), tmp_path, "init")  # as a run from it prints
    assert noted == [f"init: {line}" for line in lines if line.startswith("left out")]


def test_a_multi_modal_configuration_without_its_text_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "vision_config": {}}))
    with pytest.raises(InputError, match="'qwen3_5' needs 'text_config'"):
        _ = Folder(tmp_path, needs_weights=False).settings
