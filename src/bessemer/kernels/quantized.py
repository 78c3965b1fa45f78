"""Frozen matrices in 4 or 8 bits, and their product with activations: x · dequantized(W).

NF4 (Dettmers et al. 2023, QLoRA): blocks of 64 inputs of one output column share a scale, their largest |w|, and each
weight is the nearest of 16 constants times it. Scales are quantized again ("double quantization"), to 8-bit floats
around their mean. Int8: one scale per output column. Float8: e4m3 with one scale per output column, for sampling.

A matrix is dequantized where it is used, in the forward pass and again in the backward pass, and never kept between
them. `optimization_barrier` ties the codes to the activations, so that the compiler neither shares the two
dequantizations (every layer's matrix would live from the forward to the backward pass) nor moves one out of a loop.
The 16 constants are picked by a tree of 15 selects on the bits of a code: a gather from a table is slow on GPUs.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bessemer.errors import InputError
from bessemer.kernels.ops import Axes, input_gradient, product
from bessemer.storage.weights import Packed
from bessemer.topology.chips import backend
from bessemer.topology.rules import constrain

# Dettmers et al. 2023, appendix E: quantiles of the normal distribution, with an exact zero.
CODEBOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_TABLE = np.array(CODEBOOK, np.float32)
MIDPOINTS = tuple(float(x) for x in (_TABLE[1:] + _TABLE[:-1]) / np.float32(2))
BLOCK, SMALLEST_BLOCK, GROUP = 64, 16, 256
"""Weights per scale, and scales per pair of (mean, step): the paper's."""
LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn
MEAN_LEVELS = 2**20  # a sum of 256 of them fits an int32

Names = Sequence[Any]


@dataclass(frozen=True)
class Quantized(Packed):
    """A quantized matrix (…, m, n) in the place of an array; every field is an array, or an abstract or boxed one."""

    codes: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        """What it is quantized from: an exact copy of weights in any 16- or 32-bit dtype."""
        return np.dtype(np.float32)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @classmethod
    @abstractmethod
    def of(cls, w: Array) -> Self:
        """Quantize w: (…, m, n)."""

    @abstractmethod
    def dequantized(self, dtype: Any) -> Array:
        """Return (…, m, n)."""

    def times(self, x: Array, axes: Axes, dtype: Any) -> Array:
        """Return x W for a matrix (m, n) that is laid out as `axes` say."""
        return product(x, constrain(self.dequantized(dtype), *axes))

    @abstractmethod
    def __getitem__(self, rows: slice) -> Self:
        """Return some of the rows of a matrix (m, n)."""

    @abstractmethod
    def _axes(self, names: Names) -> Self:
        """Return the axis names of each field, from those of the matrix."""

    @classmethod
    def boxed(cls, shape: tuple[int, ...], names: Names | None) -> Self:
        """Return the abstract node of a matrix of `shape` whose axes have `names`."""
        made = jax.eval_shape(cls.of, jax.ShapeDtypeStruct(shape, jnp.float32))
        if names is None:
            return made
        return replace(made, **{
            one.name: nn.LogicallyPartitioned(getattr(made, one.name), getattr(made._axes(names), one.name))
            for one in fields(made)
        })  # fmt: skip

    def constrained(self, axes: Axes) -> Self:
        """Lay out the codes and scales of (m, n) as a matrix with `axes` is laid out in use."""
        names = self._axes(axes)
        return replace(self, **{
            one.name: constrain(getattr(self, one.name), *getattr(names, one.name)) for one in fields(self)
        })  # fmt: skip

    # --- an abstract node, as weights are read into it ---
    def source(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.codes.sharding)

    def packed(self, array: Array) -> Self:
        """Quantize on the devices of `array`, and wait for it: else wide copies of several matrices are in flight."""
        places = tuple(getattr(self, one.name).sharding for one in fields(self))
        return cast(Self, jax.block_until_ready(_quantizer(type(self), places)(array)))


@functools.lru_cache(64)
def _quantizer(kind: type[Quantized], places: tuple[Any, ...]) -> Any:
    names = [one.name for one in fields(kind)]
    return jax.jit(kind.of, out_shardings=kind(**dict(zip(names, places, strict=True))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NF4(Quantized):
    """codes: (…, m/2, n) uint8, the even row in the high bits; scales: (…, m/64, n), bits of a float8_e4m3fn;
    step, mean: (…, m/64, n/256) float32. The scale of a block is scales · step + mean.

    0.516 bytes per weight. m without 64 as a divisor has shorter blocks, n without 256 shorter groups.
    """

    scales: Any
    step: Any
    mean: Any

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, half, n = self.codes.shape
        return (*lead, 2 * half, n)

    @classmethod
    def of(cls, w: Array) -> Self:
        *lead, m, n = w.shape
        block = block_size(m)
        blocks = w.astype(jnp.float32).reshape(*lead, m // block, block, n)
        largest = jnp.max(jnp.abs(blocks), axis=-2)  # (…, m/64, n)
        unit = blocks / jnp.where(largest > 0, largest, 1)[..., None, :]
        code = sum((unit > bound).astype(jnp.uint8) for bound in MIDPOINTS)
        pairs = cast(Array, code).reshape(*lead, m // 2, 2, n)
        scales, step, mean = _quantize_scales(largest)
        return cls(pairs[..., 0, :] << 4 | pairs[..., 1, :], scales, step, mean)

    def dequantized(self, dtype: Any) -> Array:
        return _nf4(self.codes, self.scales, self.step, self.mean, jnp.dtype(dtype))

    def __getitem__(self, rows: slice) -> Self:
        m = self.shape[-2]
        block = m // self.scales.shape[-2]
        start, stop, _ = rows.indices(m)
        if start % block or stop % block:
            raise InputError(
                f"lora.quantize=nf4 has blocks of {block} rows, and a lookup layer over topology.tensor splits W_mix "
                f"at row {start or stop}. Set topology.tensor=1, or lora.quantize=int8."
            )
        packed, blocks = slice(start // 2, stop // 2), slice(start // block, stop // block)
        return replace(
            self, codes=self.codes[packed], scales=self.scales[blocks], step=self.step[blocks], mean=self.mean[blocks]
        )

    def _axes(self, names: Names) -> Self:
        *lead, _, last = names
        whole = (*lead, None, None)
        return type(self)(tuple(names), (*lead, None, last), whole, whole)


def block_size(m: int) -> int:
    """Return the weights per scale of a column of m: 64, or the largest even divisor of m below."""
    found = next((size for size in range(BLOCK, 1, -2) if m % size == 0), 0)
    if found < SMALLEST_BLOCK:
        raise InputError(
            f"lora.quantize=nf4 shares a scale among {SMALLEST_BLOCK} to {BLOCK} inputs of a matrix, and no such even "
            f"number divides the {m} inputs of one here. Use lora.quantize=int8 or none."
        )
    return found


def _quantize_scales(scale: Array) -> tuple[Array, Array, Array]:
    """(…, rows, n) float32 → (…, rows, n) uint8, and step and mean of each group of columns.

    The mean is summed in integers: in float32 its last bits would depend on the mesh and on the compiler.
    """
    *lead, rows, n = scale.shape
    group = max(size for size in range(1, min(GROUP, n) + 1) if n % size == 0)
    groups = scale.reshape(*lead, rows, n // group, group)
    level = jnp.max(groups, axis=-1, keepdims=True) / MEAN_LEVELS
    counts = jnp.round(groups / jnp.where(level > 0, level, 1)).astype(jnp.int32)
    mean = level * (jnp.sum(counts, axis=-1, keepdims=True) / group)
    away = groups - mean
    step = jnp.max(jnp.abs(away), axis=-1, keepdims=True) / LARGEST_FLOAT8
    small = (away / jnp.where(step > 0, step, 1)).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(small, jnp.uint8).reshape(scale.shape), step[..., 0], mean[..., 0]


@functools.partial(jax.jit, static_argnums=4)
def _nf4(codes: Array, scales: Array, step: Array, mean: Array, dtype: Any) -> Array:
    """The product of constant and scale is made in float32 and rounded once."""
    *lead, half, n = codes.shape
    groups, group = step.shape[-1], n // step.shape[-1]
    away = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
    away = away.reshape(*scales.shape[:-1], groups, group)
    # as an array of its own: fused with what follows, the conversion would be repeated for each of 64 weights
    scale = jax.lax.optimization_barrier((away * step[..., None] + mean[..., None]).reshape(scales.shape))
    scale = jnp.repeat(scale, 2 * half // scales.shape[-2], axis=-2)
    both = jnp.repeat(codes, 2, axis=-2)
    odd = jax.lax.broadcasted_iota(jnp.int32, (*lead, 2 * half, n), len(lead)) % 2 == 1
    return (codebook_values(jnp.where(odd, both, both >> 4)) * scale).astype(dtype)


def codebook_values(code: Array) -> Array:
    """Return the constants of codes, whose high bits are ignored, by halving the table with each bit."""
    table: list[Any] = [jnp.float32(value) for value in CODEBOOK]
    for bit in range(4):
        is_set = code & (1 << bit) != 0
        table = [jnp.where(is_set, above, below) for below, above in zip(table[::2], table[1::2], strict=True)]
    return cast(Array, table[0])


@dataclass(frozen=True)
class ScaledColumns(Quantized):
    """One code per weight and one scale per column. codes: (…, m, n), exact in bfloat16; scales: (…, 1, n) float32."""

    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def dequantized(self, dtype: Any) -> Array:
        return (self.codes.astype(jnp.float32) * self.scales).astype(dtype)

    def times(self, x: Array, axes: Axes, dtype: Any) -> Array:
        """Return x W: the product takes the codes as they are, and its columns are scaled. W itself is never made."""
        codes = constrain(self.codes.astype(dtype), *axes)
        return (product(x, codes, jnp.float32) * self.scales[0]).astype(dtype)

    def __getitem__(self, rows: slice) -> Self:
        return replace(self, codes=self.codes[rows])

    def _axes(self, names: Names) -> Self:
        *lead, _, last = names
        return type(self)(tuple(names), (*lead, None, last))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8(ScaledColumns):
    """codes: (…, m, n) int8; scales: (…, 1, n) float32, the largest |w| of a column over 127. 1 byte per weight."""

    @classmethod
    def of(cls, w: Array) -> Self:
        wide = w.astype(jnp.float32)
        scales = jnp.max(jnp.abs(wide), axis=-2, keepdims=True) / 127
        return cls(jnp.round(wide / jnp.where(scales > 0, scales, 1)).astype(jnp.int8), scales)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8(ScaledColumns):
    """codes: (…, m, n) float8_e4m3fn; scales: (…, 1, n) float32, the largest |w| of a column over 448.

    1 byte per weight; an error of at most 1/16 of the weight, or of 2^-10 scales where that is more.
    """

    @classmethod
    def of(cls, w: Array) -> Self:
        wide = w.astype(jnp.float32)
        scales = jnp.max(jnp.abs(wide), axis=-2, keepdims=True) / LARGEST_FLOAT8
        codes = jnp.clip(wide / jnp.where(scales > 0, scales, 1), -LARGEST_FLOAT8, LARGEST_FLOAT8)
        return cls(codes.astype(jnp.float8_e4m3fn), scales)


KINDS: dict[str, type[Quantized]] = {"nf4": NF4, "int8": Int8}
"""Of a frozen base: `lora.quantize`."""
SAMPLING_KINDS: dict[str, type[Quantized]] = {"fp8": Float8, "int8": Int8}
"""Of a copy that only samples: `generate.weights`."""


def dense(w: Array | Quantized) -> Array:
    """Return W as an array: dequantized to float32, or as it is."""
    return w.dequantized(jnp.float32) if isinstance(w, Quantized) else w


def size_of(node: Quantized) -> int:
    """Return the bytes of its arrays."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(node))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def quantized_linear(x: Array, w: Quantized, axes: Axes, dtype: Any) -> Array:
    """x W in the compute dtype, W (fan_in, fan_out) quantized, laid out by `axes` in use. x: (B, T, D).

    W has no gradient. On a mesh its codes are gathered, not the dequantized matrix.
    """
    x, w = tied(x, w)
    return w.constrained(axes).times(x, axes, dtype)


def _forward(x: Array, w: Quantized, axes: Axes, dtype: Any) -> tuple[Array, Quantized]:
    return quantized_linear(x, w, axes, dtype), w


def _backward(axes: Axes, dtype: Any, w: Quantized, g: Array) -> tuple[Array, None]:
    g, w = tied(g, w)
    return input_gradient(w.constrained(axes).dequantized(dtype), g, axes, dtype), None


def tied(x: Array, w: Quantized) -> tuple[Array, Quantized]:
    """Return both so that nothing is computed from `w` before `x` is there, nor shared with another use of `w`."""
    x, w = jax.lax.optimization_barrier((x, w))
    if backend() != "cpu":
        return x, w
    # There XLA drops barriers before it looks for common subexpressions. Bit 1 of a square is 0, which it cannot know.
    bits = jax.lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.int32)
    if w.codes.dtype == jnp.float8_e4m3fn:  # as bytes: a sum in float8 is made in float32, and rounded again
        raw = jax.lax.bitcast_convert_type(w.codes, jnp.uint8) + (bits * bits & 2).astype(jnp.uint8)
        return x, replace(w, codes=jax.lax.bitcast_convert_type(raw, jnp.float8_e4m3fn))
    return x, replace(w, codes=w.codes + (bits * bits & 2).astype(w.codes.dtype))


quantized_linear.defvjp(_forward, _backward)
