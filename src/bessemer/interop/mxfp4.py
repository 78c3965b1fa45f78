"""MXFP4 weights of gpt-oss, dequantized as they are read (OCP Microscaling Formats 1.0: E2M1 with E8M0 scales).

X_blocks   (E, rows, groups, 16) uint8, two codes per byte, the first in the low bits
X_scales   (E, rows, groups) uint8, the exponent of 32 codes plus 127; 255 is NaN

weight = code · 2^(scale − 127), (E, rows, 32 · groups), whose transpose (E, fan_in, fan_out) is X
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.storage.weights import DTYPES, WeightFile

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
