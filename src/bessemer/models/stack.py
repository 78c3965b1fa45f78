"""Running a stack of layers: unrolled, scanned over repeating groups, rematerialised. The parameters stay the same.

Layers differ in static things (window, value embedding), so a scan runs over groups in which the pattern repeats;
their parameters are stacked when the program is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.models.layers import TENSOR_NAMES
from bessemer.models.shape import scan_segments

Stream = tuple[Array, Array]  # x and the embeddings x0 that every layer mixes in, (B, T, D) each
Step = Callable[[int | None, dict[str, Any], Array, Stream], Stream]  # of window, params, index, stream
After = Callable[[dict[str, Array], Array], Array]  # (params["lookup"], x) → x


def run_layers(
    step: Step,
    after: After,
    params: Sequence[dict[str, Any]],
    windows: Sequence[int | None],
    x: Array,
    *,
    scan: bool,
    remat: Sequence[str],
) -> tuple[Array, Array]:
    """(output of the last layer, output of layer n//2). x: (B, T, D), the embeddings.

    A layer whose parameters hold "lookup" is followed by `after` with those; its own output is the one before.
    """
    depth = len(params)
    kinds = tuple((window, tuple(sorted(p))) for window, p in zip(windows, params, strict=True))
    segments = scan_segments(kinds) if scan else [(layer, 1, 1) for layer in range(depth)]

    @cache
    def layer(window: int | None) -> Callable[..., Stream]:
        """A call, which the compiler inlines: traced and lowered once for all layers of a kind."""
        return jax.jit(rematerialised(partial(step, window), remat))

    def look_up(p: dict[str, Any], x: Array) -> Array:
        return rematerialised(after, remat)(p["lookup"], x) if "lookup" in p else x

    def group(
        start: int, carry: tuple[Stream, Array], xs: tuple[Any, Array]
    ) -> tuple[tuple[Stream, Array], None]:
        stream, middle = carry
        for offset, p in enumerate(xs[0]):
            stream = layer(windows[start + offset])(p, xs[1] + offset, stream)
            middle = jnp.where(xs[1] + offset == depth // 2, stream[0], middle)
            stream = (look_up(p, stream[0]), stream[1])
        return (stream, middle), None

    carry: tuple[Stream, Array] = ((x, x), x)
    for start, period, repeats in segments:
        groups = [params[start + g * period : start + (g + 1) * period] for g in range(repeats)]
        if repeats == 1:
            stream = layer(windows[start])(params[start], jnp.int32(start), carry[0])
            middle = stream[0] if start == depth // 2 else carry[1]
            carry = ((look_up(params[start], stream[0]), stream[1]), middle)
        else:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *groups)
            starts = jnp.arange(start, start + repeats * period, period)
            carry, _ = jax.lax.scan(partial(group, start), carry, (stacked, starts))
    return carry[0][0], carry[1]


def remat_names(remat: Sequence[str]) -> tuple[str, ...] | None:
    """None: nothing is recomputed; (): the whole block; else the tensors to recompute."""
    names = tuple(remat)
    if names in ((), ("none",)):
        return None
    return () if names == ("block",) else names


def rematerialised(function: Callable[..., Any], remat: Sequence[str]) -> Callable[..., Any]:
    """Wrap a layer so that its backward pass recomputes everything (block) or the named tensors.

    The policy lists what is kept, not what is recomputed: a tensor that is only excluded would be recomputed from
    an unnamed, equally large neighbour.
    """
    names = remat_names(remat)
    if names is None:
        return function
    kept = [name for name in TENSOR_NAMES if name not in names]
    policy = jax.checkpoint_policies.save_only_these_names(*kept) if names else None
    return jax.checkpoint(function, policy=policy)
