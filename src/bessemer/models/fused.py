"""Norms joined with what comes before them, in plain JAX or by the one-pass kernels; the same numbers either way.

A decode step has one token a row: it is over before a kernel's programs are spread, and XLA joins more of its
neighbours. The kernels are for many.

The kernels see rows of one device: on a mesh they run under `shard_map`, each device on its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from bessemer.models import blocks, kernels, rotary_kernel
from bessemer.models.axes import mesh_axes, shards
from bessemer.topology.backend import backend

Implementation = str  # "xla" or "pallas"


def choose_kernels(setting: str, dtype: Any) -> Implementation:
    """`architecture/kernels`: auto takes the one-pass kernels on a GPU in half precision."""
    if setting != "auto":
        return setting
    return "pallas" if backend() == "gpu" and dtype == jnp.bfloat16 else "xla"


def mix_norm(
    x: Array, x0: Array, rho: Array, xi: Array, implementation: Implementation
) -> tuple[Array, Array, Array]:
    """x ← ρx + ξx0; (x, norm x, x0). x, x0: (B, T, D). x0 is handed on: see kernels.mix_norm."""
    if _can(x, implementation):
        return on_rows(kernels.mix_norm, (x, x0), (rho, xi), 3)
    x = (rho * x + xi * x0).astype(x.dtype)
    return x, blocks.rms_norm(x), x0


def add_norm(x: Array, z: Array, implementation: Implementation) -> tuple[Array, Array]:
    """x ← x + z; (x, norm x). x, z: (B, T, D)."""
    if _can(x, implementation):
        return on_rows(kernels.add_norm, (x, z), (), 2)
    x = x + z
    return x, blocks.rms_norm(x)


def can_pack(head_dim: int, implementation: Implementation) -> bool:
    """Whether queries, keys and values are made by one matmul and one kernel: heads must not be split over devices."""
    return implementation == "pallas" and kernels.suits(head_dim // 2) and shards("heads") * shards("kv") == 1


def unpack_rotate_norm(
    packed: Array, rotary: tuple[Array, Array], heads: int, kv_heads: int, scale: float
) -> tuple[Array, Array, Array]:
    """q, k = scale · norm(rotate(·)) and v of (B, T, (N + 2K)·H) → (B, T, N, H), (B, T, K, H), (B, T, K, H)."""
    half = rotary[0].shape[-1]
    if _is_step(packed):
        q, k, v = (
            part.reshape(*packed.shape[:2], -1, 2 * half)
            for part in jnp.split(packed, (2 * half * heads, 2 * half * (heads + kv_heads)), axis=-1)
        )
        return blocks.rotate_norm(q, *rotary, scale), blocks.rotate_norm(k, *rotary, scale), v

    def rows(packed: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
        tables = (table.reshape(-1, half) for table in (cos, sin))
        parts = rotary_kernel.rotate_norm(
            packed.reshape(-1, packed.shape[-1]), *tables, heads, kv_heads, scale
        )
        return tuple(part.reshape(*packed.shape[:2], -1, 2 * half) for part in parts)

    tables = [jnp.broadcast_to(t[:, :, 0], (*packed.shape[:2], half)) for t in rotary]
    q, k, v = on_parts(rows, (packed, *tables), (), 3)
    return q, k, v


def _can(x: Array, implementation: Implementation) -> bool:
    fits = x.shape[0] % shards("batch") == 0 and x.shape[1] % shards("sequence") == 0
    return implementation == "pallas" and kernels.suits(x.shape[-1]) and fits and not _is_step(x)


def _is_step(x: Array) -> bool:
    return x.shape[1] == 1


def on_rows(
    kernel: Callable[..., Any], tensors: tuple[Array, ...], whole: tuple[Array, ...], outputs: int
) -> Any:
    """`kernel` on (B·T, …) rows of (B, T, …) tensors, beside what every device has whole."""

    def rows(*args: Array) -> tuple[Array, ...]:
        local = [x.reshape(-1, x.shape[-1]) for x in args[: len(tensors)]]
        results = kernel(*local, *args[len(tensors) :])
        return tuple(y.reshape(*args[0].shape[:2], y.shape[-1]) for y in results)

    return on_parts(rows, tensors, whole, outputs)


def on_parts(
    function: Callable[..., Any], tensors: tuple[Array, ...], whole: tuple[Array, ...], outputs: int
) -> Any:
    """`function` on the parts of (B, T, …) tensors that a device has, beside what every device has whole."""
    spec = PartitionSpec(mesh_axes("batch"), mesh_axes("sequence"))
    in_specs = (spec,) * len(tensors) + (PartitionSpec(),) * len(whole)
    return _shard_map(function, in_specs, (spec,) * outputs)(*tensors, *whole)


def _shard_map(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
