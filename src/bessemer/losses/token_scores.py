"""Log-probabilities of given tokens, one per target, from hidden states and head without ever holding the full logits.

    logprob = z_t − logsumexp(z),     z = softcap(h W) / temperature

Only positions with a target cost anything: on one device they are moved to the front, and the loop over tiles of logits
ends after the last of them. In preference and RL data, prompts and padding are often half of a batch.

The cotangent g of each log-probability is known in the backward pass alone, which makes its tiles of logits again. As
∂(Σ g·logprob) = ∂(Σ −g·nll), the rest of it is the gradient of cross-entropy with weights −g, with its kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from bessemer.losses.cross_entropy import (
    IGNORED,
    KERNEL_TILE,
    LossOptions,
    Projection,
    _logits,
    _pick,
    _products,
    _statistics,
    choose_chunks,
    join,
    loss_and_gradients,
    row_groups,
    scan_tiles,
    split,
)
from bessemer.topology.chips import backend
from bessemer.topology.rules import constrain, shards

FORWARD_TILE = 2**27
"""Float32 logits held at once on an accelerator, 512 MiB: the host waits for each tile of a loop of unknown length."""

Score = Callable[[Array, Array, Array], tuple[Array, ...]]  # (z, logsumexp(z), targets) → (log p(target), …)


def token_logprobs(projection: Projection, targets: Array) -> Array:
    """Return log p(target), (B, T) float32, 0 where the target is below 0. Differentiable per token."""
    return _per_target(_logprob, projection, targets)[0]


def token_scores(projection: Projection, targets: Array) -> tuple[Array, Array]:
    """Return (log p(target), whether the target is the argmax), (B, T) each; (0, True) where the target is below 0.

    Among equally likely tokens the argmax is the lowest id, as in greedy decoding.
    """
    logprobs, missed = _per_target(_logprob_and_miss, projection, targets)
    return logprobs, missed == 0


def policy_scores(
    projection: Projection, targets: Array, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Array, Array]:
    """Return (log π(target), entropy of π), (B, T) each, of the sampling policy π = softmax(z / temperature).

    Differentiable in the first, and with `entropy_gradient` in the second, which makes the backward pass's tiles of
    logits once more. (0, 0) where the target is below 0.
    """
    logprobs, entropy = _per_target(_logprob_and_entropy, projection, targets, temperature, entropy_gradient)
    return logprobs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)


def _logprob(z: Array, lse: Array, targets: Array) -> tuple[Array]:
    return (jnp.where(targets < 0, 0.0, _pick(z, jnp.maximum(targets, 0)) - lse),)


def _logprob_and_miss(z: Array, lse: Array, targets: Array) -> tuple[Array, Array]:
    missed = (targets >= 0) & (jnp.argmax(z, axis=-1) != targets)
    return *_logprob(z, lse, targets), missed.astype(jnp.float32)


def _logprob_and_entropy(z: Array, lse: Array, targets: Array) -> tuple[Array, Array]:
    scores = z - lse[..., None]
    entropy = -jnp.sum(jnp.where(jnp.isfinite(scores), jnp.exp(scores) * scores, 0.0), axis=-1)
    return *_logprob(z, lse, targets), jnp.where(targets < 0, 0.0, entropy)


@dataclass(frozen=True)
class _Options:
    """Static: the loss with its tiles in the forward pass, and in the backward pass. entropy: the second result is
    an entropy, and differentiable too."""

    score: Score
    forward: LossOptions
    backward: LossOptions
    entropy: bool = False


def _per_target(
    score: Score, projection: Projection, targets: Array, temperature: float = 1.0, entropy: bool = False
) -> tuple[Array, ...]:
    """Return `score(z, logsumexp(z), targets)` for targets (B, T); only its first result is differentiable, and with
    `entropy` the second."""
    hidden, targets = jnp.asarray(projection.hidden), jnp.asarray(targets)
    head, given = projection.head, targets.shape
    loss = LossOptions(projection.vocab_size, 1, projection.softcap, temperature=temperature, tied=projection.tied)
    if head is None:
        found = score(*_statistics(loss, hidden), targets)
        return (found[0], _whole_entropy(loss, hidden, targets)) if entropy else found
    count: Array | None = None
    if shards("batch") * shards("sequence") * shards("vocab") == 1:
        flat = targets.reshape(-1)
        order = jnp.argsort(flat < 0, stable=True)
        count = jnp.sum(flat >= 0, dtype=jnp.int32)
        targets, hidden = flat[order][None], hidden.reshape(-1, hidden.shape[-1])[order][None]
    sizes = (targets.shape[0], targets.shape[1], head.shape[0 if projection.tied else 1])
    kernel = projection.kernels == "pallas" and temperature == 1 and shards("vocab") == 1
    forward = choose_chunks(projection.chunks, *sizes, None if backend() == "cpu" else FORWARD_TILE)
    chunks = choose_chunks(projection.chunks, *sizes, KERNEL_TILE if kernel else None)
    if kernel and row_groups(sizes[0], -(-sizes[1] // chunks)) != (shards("batch"), shards("sequence")):
        kernel, chunks = False, choose_chunks(projection.chunks, *sizes)  # devices would have different rows
    options = _Options(score, replace(loss, chunks=forward), replace(loss, chunks=chunks, kernel=kernel), entropy)
    found = _scores(options, hidden, head, targets, count)
    if count is None:
        return found
    return tuple(jnp.zeros_like(x[0]).at[order].set(x[0], unique_indices=True).reshape(given) for x in found)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(options: _Options, hidden: Array, head: Array, targets: Array, count: Array | None) -> tuple[Array, ...]:
    """hidden: (B, T, D), head: (D, V), or tied (V, D), targets: (B, T). count: () int32, targets are at the first
    `count` positions of one row; None: anywhere."""
    loss, chunks = options.forward, options.forward.chunks
    table = constrain(head.astype(hidden.dtype), *loss.head_axes)

    def tile(_: None, inputs: tuple[Array, Array]) -> tuple[None, tuple[Array, ...]]:
        h, t = inputs
        return None, options.score(*_statistics(loss, _logits(h, table, tied=loss.tied)), t)

    pieces = (split(hidden, chunks), split(targets, chunks, IGNORED))
    _, found = scan_tiles(tile, None, pieces, chunks, _tiles(count, pieces[1]))
    return tuple(join(x)[:, : targets.shape[1]] for x in found)


def _tiles(count: Array | None, pieces: Array) -> Array | None:
    """Return how many of the tiles (chunks, 1, t) hold the first `count` positions."""
    return None if count is None else -(-count // pieces.shape[2])


def _forward(options: _Options, hidden: Any, head: Any, targets: Any, count: Any) -> tuple[tuple[Array, ...], Any]:
    trained = () if head.perturbed else None  # part of the structure, not a value
    arrays = (hidden.value, head.value, targets.value, None if count is None else count.value)
    return _scores(options, *arrays), (arrays, trained)


def _backward(options: _Options, residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    (hidden, head, targets, count), trained = residuals
    g, loss = cotangents[0], options.backward
    g = jnp.zeros(targets.shape, jnp.float32) if isinstance(g, SymbolicZero) else g
    weights = jnp.where(targets < 0, 0.0, -g)
    tiles = _tiles(count, jax.eval_shape(partial(split, chunks=loss.chunks), targets))
    wanted = trained is not None
    _, gradients = loss_and_gradients(loss, wanted, hidden, head, jnp.maximum(targets, 0), weights, tiles)
    if not options.entropy or isinstance(cotangents[1], SymbolicZero):
        return *gradients, None, None
    weights = jnp.where(targets < 0, 0.0, cotangents[1])
    added = _entropy_gradients(loss, wanted, hidden, head, weights, tiles)
    dhead = None if gradients[1] is None or added[1] is None else gradients[1] + added[1]
    return gradients[0] + added[0], dhead, None, None


def _entropy_gradients(
    options: LossOptions, trained: bool, hidden: Array, head: Array, weights: Array, tiles: Array | None
) -> tuple[Array, Array | None]:
    """Return (dhidden, dW) of Σ w·H, tile by tile, as `loss_and_gradients` does. weights: (B, T).

    H = −Σ p log p over z:   ∂H/∂z_j = −p_j (log p_j + H)
    """
    logits, gradients = _products(head, hidden.dtype, options.tied)
    groups = row_groups(hidden.shape[0], -(-hidden.shape[1] // options.chunks))

    def tile(dhead: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        h, w = inputs
        dlogits = _entropy_gradient(options, logits(h), w)
        dh, added = gradients(h, dlogits, jnp.max(jnp.abs(dlogits)), groups if trained else None)
        if added is None:
            return dhead, dh.astype(h.dtype)
        return constrain(dhead + added, *options.gradient_axes), dh.astype(h.dtype)

    zeros = jnp.zeros((*groups, *head.shape) if trained else (1, 1, 1, 1), jnp.float32)
    start = constrain(zeros, *options.gradient_axes)
    pieces = (split(hidden, options.chunks), split(weights, options.chunks))
    dhead, dhidden = scan_tiles(tile, start, pieces, options.chunks, tiles)
    dhidden = join(dhidden)[:, : hidden.shape[1]]
    return dhidden, jnp.sum(dhead, axis=(0, 1)).astype(head.dtype) if trained else None


def _entropy_gradient(options: LossOptions, logits: Array, weights: Array) -> Array:
    """∂(Σ w·H)/∂logits, (B, t, V) float32."""
    z, lse = _statistics(options, logits)
    scores = z - lse[..., None]
    known = jnp.isfinite(scores)
    p, scores = jnp.where(known, jnp.exp(scores), 0.0), jnp.where(known, scores, 0.0)
    entropy = -jnp.sum(p * scores, axis=-1, keepdims=True)
    gradient = -weights[..., None] * p * (scores + entropy)
    if options.softcap:
        gradient *= 1 - jnp.square(jnp.where(known, z, 0.0) * (options.temperature / options.softcap))
    return gradient / options.temperature if options.temperature != 1 else gradient


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole_entropy(options: LossOptions, logits: Array, targets: Array) -> Array:
    """The entropy (B, T) from whole logits, with the gradient above: padding of the vocabulary is no NaN in it."""
    return _logprob_and_entropy(*_statistics(options, logits), targets)[1]


def _whole_forward(options: LossOptions, logits: Array, targets: Array) -> tuple[Array, tuple[Array, Array]]:
    return _whole_entropy(options, logits, targets), (logits, targets)


def _whole_backward(options: LossOptions, residuals: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    logits, targets = residuals
    gradient = _entropy_gradient(options, logits, jnp.where(targets < 0, 0.0, g))
    return gradient.astype(logits.dtype), None


_whole_entropy.defvjp(_whole_forward, _whole_backward)


_scores.defvjp(_forward, _backward, symbolic_zeros=True)
