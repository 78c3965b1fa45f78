"""Cross-entropy plus a penalty for leaving a reference's distribution, one tile of both models' logits at a time.

With p = softmax(z) of the policy and q of the reference, both in float32, per token with weight w:

    loss + β·D,     D =  exact    KL(p ‖ q) = Σ_v p (log p − log q)
                         reverse  KL(q ‖ p) = Σ_v q (log q − log p)
                         nll      loss − loss of the reference

loss is that of cross_entropy.py, and so is the method: no tile is computed twice. In the logits, before the softcap's
own factor:

    ∂D/∂z =  exact  p (log p − log q − KL),     reverse  p − q,     nll  ∂loss/∂z
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import custom_vjp_primal_tree_values

from bessemer.kernels.fp8 import head_products
from bessemer.losses.cross_entropy import (
    LossOptions,
    Projection,
    _logit_gradient,
    _products,
    _statistics,
    _token_loss,
    choose_chunks,
    join,
    row_groups,
    scan_tiles,
    split,
)
from bessemer.topology.rules import constrain, shards

ESTIMATORS = ("nll", "exact", "reverse")
NO_GRADIENT, OF_HIDDEN, OF_HIDDEN_AND_HEAD = range(3)


class Sums(NamedTuple):
    """Σ w·(…) over all targets, float32. Only `loss` has a gradient, and in the policy alone."""

    loss: Array
    nll: Array
    kl_nll: Array
    kl: Array
    reverse: Array


@dataclass(frozen=True)
class Options:
    loss: LossOptions
    estimator: str


def kl_regularized_loss(
    policy: Projection,
    reference: Projection,
    targets: Array,
    weights: Array,
    beta: Array | float,
    *,
    estimator: str = "exact",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Sums:
    """Σ w·(loss + β·D) and what is logged with it. targets, weights: (B, T); targets below 0 are ignored."""
    mine, its = policy.hidden, reference.hidden
    weights = jnp.where(targets < 0, 0.0, weights.astype(jnp.float32))
    targets = jnp.maximum(targets, 0)
    if shards("batch") * shards("sequence") * shards("vocab") == 1:  # one long row: cutting it copies nothing
        mine, its, targets, weights = (x.reshape(1, -1, *x.shape[2:]) for x in (mine, its, targets, weights))
    columns = mine.shape[-1] if policy.columns is None else policy.columns.shape[1]
    count = choose_chunks(policy.chunks, targets.shape[0], targets.shape[1], 2 * columns)
    loss = LossOptions(policy.vocab_size, count, policy.softcap, label_smoothing, z_loss, False, policy.fp8)
    options = Options(loss, estimator)
    beta = jnp.asarray(beta, jnp.float32)
    sums = _summed(options, mine, policy.columns, its, reference.columns, targets, weights, beta)
    return Sums(sums[0], *jax.lax.stop_gradient(sums[1:]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(options: Options, *arrays: Any) -> tuple[Array, ...]:
    """Value only: what evaluation runs."""
    return _run(options, NO_GRADIENT, *arrays)[0]


def _forward(options: Options, *arrays: Any) -> tuple[tuple[Array, ...], Any]:
    """A frozen head has no gradient: its product is not made."""
    head = arrays[1]
    wanted = OF_HIDDEN_AND_HEAD if head is not None and head.perturbed else OF_HIDDEN
    return _run(options, wanted, *custom_vjp_primal_tree_values(arrays))


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, ...]) -> tuple[Any, ...]:
    dhidden, dhead = residuals
    g = cotangents[0]
    scaled = None if dhead is None else dhead * g.astype(dhead.dtype)
    return (dhidden * g).astype(dhidden.dtype), scaled, None, None, None, None, None


_summed.defvjp(_forward, _backward, symbolic_zeros=True)


def _run(
    options: Options,
    wanted: int,
    mine: Array,
    head: Array | None,
    its: Array,
    its_head: Array | None,
    targets: Array,
    weights: Array,
    beta: Array,
) -> tuple[tuple[Array, ...], Any]:
    """(sums, (dhidden, dhead)) over all tiles; dhead is kept apart per shard of rows, as in cross_entropy.py. wanted:
    which of the two gradients."""
    count, differentiate = options.loss.chunks, wanted != NO_GRADIENT
    logits, gradients = _head(head, mine.dtype, options.loss.fp8 if differentiate else None)
    its_logits, _ = _head(its_head, its.dtype, None)
    groups = row_groups(mine.shape[0], -(-mine.shape[1] // count))

    def tile(carry: tuple[Array, Any], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Any], Any]:
        sums, dhead = carry
        h, h_ref, t, w = inputs
        z, lse = _statistics(options.loss, logits(h))
        z_ref, lse_ref = _statistics(options.loss, its_logits(h_ref))
        terms, slope = _terms(options, z, lse, z_ref, lse_ref, t, beta)
        sums += jnp.stack([jnp.sum(w * term) for term in terms])
        if not differentiate:
            return (sums, dhead), None
        dlogits = _logit_gradient(options.loss, z, lse, t, w)
        if options.estimator == "nll":
            dlogits *= 1 + beta
        else:
            dlogits += (beta * w)[..., None] * slope * _uncapped(options.loss, z)
        bound = (1 + beta * jnp.max(jnp.abs(slope))) * jnp.max(w * (1 + 2 * options.loss.z_loss * jnp.abs(lse)))
        dh, added = gradients(h, dlogits, bound, None if dhead is None else groups)
        if dhead is not None:
            dhead = constrain(dhead + added, "batch", "sequence", None, "vocab")
        return (sums, dhead), dh.astype(h.dtype)

    zeros = None
    if wanted == OF_HIDDEN_AND_HEAD:
        assert head is not None
        zeros = constrain(jnp.zeros((*groups, *head.shape), jnp.float32), "batch", "sequence", None, "vocab")
    pieces = tuple(split(x, count) for x in (mine, its, targets, weights))
    (sums, dhead), dhidden = scan_tiles(tile, (jnp.zeros(len(Sums._fields), jnp.float32), zeros), pieces, count)
    if not differentiate:
        return tuple(sums), None
    dhidden = join(dhidden)[:, : mine.shape[1]]
    if head is None or wanted == OF_HIDDEN:
        return tuple(sums), (dhidden, None)
    return tuple(sums), (dhidden, jnp.sum(dhead, axis=(0, 1)).astype(head.dtype))


def _head(head: Array | None, dtype: Any, fp8: str | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(hidden → logits, their gradient → (dhidden, dhead)); without a head the logits are given."""
    if head is None:
        return lambda h: h.astype(jnp.float32), lambda h, dlogits, bound, groups: (dlogits, None)
    return _products(head, dtype) if fp8 is None else head_products(head, fp8)


def _terms(
    options: Options, z: Array, lse: Array, z_ref: Array, lse_ref: Array, targets: Array, beta: Array
) -> tuple[tuple[Array, ...], Array]:
    """Per token the fields of Sums, and ∂D/∂z (B, t, V) without the softcap (of no use with `nll`)."""
    loss, nll = _token_loss(options.loss, z, lse, targets)
    loss_ref, nll_ref = _token_loss(options.loss, z_ref, lse_ref, targets)
    real = jnp.arange(z.shape[-1]) < options.loss.vocab_size  # the rest only pads the vocabulary
    logp, logq = z - lse[..., None], z_ref - lse_ref[..., None]
    p, q, difference = jnp.exp(logp), jnp.exp(logq), jnp.where(real, logp - logq, 0.0)
    kl, reverse = jnp.sum(p * difference, axis=-1), -jnp.sum(q * difference, axis=-1)
    penalty = {"nll": loss - loss_ref, "exact": kl, "reverse": reverse}[options.estimator]
    slope = p * (difference - kl[..., None]) if options.estimator == "exact" else p - q
    return (loss + beta * penalty, nll, nll - nll_ref, kl, reverse), slope


def _uncapped(options: LossOptions, z: Array) -> Array | float:
    """∂z/∂logits of the softcap: 1 − (z/c)²; columns that only pad have no slope to multiply."""
    if not options.softcap:
        return 1.0
    return 1 - jnp.square(jnp.where(jnp.isfinite(z), z, 0.0) / options.softcap)
