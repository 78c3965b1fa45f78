"""Programs compiled as far as a machine without a GPU can: every Triton program is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

H100 = AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="cuda")


def lowered_for_a_gpu(function: Callable[..., Any], *args: Any) -> str:
    """The text of the program of `function` for arguments of these shapes. jax.default_backend must say "gpu"."""
    # From jax 0.11 on, kernels are lowered for a GPU that is here, or one that is named.
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
