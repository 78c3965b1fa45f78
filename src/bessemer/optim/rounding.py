"""Stochastic rounding: x becomes one of its two neighbors in a narrower format, the nearer one more often.

    E[round(x)] = x

so updates far below the spacing of the format are kept on average. Rounded to nearest, a bf16 weight of 1 ignores
every update below 2⁻⁹: at a learning rate of 3e-6 hardly any weight would move.

The noise of an element is a hash of (key, its place in the whole array): it depends on neither the mesh nor the
micro-batch, and nothing is carried from step to step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.optim.transform import path_names

GOLDEN = 0x9E3779B9  # 2³² / φ, odd: multiples of it are spread over the 32-bit numbers (Knuth's multiplicative hash)


def noise_words(key: Array, paths: Sequence[tuple[str, ...]]) -> Array:
    """Return (n, 2) uint32: two random words for each path. One batched draw: a generator per leaf takes a GPU's
    compiler seconds."""
    names = jnp.asarray([zlib.crc32("/".join(path).encode()) for path in paths], jnp.uint32)
    return jax.vmap(lambda name: jax.random.bits(jax.random.fold_in(key, name), (2,), jnp.uint32))(names)


def noise(words: Array, shape: tuple[int, ...]) -> Array:
    """Return uint32 noise of `shape`, from the two words of its array: each element from its own indices."""
    mixed = words[0]
    for axis, size in enumerate(shape):
        view = [1] * len(shape)
        view[axis] = size
        index = jax.lax.broadcasted_iota(jnp.uint32, tuple(view), axis)
        mixed = _mix(mixed ^ (index * jnp.uint32(GOLDEN) + words[1]))
    return jnp.broadcast_to(mixed, shape)


def _mix(x: Array) -> Array:
    """Scramble 32 bits, one-to-one: the finalizer of MurmurHash3 (Appleby, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def round_to_bfloat16(x: Array, bits: Array) -> Array:
    """Return float32 `x` in bf16, rounded up with the probability of its distance from below. bits: uint32 noise, of
    which the low 16 are used."""
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits & jnp.uint32(0xFFFF))
    kept = jax.lax.bitcast_convert_type((raised >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), kept, x.astype(jnp.bfloat16))  # NaN's bits would run over into a number's


def apply_updates(params: Any, updates: Any, key: Array) -> Any:
    """Return params + updates, each in its own dtype; the sum is made in float32, and one for bf16 is rounded by noise
    of (key, path)."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    narrow = [path_names(path) for path, leaf in leaves if leaf.dtype == jnp.bfloat16]
    words = dict(zip(narrow, noise_words(key, narrow), strict=True)) if narrow else {}

    def one(path: Any, p: Array, u: Array) -> Array:
        if p.dtype != jnp.bfloat16:
            return jnp.asarray(p + u).astype(p.dtype)
        total = p.astype(jnp.float32) + u.astype(jnp.float32)
        return round_to_bfloat16(total, noise(words[path_names(path)], total.shape))

    return jax.tree_util.tree_map_with_path(one, params, updates)
