"""Checkpoints in bitsandbytes' NF4, made here in its layout: read as they are, and what is wrong with one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.interop.tiny_hf import config_of_case, make_folder
from tests.models.test_quantized import BITS, HALVES

from bessemer.errors import InputError
from bessemer.generate.base import read_hashed
from bessemer.interop.folder import Folder
from bessemer.interop.four_bit import QuantizedTensor
from bessemer.kernels.quantized import CODEBOOK, NF4
from bessemer.storage.weights import WeightFile

Q, STATE = "model.layers.0.self_attn.q_proj.weight", ".quant_state.bitsandbytes__nf4"
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Any table does for the scales: the file brings it along. bitsandbytes has 256 values of a dynamic exponent.
TABLE = np.sort(np.concatenate([-np.logspace(-6, 0, 127), [0.0], np.logspace(-6, 0, 128)])).astype(np.float32)


def packed(w: np.ndarray, nested: bool) -> dict[str, np.ndarray]:
    """The parts of a matrix (fan_out, fan_in), blocks of 64 along its rows."""
    blocks, table = w.astype(np.float32).reshape(-1, 64), np.array(CODEBOOK, np.float32)
    absmax = np.abs(blocks).max(1)
    codes = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(-1).astype(np.uint8).reshape(-1)
    about: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape)}
    parts = {"": (codes[::2] << 4 | codes[1::2])[:, None], ".quant_map": table, ".absmax": absmax}
    if nested:
        offset = float(absmax.mean(dtype=np.float32))
        away = np.resize(absmax - offset, (-(-absmax.size // 256), 256))
        steps = np.abs(away).max(1)
        small = np.abs((away / steps[:, None])[..., None] - TABLE).argmin(-1).astype(np.uint8).reshape(-1)
        parts |= {".absmax": small[: absmax.size], ".nested_absmax": steps, ".nested_quant_map": TABLE}
        about |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return parts | {STATE: np.frombuffer(json.dumps(about).encode(), np.uint8)}


def make_quantized(source: Path, target: Path, nested: bool = True) -> Path:
    """The folder with its projections in 4 bits, as transformers' save_pretrained leaves them."""
    shutil.copytree(source, target)
    tensors: dict[str, np.ndarray] = {}
    for name, array in load_file(source / "model.safetensors").items():
        parts = packed(array, nested) if "_proj.weight" in name else {"": array}
        tensors |= {name + part: np.ascontiguousarray(value) for part, value in parts.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    edit(target, quantization_config={**CONFIG, "bnb_4bit_use_double_quant": nested})
    return target


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 262, "eos_token_id": 0, "hidden_size": 128, "intermediate_size": 256}
    return make_folder(tmp_path_factory.mktemp("plain") / "m", {**config_of_case("qwen2"), **sizes}, dtype="float32")


@pytest.fixture(scope="module", params=[True, False], ids=["double", "single"])
def quantized(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_quantized(plain, tmp_path_factory.mktemp("bnb") / "m", request.param)


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """One that a test may damage."""
    return make_quantized(plain, tmp_path / "m")


def test_a_stored_vector_is_dequantized_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    """Codes 0 to 15, four times, with the scale 0.75: by hand from the constants of the paper (test_quantized.py)."""
    tensors = {Q: np.tile(np.array([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF], np.uint8), 4)[:, None]}
    tensors |= {Q + ".quant_map": np.array(CODEBOOK, np.float32), Q + ".absmax": np.array([0.75], np.float32)}
    for dtype, kind, bits in (("float32", np.uint32, BITS), ("bfloat16", np.uint16, HALVES)):
        about = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": [1, 64]}
        state = {Q + STATE: np.frombuffer(json.dumps(about).encode(), np.uint8)}
        save_file(tensors | state, tmp_path / "one.safetensors")
        file = WeightFile(tmp_path / "one.safetensors")
        found = QuantizedTensor.of(Q, dict.fromkeys(file.entries, file)).read(file.read)
        width = 2 * np.dtype(kind).itemsize
        assert " ".join(f"{value:0{width}x}" for value in found[0, :16].view(kind)) == bits


def test_weights_are_dequantized_as_they_are_read(quantized: Path, plain: Path) -> None:
    """Constant × scale, rounded to the dtype that the file names; near the original; ours keeps their codes."""
    folder, original, stored = Folder(quantized), Folder(plain), load_file(quantized / "model.safetensors")
    assert folder.settings["model/weights_dtype"] == "float32"  # of what is not quantized
    assert folder.signature()["blocks_0/q"] == ("bfloat16", (128, 128))
    for name, (tensor,) in folder.tensors.items():
        got, want = folder.read(name), original.read(name)
        if tensor.theirs not in folder.quantized:
            np.testing.assert_array_equal(got, want)
            continue
        assert np.abs(got.astype(np.float32) - want).max() < 0.2 * np.abs(want).max()
        codes = np.asarray(NF4.of(jnp.asarray(got)).codes)
        theirs = stored[tensor.theirs].reshape(tensor.their_shape[0], -1).T
        np.testing.assert_array_equal(codes, theirs)


def test_the_hash_of_a_tensor_is_of_all_its_parts(copy: Path) -> None:
    before = read_hashed(Folder(copy), "blocks_0/q")[1]
    assert before == read_hashed(Folder(copy), "blocks_0/q")[1]
    for part in ("", ".absmax", ".nested_absmax", STATE):
        tensors = load_file(copy / "model.safetensors")
        damaged = dict(tensors)
        flat = damaged[Q + part].copy().reshape(-1)
        if part == STATE:
            flat = np.frombuffer(flat.tobytes() + b" ", np.uint8)
        else:
            flat.view(np.uint8)[-1] ^= 1
        damaged[Q + part] = flat if part == STATE else flat.reshape(tensors[Q + part].shape)
        save_file(damaged, copy / "model.safetensors")
        assert read_hashed(Folder(copy), "blocks_0/q")[1] != before, part
        save_file(tensors, copy / "model.safetensors")


def about(**values: Any) -> Callable[[dict[str, np.ndarray]], None]:
    """Change values in the JSON of one tensor."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        state = json.loads(tensors[Q + STATE].tobytes()) | values
        tensors[Q + STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)

    return change


def part(name: str, value: np.ndarray | None) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(Q + name)
        if value is not None:
            tensors[Q + name] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (about(shape=[128, "x"]), ("shape", "two sizes")),
        (about(shape=[2**40, 2]), ("shape", "two sizes")),
        (about(shape=[64, 128]), ("must be 4096 values of uint8",)),
        (about(blocksize=0), ("blocksize is 0", "even number")),
        (about(blocksize=True), ("blocksize",)),
        (about(quant_type="fp4"), ("quant_type is fp4",)),
        (about(dtype="int8"), ("dtype is int8", "bfloat16")),
        (about(nested_offset="nan"), ("nested_offset", "finite")),
        (about(nested_offset=10**400), ("nested_offset", "finite")),
        (about(nested_offset=1e39), ("nested_offset", "finite")),
        (part(".nested_absmax", np.full(1, np.nan, np.float32)), ("the scales of", "NaN")),
        (about(nested_blocksize=128), (".nested_absmax", "must be 2 values")),
        (part(STATE, np.frombuffer(b"[1]", np.uint8)), ("holds list",)),
        (part(STATE, np.frombuffer(b"{", np.uint8)), ("not JSON",)),
        (part(STATE, np.zeros(3, np.float32)), ("JSON as bytes",)),
        (part(".absmax", None), (".absmax' is missing",)),
        (part(".absmax", np.zeros(256, np.float32)), ("must be 256 values of uint8",)),
        (part(".quant_map", np.zeros(16, np.float32)), (".quant_map' is not the table of NF4",)),
        (part("", np.zeros((5, 1), np.uint8)), ("must be 8192 values of uint8",)),
        (part("", None), ("and no",)),
    ],
)
def test_what_is_malformed_names_file_and_key(copy: Path, change: Callable[..., None], words: tuple[str, ...]) -> None:
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(InputError) as caught:
        Folder(copy).read("blocks_0/q")
    for word in ("model.safetensors", Q, *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ weights"),
        ({"quant_method": "awq", "bits": 4}, "AWQ weights"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"bits": 4}, "an unnamed method"),
        ({**CONFIG, "load_in_4bit": False, "load_in_8bit": True}, "8-bit bitsandbytes"),
        ({**CONFIG, "load_in_4bit": "false"}, "load_in_4bit is 'false', and must be true or false"),
        ({**CONFIG, "load_in_8bit": "false"}, "load_in_8bit is 'false'"),
        ({**CONFIG, "bnb_4bit_quant_type": "fp4"}, "not fp4"),
        ({**CONFIG, "bnb_4bit_quant_storage": "bfloat16"}, "in bfloat16"),
        (7, "must be an object"),
    ],
)
def test_other_quantizations_are_refused_by_name(copy: Path, config: Any, words: str) -> None:
    edit(copy, quantization_config=config)
    with pytest.raises(InputError, match=words) as caught:
        Folder(copy).signature()
    assert "config.json" in str(caught.value)
    if isinstance(config, dict):
        assert "lora.quantize=nf4" in str(caught.value)
