"""The loss of a student against a teacher, without ever holding the logits of either.

Per token with weight w and target t, for logits z (student) and y (teacher), p = softmax(y/τ), q = softmax(z/τ):

    loss = α·τ²·KL + (1 − α)·(logsumexp(z) − z_t),     KL =  forward  Σ_v p_v (log p_v − log q_v)
                                                             reverse  Σ_v q_v (log q_v − log p_v)

A teacher stored as its k most likely tokens lacks the mass of the others, p_rest = 1 − Σ_k p. `bucket` keeps it as one
outcome, Σ_k p (log p − log q) + p_rest (log p_rest − log q_rest): a lower bound, 0 only where the student agrees on
every stored token and on the rest together. `renormalize` divides p by its stored sum and leaves the rest out.

As in cross_entropy.py each tile's gradient is computed where its logits are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import custom_vjp_primal_tree_values

from bessemer.losses.cross_entropy import (
    LossOptions,
    Projection,
    _logits,
    _pick,
    _statistics,
    choose_chunks,
    join,
    split,
)
from bessemer.topology.rules import constrain


class TopTokens(NamedTuple):
    """A stored teacher: its most likely tokens and their log-probabilities at the run's temperature, (B, T, K) each."""

    ids: Array
    logprobs: Array


@dataclass(frozen=True)
class DistillOptions:
    """Static options: mixture α, temperature τ, direction, and what to do with the mass that was not stored."""

    alpha: float
    temperature: float
    student: LossOptions
    teacher: LossOptions | None  # None: stored
    renormalize: bool = False
    reverse: bool = False


def distillation_loss(
    student: Projection,
    teacher: Projection | TopTokens,
    targets: Array,
    weights: Array,
    *,
    alpha: float,
    temperature: float,
    renormalize: bool = False,
    reverse: bool = False,
    chunks: int | str = "auto",
) -> tuple[Array, Array, Array]:
    """(Σ w·loss, Σ w·KL, Σ w·nll) in float32; the first is differentiable, in the student. targets, weights: (B, T);
    `reverse` needs the whole of the teacher's distribution, so a live one."""
    live = isinstance(teacher, Projection)
    columns = (student.hidden if student.columns is None else student.columns).shape[-1]
    count = choose_chunks(chunks, targets.shape[0], targets.shape[1], columns * (2 if live else 1))
    options = DistillOptions(
        alpha,
        temperature,
        LossOptions(student.vocab_size, count, student.softcap),
        LossOptions(teacher.vocab_size, count, teacher.softcap) if isinstance(teacher, Projection) else None,
        renormalize,
        reverse,
    )
    if isinstance(teacher, Projection):
        against: tuple[Array, ...] = (teacher.hidden,)
        fixed = _table(teacher.columns, teacher.hidden)
    else:
        against, fixed = tuple(teacher), None
    weights = jnp.where(targets < 0, 0.0, weights.astype(jnp.float32))
    held = jax.lax.stop_gradient((*against, jnp.maximum(targets, 0), weights))
    sums = _summed(options, student.hidden, student.columns, held, jax.lax.stop_gradient(fixed))
    return sums[0], jax.lax.stop_gradient(sums[1]), jax.lax.stop_gradient(sums[2])


def top_tokens(teacher: Projection, k: int, temperature: float, chunks: int | str = "auto") -> TopTokens:
    """Return the teacher's k most likely tokens at each position, most likely first."""
    batch, length = teacher.hidden.shape[:2]
    columns = (teacher.hidden if teacher.columns is None else teacher.columns).shape[-1]
    count = choose_chunks(chunks, batch, length, columns)
    options = LossOptions(teacher.vocab_size, count, teacher.softcap)
    table = _table(teacher.columns, teacher.hidden)

    def tile(_: None, hidden: Array) -> tuple[None, tuple[Array, Array]]:
        z = _statistics(options, _project(hidden, table))[0] / temperature
        values, ids = jax.lax.top_k(z, k)
        return None, (ids.astype(jnp.int32), values - jax.nn.logsumexp(z, axis=-1, keepdims=True))

    _, (ids, logprobs) = jax.lax.scan(tile, None, split(teacher.hidden, count))
    return TopTokens(join(ids)[:, :length], join(logprobs)[:, :length])


def _table(head: Array | None, hidden: Array) -> Array | None:
    return None if head is None else constrain(head.astype(hidden.dtype), "embed", "vocab")


def _project(hidden: Array, table: Array | None) -> Array:
    return hidden.astype(jnp.float32) if table is None else _logits(hidden, table)


def _tile(
    options: DistillOptions, hidden: Array, head: Array | None, held: tuple[Array, ...], fixed: Array | None
) -> tuple[Array, Array]:
    """(Σ w·loss, [Σ w·KL, Σ w·nll]) of one tile of tokens."""
    *against, targets, weights = held
    z, lse = _statistics(options.student, _project(hidden, _table(head, hidden)))
    cooled = z / options.temperature
    norm = jax.nn.logsumexp(cooled, axis=-1)
    if options.teacher is not None:
        y = _statistics(options.teacher, _project(against[0], fixed))[0] / options.temperature
        sides = (y, cooled, norm)
        if options.reverse:
            sides = (cooled, y, jax.nn.logsumexp(y, axis=-1))
        divergence = _full_divergence(*sides, options.student.vocab_size)
    else:
        divergence = _stored_divergence(TopTokens(*against), cooled, norm, options)
    nll = lse - _pick(z, targets)
    kl, nll = jnp.sum(weights * divergence), jnp.sum(weights * nll)
    return options.alpha * options.temperature**2 * kl + (1 - options.alpha) * nll, jnp.stack([kl, nll])


def _full_divergence(y: Array, z: Array, norm: Array, vocab_size: int) -> Array:
    """Σ_v p_v (log p_v − log q_v) of p = softmax(y), q = softmax(z). y, z: (B, t, V), padding at −∞ and without part in
    it; norm: logsumexp of z."""
    logp = y - jax.nn.logsumexp(y, axis=-1, keepdims=True)
    known = (jnp.arange(z.shape[-1]) < vocab_size) & (logp > -jnp.inf)
    gap = jnp.where(known, logp - jnp.where(known, z, 0.0) + norm[..., None], 0.0)
    return jnp.sum(jnp.exp(logp) * gap, axis=-1)


def _stored_divergence(teacher: TopTokens, z: Array, norm: Array, options: DistillOptions) -> Array:
    logp, logq = teacher.logprobs, jnp.take_along_axis(z, teacher.ids, axis=-1) - norm[..., None]
    kept = jax.nn.logsumexp(logp, axis=-1, keepdims=True)
    if options.renormalize:
        logp = logp - kept
    divergence = jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1)
    if options.renormalize or teacher.ids.shape[-1] >= options.student.vocab_size:
        return divergence
    rest = jnp.maximum(1 - jnp.exp(kept[..., 0]), 1e-12)  # p_rest; rounding must not make it negative
    others = jnp.put_along_axis(z, teacher.ids, -jnp.inf, axis=-1, inplace=False)
    return divergence + rest * (jnp.log(rest) - jax.nn.logsumexp(others, axis=-1) + norm)


def _pieces(options: DistillOptions, hidden: Array, held: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(split(x, options.student.chunks) for x in (hidden, *held))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(
    options: DistillOptions, hidden: Array, head: Array | None, held: tuple[Array, ...], fixed: Array | None
) -> Array:
    """[Σ w·loss, Σ w·KL, Σ w·nll]: value only, which is what evaluation runs."""

    def tile(sums: Array, inputs: tuple[Array, ...]) -> tuple[Array, None]:
        loss, parts = _tile(options, inputs[0], head, inputs[1:], fixed)
        return sums + jnp.concatenate([loss[None], parts]), None

    return jax.lax.scan(tile, jnp.zeros(3, jnp.float32), _pieces(options, hidden, held))[0]


def _forward(
    options: DistillOptions, hidden: Any, head: Any, held: tuple[Any, ...], fixed: Any
) -> tuple[Array, tuple[Any, ...]]:
    """Value and gradient, tile by tile; the head's gradient is added up in float32. A frozen head has none."""
    trained = head is not None and head.perturbed
    hidden, head, held, fixed = custom_vjp_primal_tree_values((hidden, head, held, fixed))
    which = (0, 1) if trained else 0
    gradient = jax.value_and_grad(partial(_tile, options), argnums=which, has_aux=True)

    def tile(carry: tuple[Array, Any], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Any], Array]:
        sums, dhead = carry
        (loss, parts), grads = gradient(inputs[0], head, inputs[1:], fixed)
        dh = grads[0] if trained else grads
        dhead = dhead + grads[1].astype(jnp.float32) if trained else None
        return (sums + jnp.concatenate([loss[None], parts]), dhead), dh

    start = (jnp.zeros(3, jnp.float32), jnp.zeros(head.shape, jnp.float32) if trained else None)
    (sums, dhead), dhidden = jax.lax.scan(tile, start, _pieces(options, hidden, held))
    return sums, (join(dhidden)[:, : hidden.shape[1]], dhead)


def _backward(options: DistillOptions, residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    dhidden, dhead = residuals
    return (dhidden * g[0]).astype(dhidden.dtype), None if dhead is None else dhead * g[0], None, None


_summed.defvjp(_forward, _backward, symbolic_zeros=True)
