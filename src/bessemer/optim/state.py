"""The optimizer's state at rest: rounded by noise, moments in bf16 or in 8 bits, spread over the mesh.

Stochastic rounding: x becomes one of its two neighbors in a narrower format, the nearer one more often.

    E[round(x)] = x

so updates far below the spacing of the format are kept on average. Rounded to nearest, a bf16 weight of 1 ignores
every update below 2⁻⁹: at a learning rate of 3e-6 hardly any weight would move.

The noise of an element is a hash of (key, its place in the whole array): it depends on neither the mesh nor the
micro-batch, and nothing is carried from step to step.

Moments are stored in bf16 or in 8 bits; every update decodes them, computes in float32 and encodes.
A block is up to 256 neighbors along the last axis, so blocks never cross rows and each row of a token table has its
own scale s, the block's largest magnitude (float32). With code q:

    mean (signed)       m = s · sign(q) · (q/127)²         q int8
    square (positive)   v = s · (q/255)⁴                   q uint8, so √v has the same square code

Codes are denser near 0, where most values are: beside the block's maximum, m is resolved down to 6e-5 and √v to
1.5e-5. Blockwise 8-bit states are from Dettmers et al. 2022; that work uses a table of codes and rounds to nearest.
Here both moments are rounded stochastically: to nearest, a moving average sticks once its change of
(1-β) per step is below half the spacing. A positive v never becomes 0, which would turn its coordinate's m / (√v + ε)
into a jump.

Arrays of fewer than two axes or 4,096 elements stay float32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bessemer.optim.transform import path_names

# --- stochastic rounding ---


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


# --- moments in bf16 or in 8 bits ---


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


# --- where the state lives on a mesh, and how Muon's stacks are spread over it ---


# Axes that replicate the matrices, and axes that split them at rest. The first come first: a slice makes the stack
# smaller before anything travels, and of one dimension's axes (fsdp, pipeline) the last moves without the other.
REPEATING, SPLITTING = ("data", "context", "expert"), ("pipeline", "fsdp", "tensor")
ROW_AXES = ("fsdp", "pipeline")  # of a matrix whose rows are "embed", as rules.REST_RULES place it
POLAR_COST = 4.0  # a polar step takes about as long as sending its matrix so many times


@dataclass(frozen=True)
class Stack:
    """How a stack of matrices (n, m, k) is distributed over devices: `run(function, stack)`.

    n must be a multiple of `multiple`; the stack is padded with zero matrices.
    """

    multiple: int
    run: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]


@dataclass(frozen=True)
class Spread:
    """Distributes a stack over the mesh: each device orthogonalizes its share."""

    mesh: Mesh
    axes: tuple[str, ...]  # those with more than one device

    def align(self, matrix: jax.Array) -> jax.Array:
        """One layout for all square matrices on fsdp × tensor: some rest on (fsdp, tensor) and some on (tensor, fsdp),
        such as q and out, and the compiler would gather them whole to stack them."""
        rows, columns = matrix.shape
        split = tuple(axis for axis in ROW_AXES if axis in self.axes)
        mixed = rows == columns and split and "tensor" in self.axes
        if not mixed or rows % self._devices(split, SPLITTING) or columns % self.mesh.shape["tensor"]:
            return matrix
        return jax.lax.with_sharding_constraint(matrix, NamedSharding(self.mesh, PartitionSpec(split, "tensor")))

    def chosen(self, count: int) -> tuple[str, ...]:
        """Return the axes over which a stack of `count` matrices is split: those with the least to compute and to send.

        Not always all: 26 matrices on 512 devices are 486 of padding, which an all-gather would send with the rest.
        """
        some = [part for n in range(len(self.axes) + 1) for part in combinations(self.axes, n)]
        return min(some, key=lambda axes: self.cost(count, axes))

    def cost(self, count: int, axes: tuple[str, ...]) -> float:
        """Return one device's time in units of sending a whole matrix: its polar steps, and what it receives."""
        repeats, parts = (self._devices(axes, kind) for kind in (REPEATING, SPLITTING))
        pieces = self._devices(self.axes, SPLITTING)
        own = -(-count // (repeats * parts))
        padded = own * repeats * parts
        there_and_back = 2 * padded / (repeats * pieces) if parts > 1 else 0.0  # all-to-alls
        made_whole = own * (1 - parts / pieces)  # all-gather over splitting axes that are not chosen
        joined = padded / pieces * (1 - 1 / repeats)  # all-gather over repeating ones
        return POLAR_COST * own + there_and_back + made_whole + joined

    def _devices(self, axes: tuple[str, ...], kind: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes if axis in kind)

    def over(self, count: int) -> Stack:
        """Return the layout of a stack of `count` matrices.

        The stack axis is split over one mesh axis after the other, and joined in reverse order. So each move is one
        collective: a slice or all-gather over an axis that replicates, an all-to-all over one that splits the matrices.
        Asked for a single move, the compiler replicates the stack.
        """
        axes = self.chosen(count)
        free = PartitionSpec.UNCONSTRAINED
        between = [PartitionSpec(axes[:used] or None, free, free) for used in range(len(axes))]
        if not set(self.axes) <= set(axes):  # the others may still split the matrices: gathered last
            between.append(PartitionSpec(axes or None, free, free))
        own = PartitionSpec(axes or None, None, None)

        def through(stack: jax.Array, specs: list[PartitionSpec]) -> jax.Array:
            for spec in specs:
                stack = jax.lax.with_sharding_constraint(stack, NamedSharding(self.mesh, spec))
            return stack

        def run(function: Callable[[jax.Array], jax.Array], stack: jax.Array) -> jax.Array:
            # Not left to the compiler, which would split the products again, with collectives in each of them.
            alone = jax.shard_map(function, mesh=self.mesh, in_specs=own, out_specs=own, check_vma=False)
            return through(alone(through(stack, [*between, own])), between[::-1])

        return Stack(math.prod(self.mesh.shape[axis] for axis in axes), run)


def mesh_spread(mesh: Mesh) -> Spread | None:
    """Return how Muon's stacks are laid out over the mesh; None on a single device."""
    axes = tuple(axis for axis in (*REPEATING, *SPLITTING) if mesh.shape.get(axis, 1) > 1)
    return Spread(mesh, axes) if axes else None


def _like(state: Any, param: Any, sharding: NamedSharding, replicated: NamedSharding) -> Any:
    """Return a parameter's sharding for one leaf of its state; axes the state has reduced are not split."""
    if isinstance(state, optax.MaskedNode):
        return state
    if isinstance(state, Packed):
        return Packed(*(_like(part, param, sharding, replicated) for part in state))
    if state.shape == param.shape:
        return sharding
    if len(state.shape) != len(param.shape):
        return replicated
    spec = tuple(sharding.spec) + (None,) * (len(param.shape) - len(sharding.spec))
    kept = (axis if a == b else None for axis, a, b in zip(spec, state.shape, param.shape, strict=True))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def state_shardings(
    tx: optax.GradientTransformation, abstract_params: Any, param_shardings: Any, replicated: NamedSharding
) -> Any:
    """Shardings of `tx.init(params)`, for `jit(tx.init, out_shardings=…)` and for restoring.

    Without them jit leaves the state replicated. A leaf that belongs to a parameter is sharded as the parameter is,
    except axes it has reduced, to one value or one per block; counters and factored moments are replicated.
    """
    return optax.tree_utils.tree_map_params(
        tx,
        lambda state, param, sharding: _like(state, param, sharding, replicated),
        jax.eval_shape(tx.init, abstract_params),
        abstract_params,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode | Packed),
    )
