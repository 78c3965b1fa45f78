"""Moments of an optimizer at rest in bf16 or in 8 bits; every update decodes them, computes in float32 and encodes.

A block is up to 256 neighbors along the last axis, so blocks never cross rows and each row of a token table has its
own scale s, the block's largest magnitude (float32). With code q:

    mean (signed)       m = s · sign(q) · (q/127)²         q int8
    square (positive)   v = s · (q/255)⁴                   q uint8, so √v has the same square code

Codes are denser near 0, where most values are: beside the block's maximum, m is resolved down to 6e-5 and √v to
1.5e-5. Blockwise 8-bit states are from Dettmers et al. 2022; that work uses a table of codes and rounds to nearest.
Here both moments are rounded stochastically (rounding.py): to nearest, a moving average sticks once its change of
(1-β) per step is below half the spacing. A positive v never becomes 0, which would turn its coordinate's m / (√v + ε)
into a jump.

Arrays of fewer than two axes or 4,096 elements stay float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from bessemer.optim.rounding import noise, noise_words, round_to_bfloat16
from bessemer.optim.transform import path_names

STATE_DTYPES = ("float32", "bfloat16", "int8")
STATE_DTYPE_HELP = (
    "dtype of the moments at rest; int8: blocks of 256 with a scale each; bfloat16 and int8 round by noise"
)
BLOCK = 256
SMALLEST = 4096
MEAN_CODES, SQUARE_CODES = 127, 255
MOMENTS = 3
"""Folded into the seed, beside the purposes of training/setup/compiled.py."""


class Packed(NamedTuple):
    """An array in 8-bit codes. codes: its own shape; scale: (…, blocks) float32."""

    codes: Array
    scale: Array


def is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def is_narrow(leaf: Any) -> bool:
    """Return whether the moments of an array are stored narrow."""
    return leaf.ndim >= 2 and math.prod(leaf.shape) >= SMALLEST


def pack_mean(x: Array, bits: Array) -> Packed:
    """Return signed values in 8 bits. bits: uint32 noise, of which the low 16 are used."""
    scale, wide = _scales(jnp.abs(x))
    share = jnp.abs(x) / jnp.where(wide > 0, wide, 1.0)
    codes = _round(share, jnp.sqrt(share), 2, MEAN_CODES, bits)
    return Packed((jnp.sign(x) * codes).astype(jnp.int8), scale)


def pack_square(x: Array, bits: Array) -> Packed:
    """Return values of at least 0 in 8 bits."""
    scale, wide = _scales(x)
    share = x / jnp.where(wide > 0, wide, 1.0)
    codes = _round(share, jnp.sqrt(jnp.sqrt(share)), 4, SQUARE_CODES, bits)
    return Packed(jnp.where(x > 0, jnp.maximum(codes, 1.0), 0.0).astype(jnp.uint8), scale)


def unpack(packed: Packed) -> Array:
    """Return the float32 values."""
    codes = packed.codes.astype(jnp.float32)
    wide = _spread(packed.scale, codes.shape[-1])
    if packed.codes.dtype == jnp.int8:
        return wide * jnp.sign(codes) * jnp.square(codes / MEAN_CODES)
    return wide * jnp.square(jnp.square(codes / SQUARE_CODES))


def _round(share: Array, root: Array, power: int, codes: int, bits: Array) -> Array:
    """Return the code below or above `share` (0 to 1), whose code would be codes · root, so that the mean of the
    decoded value (code/codes)^power is `share`."""
    below = jnp.clip(jnp.floor(root * codes), 0, codes - 1)
    low, high = (below / codes) ** power, ((below + 1) / codes) ** power
    threshold = (bits & jnp.uint32(0xFFFF)).astype(jnp.float32) / 2.0**16
    return below + (threshold < (share - low) / (high - low))


def _scales(x: Array) -> tuple[Array, Array]:
    """Return the maxima of the blocks of x, (…, blocks), and each at the places of its block."""
    length = x.shape[-1]
    block = min(BLOCK, length)
    blocks = -(-length // block)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * block - length)])
    scale = jnp.max(padded.reshape(*x.shape[:-1], blocks, block), axis=-1)
    return scale, _spread(scale, length)


def _spread(scale: Array, length: int) -> Array:
    """Return the scale of each element, (…, length)."""
    block = min(BLOCK, length)
    wide = jnp.broadcast_to(scale[..., None], (*scale.shape, block))
    return wide.reshape(*scale.shape[:-1], scale.shape[-1] * block)[..., :length]


def store_moments(
    inner: optax.GradientTransformation, dtype: str, seed: int, signed: str, positive: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` with the moments in two fields of its state (a NamedTuple) stored in `dtype`.

    The noise of a coordinate follows from (seed, step, path, place): a resumed run rounds as the uninterrupted one.
    """
    inner = optax.with_extra_args_support(inner)
    if dtype == "float32":
        return inner
    fields = [signed] if positive is None else [signed, positive]

    def encode(field: str, leaf: Array, bits: Array) -> Any:
        if dtype == "bfloat16":
            return round_to_bfloat16(leaf, bits)
        return pack_square(leaf, bits) if field == positive else pack_mean(leaf, bits)

    def stored(state: Any, key: Array) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(getattr(state, signed))
        names = [path_names(path) for path, leaf in leaves if is_narrow(leaf)]
        words = dict(zip(names, noise_words(key, names), strict=True)) if names else {}

        def one(field: str, path: Any, leaf: Array) -> Any:
            if not is_narrow(leaf):
                return leaf
            bits = noise(words[path_names(path)], leaf.shape)
            return encode(field, leaf, bits if field == signed else bits >> 16)

        def every(field: str) -> Any:
            return jax.tree_util.tree_map_with_path(lambda path, leaf: one(field, path, leaf), getattr(state, field))

        return state._replace(**{field: every(field) for field in fields})

    def loaded(state: Any) -> Any:
        def one(leaf: Any) -> Any:
            return unpack(leaf) if is_packed(leaf) else leaf.astype(jnp.float32)

        read = {field: jax.tree.map(one, getattr(state, field), is_leaf=is_packed) for field in fields}
        return state._replace(**read)

    def init(params: Any) -> Any:
        return stored(inner.init(params), jax.random.key(seed))  # zeros, whatever the noise

    def update(
        updates: Any, state: Any, params: Any = None, *, step: jax.typing.ArrayLike, **extra: Any
    ) -> tuple[Any, Any]:
        made, new = inner.update(updates, loaded(state), params, step=step, **extra)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), MOMENTS), step)
        return made, stored(new, key)

    return optax.GradientTransformationExtraArgs(init, update)
