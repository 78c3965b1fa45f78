"""The loss of a tile of logits and its gradient in one GPU kernel (Pallas, Triton), in place.

A program takes one row: the first sweep sums the exponentials, the second, which finds the row in cache, writes the
gradient over the logits. The tile travels through memory twice instead of six times. Off a GPU it runs interpreted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bessemer.topology.chips import backend

COLUMNS = 4096  # columns held at a time
WARPS = 16
LARGEST_SHIFT = 40.0


def shifts_by_cap(softcap: float) -> bool:
    """Return whether logsumexp may subtract the softcap instead of the row's maximum, which saves a pass.

    Capped logits are at least −c, so the smallest term is exp(−2c). At c = 40 that is 1.8e-35, still a normal float32;
    at c = 88 a row near 0 would sum to 0, and its logarithm to −inf.
    """
    return 0 < softcap <= LARGEST_SHIFT


def softmax_gradient(
    logits: Array, targets: Array, weights: Array, *, vocab_size: int, softcap: float
) -> tuple[Array, Array]:
    """(∂(Σ w·nll)/∂logits in the logits' dtype, nll (n,) float32). logits: (n, V), overwritten; the rest (n,), or
    (n, k) with k targets per row, whose gradients are added.

    With z = c·tanh(l / c) (z = l without a cap), columns from `vocab_size` on are padding:
    nll = logsumexp(z) − z_t and the gradient is w·(softmax(z) − onehot)·(1 − (z/c)²).
    """
    count, columns = logits.shape
    size = min(COLUMNS, _power(columns))
    pieces = functools.partial(_Row, columns=columns, vocab_size=vocab_size, softcap=softcap, size=size)
    row = pl.BlockSpec((1,), lambda i: (i,))
    aims = [targets, weights] if targets.ndim == 1 else [*targets.T, *weights.T]
    several = len(aims) // 2
    tile = pl.BlockSpec((1, columns), lambda i: (i, 0))
    gradient, *nll = pl.pallas_call(
        functools.partial(_kernel, row=pieces, several=several),
        grid=(count,),
        in_specs=[tile, *[row] * len(aims)],
        out_specs=[tile, *[row] * several],
        out_shape=[
            jax.ShapeDtypeStruct(logits.shape, logits.dtype),
            *[jax.ShapeDtypeStruct((count,), jnp.float32)] * several,
        ],
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=backend() != "gpu",
    )(logits, *aims)
    return gradient, nll[0] if targets.ndim == 1 else jnp.stack(nll, axis=-1)


def _power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class _Row:
    """A row of logits, read in pieces of `size` columns."""

    ref: Any
    columns: int
    vocab_size: int
    softcap: float
    size: int

    def read(self, start: Any, count: int, mask: Array | None) -> tuple[Array, Array]:
        """(z, z/c) of `count` columns. A product with 1/c: a quotient would take as long as an exponential."""
        part = self.ref.at[pl.ds(0, 1), pl.ds(start, count)]
        z = plgpu.load(part, mask=mask, other=None if mask is None else 0.0).astype(jnp.float32)
        if not self.softcap:
            return z, z
        # The hardware's tanh is right to 2⁻¹¹, a quarter of the rounding of the bf16 logits it is given, and leaves
        # the kernel bound by memory: exact tanh took 28 ms of a 448 ms step at depth 12.
        near = backend() == "gpu" and self.ref.dtype == jnp.bfloat16
        share = (plgpu.approx_tanh if near else jnp.tanh)(z * (1 / self.softcap))
        return self.softcap * share, share

    def piece(self, index: Any) -> tuple[Array, Array, Array, Array | None]:
        """z of one piece, −∞ at padding, z/c, its columns and which of them are there (None: all)."""
        column = index * self.size + jnp.arange(self.size)[None]
        mask = column < self.columns if self.columns % self.size else None
        z, share = self.read(index * self.size, self.size, mask)
        if self.vocab_size < self.columns:
            z = jnp.where(column < self.vocab_size, z, -jnp.inf)
        return z, share, column, mask


def _kernel(l_ref: Any, *refs: Any, row: Callable[[Any], _Row], several: int) -> None:
    """refs: those of `several` targets and of their weights, of the gradient, and of their nlls."""
    it, g_ref = row(l_ref), refs[2 * several]
    targets, weights = ([ref[0] for ref in refs[start : start + several]] for start in (0, several))
    steps = -(-it.columns // it.size)
    # read before the sweep: after it, a warp that is ahead may already write its gradient there
    aims = [it.read(jnp.minimum(target, it.columns - 1), 1, None)[0][0] for target in targets]

    def sweep(index: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = carry
        z = it.piece(index)[0]
        if shifts_by_cap(it.softcap):
            return top, total + jnp.exp(z - top)
        higher = jnp.maximum(top, jnp.max(z))
        return higher, total * jnp.exp(top - higher) + jnp.exp(z - higher)

    start = jnp.float32(it.softcap if shifts_by_cap(it.softcap) else jnp.finfo(jnp.float32).min)
    top, total = jax.lax.fori_loop(0, steps, sweep, (start, jnp.zeros((1, it.size), jnp.float32)))
    lse = jnp.log(jnp.sum(total)) + top
    for aim, nll_ref in zip(aims, refs[2 * several + 1 :], strict=True):
        nll_ref[...] = lse - aim

    def write(index: Any, _: None) -> None:
        z, share, column, mask = it.piece(index)

        def of(target: Array, weight: Array) -> Array:
            gradient = jnp.exp(z - lse) - jnp.where(column == target, 1.0, 0.0)
            if it.softcap:
                gradient *= 1 - jnp.square(share)
            return weight * gradient

        first, *rest = map(of, targets, weights)
        gradient = sum(rest, first).astype(g_ref.dtype)
        plgpu.store(g_ref.at[pl.ds(0, 1), pl.ds(index * it.size, it.size)], gradient, mask=mask)

    jax.lax.fori_loop(0, steps, write, None)
