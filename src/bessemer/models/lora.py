"""Low-rank adapters: W' = W + (α/r)·A·B, with W (…, m, n) as it was, A (…, m, r) random and B (…, r, n) zero at first.

So training begins at W exactly, and r·(m + n) numbers are trained in place of m·n. Source: Hu et al. 2021 (LoRA); with
`rank_stabilised` the factor is α/√r (Kalajdzievski 2023).

W' is made inside the step, in float32, before the model casts it: the model knows nothing of it, and float8,
rematerialisation, scans and every kernel work as they do without.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.errors import InputError

A, B = "lora_a", "lora_b"
Path = tuple[str, ...]


@dataclass(frozen=True)
class LoraSettings:
    rank: int = field("lora/rank", default=0, minimum=0, help="r of the low-rank adapters; 0 = no adapters")
    alpha: float = field("lora/alpha", default=16.0, above=0, help="adapters count α/r times")
    rank_stabilised: bool = field(
        "lora/rank_stabilised", default=False, help="α/√r in place of α/r, for large ranks"
    )
    targets: tuple[str, ...] = field(
        "lora/targets",
        default=(),
        help="patterns (* and ?) over the paths of matrices to adapt; none: those of attention and feed-forward",
    )
    whole: tuple[str, ...] = field(
        "lora/whole",
        default=(),
        help="patterns of parameters trained whole beside the adapters, such as a new head",
    )
    init: str = field(
        "lora/init",
        default="kaiming",
        choices=("kaiming", "gaussian"),
        help="A at first: U(±1/√fan_in), or normal with deviation 1/r; B is 0",
    )

    @property
    def scale(self) -> float:
        return (
            self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank) if self.rank else 0.0
        )


def merged(w: Array, a: Array, b: Array, scale: float) -> Array:
    """W + scale·A·B in the dtype of W. The product is made with all bits of float32: it is small beside W' x."""
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (w + scale * product).astype(w.dtype)


def group_of_adapted(group_of: Callable[[Path], str], path: Path) -> str:
    """An adapter is of the kind of its matrix: what the optimizer does with that one, it does with A and with B."""
    return group_of(path[:-1] if path[-1] in (A, B) else path)


def adapter_shapes(path: Path, box: Any, rank: int) -> dict[str, Any]:
    """Abstract A and B of a kernel, boxed with the kernel's own axes: A takes the input's, B the output's."""
    names, leaf = (box.names, box.value) if isinstance(box, nn.Partitioned) else (None, box)
    shape = tuple(leaf.shape)
    stacked = names is not None and all(name == "layers" for name in names[:-2])
    if len(shape) < 2 or (len(shape) > 2 and not stacked):
        raise InputError(
            f"lora.targets: '{'/'.join(path)}' has shape {shape}; an adapter needs a matrix, or a stack of "
            "matrices whose leading axis is named 'layers'."
        )
    *lead, m, n = shape
    if rank > min(m, n):
        raise InputError(
            f"lora.rank={rank} is more than the {min(m, n)} that '{'/'.join(path)}' {shape} can use; take less."
        )
    sizes = {A: (*lead, m, rank), B: (*lead, rank, n)}
    made = {name: jax.ShapeDtypeStruct(size, leaf.dtype) for name, size in sizes.items()}
    if names is None:
        return made
    axes = {A: (*names[:-1], None), B: (*names[:-2], None, names[-1])}
    return {name: nn.LogicallyPartitioned(made[name], axes[name]) for name in made}


def fresh_adapter(key: Array, path: Path, w: Array, rank: int, init: str) -> dict[str, Array]:
    """A drawn from (key, the path's name), so that it is the same whatever else is adapted; B zero."""
    *lead, m, n = w.shape
    own, size = jax.random.fold_in(key, zlib.crc32("/".join(path).encode())), (*lead, m, rank)
    if init == "gaussian":
        drawn = jax.random.normal(own, size, w.dtype) / rank
    else:
        drawn = jax.random.uniform(own, size, w.dtype, -1 / math.sqrt(m), 1 / math.sqrt(m))
    return {A: drawn, B: jnp.zeros((*lead, rank, n), w.dtype)}
