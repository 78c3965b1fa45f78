"""Accelerators and their published peaks, for MFU and for plans, and the backend that programs are traced for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Chip:
    """Published peaks of one JAX device, dense (no structured sparsity).

    `link_bytes_s` is one direction, all links of the device together. `fp8_flops` is None where float8 is not faster.
    Consumer cards are listed with float32 accumulation, which training uses (half of the advertised figure).
    """

    name: str
    memory_gib: float
    bf16_flops: float
    fp8_flops: float | None
    hbm_bytes_s: float
    link_bytes_s: float

    def peak_flops(self, precision: str = "bf16") -> float:
        """Return the denominator of MFU: for fp8 runs the fp8 peak, or their MFU would be too high."""
        if precision == "fp8" and self.fp8_flops is not None:
            return self.fp8_flops
        return self.bf16_flops


_T = 1e12
_G = 1e9

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("H100", 80, 989.4 * _T, 1978.9 * _T, 3.35 * _T, 450 * _G),
        Chip("H100 PCIe", 80, 756 * _T, 1513 * _T, 2.0 * _T, 300 * _G),
        Chip("H100 NVL", 94, 835 * _T, 1671 * _T, 3.9 * _T, 300 * _G),
        Chip("H200", 141, 989.4 * _T, 1978.9 * _T, 4.8 * _T, 450 * _G),
        Chip("H200 NVL", 141, 835 * _T, 1671 * _T, 4.8 * _T, 450 * _G),
        Chip("B200", 180, 2250 * _T, 4500 * _T, 8.0 * _T, 900 * _G),
        Chip("A100 80GB", 80, 312 * _T, None, 2.039 * _T, 300 * _G),
        Chip("A100 40GB", 40, 312 * _T, None, 1.555 * _T, 300 * _G),
        Chip("L40S", 48, 362 * _T, 733 * _T, 0.864 * _T, 32 * _G),
        Chip("RTX 4090", 24, 165.2 * _T, 330.3 * _T, 1.008 * _T, 32 * _G),
        Chip("RTX 5090", 32, 209.5 * _T, 419 * _T, 1.792 * _T, 64 * _G),
        Chip("TPU v4", 32, 275 * _T, None, 1.228 * _T, 300 * _G),
        Chip("TPU v5e", 16, 197 * _T, None, 0.819 * _T, 200 * _G),
        Chip("TPU v5p", 95, 459 * _T, None, 2.765 * _T, 600 * _G),
        Chip("TPU v6e", 32, 918 * _T, None, 1.64 * _T, 448 * _G),
        # JAX shows each of a v7x chip's two chiplets as a device: half of the published 2307/4614 TFLOP/s, 192 GiB.
        Chip("TPU v7x", 96, 1153.5 * _T, 2307 * _T, 3.69 * _T, 300 * _G),
    )
}

# Matched against the lower-case device kind; the first match wins, so narrower names come first.
_KINDS: tuple[tuple[str, str], ...] = (
    (r"\bh200\b.*\bnvl\b", "H200 NVL"),
    (r"\bh200\b", "H200"),
    (r"\bh100\b.*\bpcie\b", "H100 PCIe"),
    (r"\bh100\b.*\bnvl\b", "H100 NVL"),
    (r"\bh100\b", "H100"),
    (r"\bb200\b", "B200"),
    (r"\ba100\b.*\b80gb\b", "A100 80GB"),
    (r"\ba100\b", "A100 40GB"),
    (r"\bl40s\b", "L40S"),
    (r"\brtx\s*4090\b(?!\s*(d\b|laptop))", "RTX 4090"),
    (r"\brtx\s*5090\b(?!\s*(d\b|laptop))", "RTX 5090"),
    (r"\btpu\s*v4\b(?!\s*lite)", "TPU v4"),
    (r"\btpu\s*v5\s*(lite|e)\b", "TPU v5e"),
    (r"\btpu\s*v5p?\b", "TPU v5p"),
    (r"\btpu\s*v6\s*(lite|e)\b", "TPU v6e"),
    (r"\btpu\s*v?7x?\b", "TPU v7x"),
)


def chip_of(device: Any) -> Chip | None:
    """Return the chip of a device or device-kind string; None if it is unknown, and then MFU is too."""
    kind = device if isinstance(device, str) else str(getattr(device, "device_kind", ""))
    kind = kind.lower().replace("-", " ").replace("_", " ")
    for pattern, name in _KINDS:
        if re.search(pattern, kind):
            return CHIPS[name]
    return None


def has_float8(device: Any) -> bool:
    """Return whether a device multiplies in float8, by its compute capability, or by the table if it has none."""
    capability = getattr(device, "compute_capability", None)
    if capability is not None:
        return float(capability) >= 8.9  # Ada, Hopper, Blackwell
    chip = chip_of(device)
    return chip is not None and chip.fp8_flops is not None


_planned: ContextVar[tuple[str, Any] | None] = ContextVar("planned_backend", default=None)


def backend() -> str:
    """Return `cpu`, `gpu` or `tpu`: what programs are traced for, which chooses dtypes, tiles and kernels."""
    planned = _planned.get()
    return jax.default_backend() if planned is None else planned[0]


def traced_device() -> Any:
    """Return a device that programs are traced for; None in a plan without a compiler, which has none."""
    planned = _planned.get()
    return jax.devices()[0] if planned is None else planned[1]


@contextmanager
def planned_for(platform: str, device: Any = None) -> Iterator[None]:
    """Trace programs as for `platform`, so that a plan compiles what would run there; they cannot run here.

    device: a compile-only one, which kernels ask what it can do.
    """
    token = _planned.set((platform, device))
    try:
        yield
    finally:
        _planned.reset(token)
