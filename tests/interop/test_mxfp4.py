"""MXFP4 weights of gpt-oss: numbers that transformers made, whole folders, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.tiny_hf import STORED, load_folder, make_folder, their_shapes
from tests.reference.huggingface import drawn

from bessemer.errors import BessemerError, InputError
from bessemer.interop.folder import Folder
from bessemer.interop.four_bit import dequantize
from bessemer.storage.weights import write_file

VECTOR = json.loads((Path(__file__).parents[1] / "reference" / "mxfp4.json").read_text())
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}


def test_dequantized_values_are_those_of_transformers() -> None:
    blocks, scales = (np.array(VECTOR[name], np.uint8) for name in ("blocks", "scales"))
    made = np.stack([dequantize(*parts).T for parts in zip(blocks, scales, strict=True)])
    np.testing.assert_array_equal(made, np.array(VECTOR["values"], np.float32))


def pack(name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random codes of a stack (E, fan_in, fan_out)."""
    random = np.random.default_rng(len(name))
    experts, fan_in, fan_out = shape
    groups = (experts, fan_out, fan_in // 32)
    return {
        f"{name}_blocks": random.integers(0, 256, (*groups, 16)).astype(np.uint8),
        f"{name}_scales": random.integers(122, 127, groups).astype(np.uint8),
    }


def packed_folder(path: Path, change: Any = lambda arrays: None, method: str = "mxfp4") -> Path:
    """A folder whose experts are quantized; `change` edits its arrays."""
    config = {**STORED["gpt-oss"]["config"], **SIZES, "layer_types": ["sliding_attention"]}
    arrays: dict[str, np.ndarray] = {}
    for name, shape in their_shapes(config).items():
        arrays |= pack(name, shape) if name.endswith(("gate_up_proj", "down_proj")) else {name: drawn(name, shape)}
    change(arrays)
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    entries = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    write_file(path / "model.safetensors", entries, arrays.__getitem__, {"format": "pt"})
    return path


def test_a_quantized_folder_is_read_as_its_dequantized_weights(tmp_path: Path) -> None:
    kept: dict[str, np.ndarray] = {}
    model, params = load_folder(packed_folder(tmp_path / "hf", kept.update))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks, scales = kept[f"{name}_blocks"], kept[f"{name}_scales"]
    wanted = np.stack([dequantize(*parts).T for parts in zip(blocks, scales, strict=True)])
    np.testing.assert_array_equal(np.asarray(params["blocks_0"]["expert_gate_up"], np.float32), wanted)
    logits = jax.jit(model.apply)({"params": params}, np.arange(6)[None])
    assert np.isfinite(np.asarray(logits)).all()


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda a: a.pop(f"{GATE_UP}_scales"), "no '.*_scales'"),
        (lambda a: a.pop(f"{GATE_UP}_blocks"), "gate_up_proj"),
        (lambda a: a.update({f"{GATE_UP}_scales": a[f"{GATE_UP}_scales"][:, :-1]}), "calls for"),
        (lambda a: a.update({f"{GATE_UP}_blocks": a[f"{GATE_UP}_blocks"][..., :8]}), "must be .experts, rows"),
        (lambda a: a.update({f"{GATE_UP}_blocks": a[f"{GATE_UP}_blocks"][:, :-2]}), "calls for"),
        (lambda a: a.update({f"{GATE_UP}_blocks": a[f"{GATE_UP}_blocks"].astype(np.float32)}), "stored in uint8"),
        (lambda a: a.update({GATE_UP: np.zeros((5, 64, 64), np.float32)}), "which .* has too"),
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_read(change: Any, problem: str, tmp_path: Path) -> None:
    folder = Folder(packed_folder(tmp_path / "hf", change))
    with pytest.raises(BessemerError, match=problem) as error:
        folder.signature()
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(("scale", "problem"), [(255, "NaN"), (253, "bfloat16 cannot hold")])
def test_a_scale_that_is_no_finite_weight_is_refused(scale: int, problem: str, tmp_path: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"{GATE_UP}_scales"][0, 0, 0] = scale

    folder = Folder(packed_folder(tmp_path / "hf", change))
    with pytest.raises(InputError, match=f"gate_up_proj_scales.*{problem}"):
        folder.read("blocks_0/expert_gate_up")


def test_another_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config.json.*gptq|GPTQ"):
        Folder(packed_folder(tmp_path / "hf", method="gptq")).signature()


@pytest.mark.parametrize(
    ("key", "value"),
    [("swiglu_limit", 0), ("swiglu_alpha", "1"), ("num_experts_per_tok", 9), ("layer_types", ["S"]), ("head_dim", 3)],
)
def test_a_malformed_configuration_names_file_and_key(key: str, value: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", STORED["gpt-oss"]["config"])
    (folder / "config.json").write_text(json.dumps({**STORED["gpt-oss"]["config"], key: value}))
    with pytest.raises(InputError, match=f"config.json: {key}"):
        Folder(folder).signature()
