"""4-bit weights as other programs save them, dequantized as they are read: bitsandbytes' NF4 and gpt-oss' MXFP4.

As bitsandbytes saves them and transformers writes them (NF4):

    X.weight                                  (numel/2, 1) uint8, two codes per byte, the first in the high bits
    X.weight.absmax                           a scale per block of 64: float32, or uint8 if they are quantized again
    X.weight.quant_map                        (16,) float32, the constants
    X.weight.nested_absmax, .nested_quant_map (blocks of 256 scales) and (256,) float32, for quantized scales
    X.weight.quant_state.bitsandbytes__nf4    JSON as bytes: shape, dtype, blocksize, nested_offset, …

Blocks run along the rows of (fan_out, fan_in). The same constants and blocks are ours (kernels/quantized.py), so a
matrix that is quantized again keeps its codes.

MXFP4 (OCP Microscaling Formats 1.0: E2M1 with E8M0 scales):

    X_blocks   (E, rows, groups, 16) uint8, two codes per byte, the first in the low bits
    X_scales   (E, rows, groups) uint8, the exponent of 32 codes plus 127; 255 is NaN

weight = code · 2^(scale − 127), (E, rows, 32 · groups), whose transpose (E, fan_in, fan_out) is X
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.kernels.quantized import CODEBOOK
from bessemer.storage.weights import DTYPES, FLOATS, WeightFile

# --- bitsandbytes ---


STATE = ".quant_state.bitsandbytes__nf4"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE)
METHOD = "bitsandbytes"
LONGEST_STATE = 2**16  # bytes; real ones have 200
LARGEST = float(np.finfo(np.float32).max)
INSTEAD = {"gptq": "GPTQ weights are not read", "awq": "AWQ weights are not read"}


def check_method(config: Mapping[str, Any], where: str) -> bool:
    """Return whether `quantization_config` says bitsandbytes NF4; raise InputError for any other."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if not isinstance(config.get(key, False), bool):
            raise _refused(where, f"{key} is {str(config[key])[:80]!r}, and must be true or false, without quotes")
    method = str(config.get("quant_method", "")).lower()
    if method == METHOD or (not method and config.get("load_in_4bit")):
        if not config.get("load_in_4bit") or config.get("load_in_8bit"):
            raise _refused(where, "8-bit bitsandbytes weights (LLM.int8) are not read")
        kind, storage = config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_quant_storage", "uint8")
        if kind != "nf4" or storage != "uint8":
            raise _refused(where, f"of bitsandbytes weights nf4 in uint8 is read, not {kind} in {storage}")
        return True
    raise _refused(where, INSTEAD.get(method, f"weights quantized with '{method or 'an unnamed method'}' are not read"))


def _refused(where: str, what: str) -> InputError:
    return InputError(
        f"{where}: quantization_config: {what}. Use the model's original weights (bf16, f16 or f32), and quantize them "
        "here with lora.quantize=nf4 or int8; a bitsandbytes NF4 checkpoint is read too."
    )


def is_part(name: str) -> bool:
    """Return whether a tensor belongs to a quantized one."""
    return name.endswith(PARTS)


@dataclass(frozen=True)
class QuantizedTensor:
    """One quantized weight; `files` gives the file of each tensor by name."""

    name: str
    files: Mapping[str, WeightFile]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: int
    nested_block: int  # 0: scales are float32
    offset: float

    @classmethod
    def of(cls, name: str, files: Mapping[str, WeightFile]) -> QuantizedTensor:
        """Check everything but the values of codes and scales; only the JSON is read."""
        key = name + STATE
        state = _Parsed(_read_state(files, key), f"{files[key].path}: '{key}'")
        shape, dtype = state.shape(), state.dtype()
        block, nested = state.count("blocksize"), state.count("nested_blocksize", 0)
        found = cls(name, files, shape, dtype, block, nested, state.number("nested_offset", 0.0))
        if state.values.get("quant_type") != "nf4":
            raise state.wrong("quant_type", "must be nf4")
        count = math.prod(shape)
        if count % 2 or count % block:
            raise state.wrong("shape", f"must have whole blocks of {block}")
        blocks = count // block
        found._expect("", "uint8", count // 2)
        found._expect(".quant_map", "float32", 16)
        found._expect(".absmax", "uint8" if nested else "float32", blocks)
        if nested:
            found._expect(".nested_absmax", "float32", -(-blocks // nested))
            found._expect(".nested_quant_map", "float32", 256)
        return found

    def _expect(self, part: str, dtype: str, size: int) -> None:
        key = self.name + part
        if key not in self.files:
            raise InputError(f"{self.files[self.name].path}: '{key}' is missing; '{self.name}' cannot be dequantized.")
        entry = self.files[key].entries[key]
        if str(entry.dtype) != dtype or math.prod(entry.shape) != size:
            raise InputError(
                f"{self.files[key].path}: '{key}' is {entry.dtype} {entry.shape}; it must be {size} values of {dtype}."
            )

    @property
    def parts(self) -> list[str]:
        """Names of the tensors it is made of."""
        return [self.name, *(self.name + part for part in PARTS if self.name + part in self.files)]

    def read(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return the matrix in its own dtype, from its parts; constant × scale is made in float32 and rounded once."""
        values, scales = read(self.name + ".quant_map").reshape(-1), read(self.name + ".absmax").reshape(-1)
        if not np.array_equal(values, np.array(CODEBOOK, np.float32)):
            raise InputError(
                f"{self.files[self.name].path}: '{self.name}.quant_map' is not the table of NF4; the file is damaged, "
                "or of another kind of quantization."
            )
        if self.nested_block:
            table, steps = (read(self.name + part).reshape(-1) for part in (".nested_quant_map", ".nested_absmax"))
            scales = table[scales] * np.repeat(steps, self.nested_block)[: scales.size] + np.float32(self.offset)
        if not np.isfinite(scales).all():
            raise InputError(
                f"{self.files[self.name].path}: the scales of '{self.name}' (.absmax) hold NaN or infinite values."
            )
        packed = read(self.name).reshape(-1, self.block // 2)
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1, self.block)
        return (values[codes] * scales[:, None].astype(np.float32)).astype(self.dtype).reshape(self.shape)


def _read_state(files: Mapping[str, WeightFile], key: str) -> Mapping[str, Any]:
    entry, path = files[key].entries[key], files[key].path
    if str(entry.dtype) != "uint8" or entry.size > LONGEST_STATE:
        raise InputError(f"{path}: '{key}' is {entry.dtype} {entry.shape}; it must be JSON as bytes.")
    try:
        state = json.loads(files[key].read(key).tobytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: '{key}' is not JSON ({error}).") from error
    if not isinstance(state, dict):
        raise InputError(f"{path}: '{key}' holds {type(state).__name__}, not an object.")
    return state


@dataclass(frozen=True)
class _Parsed:
    """The JSON of one tensor; every value is checked before anything is allocated from it."""

    values: Mapping[str, Any]
    where: str

    def wrong(self, key: str, what: str) -> InputError:
        return InputError(f"{self.where}: {key} is {str(self.values.get(key))[:80]}; it {what}.")

    def count(self, key: str, default: int | None = None) -> int:
        found = self.values.get(key, default)
        least = 2 if default is None else 0
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= 2**20 or found % 2:
            raise self.wrong(key, f"must be an even number of at least {least}")
        return found

    def number(self, key: str, default: float) -> float:
        found = self.values.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= LARGEST:
            raise self.wrong(key, "must be a finite number")
        return float(found)

    def shape(self) -> tuple[int, ...]:
        found = self.values.get("shape")
        sizes = found if isinstance(found, list) else []
        if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
            raise self.wrong("shape", "must be two sizes")
        return tuple(sizes)

    def dtype(self) -> np.dtype[Any]:
        found = self.values.get("dtype")
        if found not in FLOATS:
            raise self.wrong("dtype", f"must be one of {', '.join(FLOATS)}")
        return next(dtype for dtype in DTYPES.values() if str(dtype) == found)


# --- MXFP4 ---


BLOCKS, SCALES = "_blocks", "_scales"
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BYTES = 16  # of a block
OFFSET, NOT_A_NUMBER = 127, 255
LARGEST_SCALE = OFFSET + 125  # 6 · 2^125 is the largest product that float32 and bfloat16 hold
BFLOAT16: np.dtype[Any] = next(dtype for dtype in DTYPES.values() if str(dtype) == "bfloat16")


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether `quantization_config` says MXFP4."""
    return str(config.get("quant_method", "")).lower() == "mxfp4"


def is_mxfp4_part(name: str) -> bool:
    """Return whether a tensor belongs to a quantized one."""
    return name.endswith((BLOCKS, SCALES))


@dataclass(frozen=True)
class Mxfp4Tensor:
    """One quantized stack; `files` gives the file of each tensor by name."""

    name: str
    files: Mapping[str, WeightFile]
    shape: tuple[int, ...]  # (E, fan_in, fan_out)
    dtype: np.dtype[Any] = BFLOAT16

    @classmethod
    def of(cls, name: str, files: Mapping[str, WeightFile]) -> Mxfp4Tensor:
        """Check dtypes and shapes from the headers; nothing is read."""
        blocks = name + BLOCKS
        if name in files:
            raise InputError(f"{files[blocks].path}: '{blocks}' stands for '{name}', which {files[name].path} has too.")
        shape = _entry(files, blocks, blocks)
        if len(shape) != 4 or shape[3] != BYTES or 0 in shape:
            raise InputError(
                f"{files[blocks].path}: '{blocks}' has shape {shape}; it must be (experts, rows, groups, {BYTES})."
            )
        scales = name + SCALES
        if _entry(files, scales, blocks) != shape[:3]:
            raise InputError(
                f"{files[scales].path}: '{scales}' has shape {files[scales].entries[scales].shape}; '{blocks}' calls "
                f"for {shape[:3]}."
            )
        experts, rows, groups, _ = shape
        return cls(name, files, (experts, 2 * BYTES * groups, rows))

    @property
    def parts(self) -> list[str]:
        """Names of the tensors it is made of."""
        return [self.name + BLOCKS, self.name + SCALES]

    def read(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return the stack (E, fan_in, fan_out); bfloat16 holds every value exactly."""
        blocks, scales = (read(part) for part in self.parts)
        if scales.max() > LARGEST_SCALE:
            what = "NaN (255)" if NOT_A_NUMBER in scales else f"above {LARGEST_SCALE}, which bfloat16 cannot hold"
            part = self.parts[1]
            raise InputError(f"{self.files[part].path}: '{part}' holds scales that are {what}.")
        out = np.empty(self.shape, self.dtype)
        for expert in range(len(out)):  # the float32 values of one expert at a time
            out[expert] = dequantize(blocks[expert], scales[expert]).T
        return out


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return float32 (rows, 32 · groups). blocks: (rows, groups, 16) uint8; scales: (rows, groups) uint8."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 2 * BYTES)
    values = np.ldexp(CODES[codes], scales.astype(np.int32)[..., None] - OFFSET)
    return values.reshape(scales.shape[0], -1)


def _entry(files: Mapping[str, WeightFile], name: str, beside: str) -> tuple[int, ...]:
    if name not in files:
        raise InputError(f"{files[beside].path} has '{beside}' and no '{name}'.")
    entry = files[name].entries[name]
    if str(entry.dtype) != "uint8":
        raise InputError(f"{files[name].path}: '{name}' is {entry.dtype}; MXFP4 is stored in uint8.")
    return tuple(entry.shape)
