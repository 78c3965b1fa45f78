"""One optimizer step and one validation step, as pure functions of the state and the batch.

    g = Σ_micro ∇ Σ_tokens w·loss  /  Σ_micro Σ_tokens w        (float32, divided once)

so the number of micro-batches, devices and masks never change what is optimized.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bessemer.data.rows.rows import COMPLETIONS
from bessemer.kernels.ops import ROW_KEYS, row_keys
from bessemer.losses.cross_entropy import PROGRESS, target_weights
from bessemer.models.moe import LOAD, balance_metrics
from bessemer.optim.state import apply_updates
from bessemer.training.state import Statistics, TrainState, judge, widened
from bessemer.training.tied_head import followed, tied_gradients, without_discarded

Batch = dict[str, jax.Array]
Meta = dict[str, jax.Array]

TARGETS = "target_tokens"
ROUNDING = 2**32 - 1
"""Folded into a step's key for the rounding of bf16 parameters; micro-batches fold in their number."""


def train_step(
    state: TrainState, batch: Batch, key: jax.Array, accumulate_steps: int
) -> tuple[TrainState, jax.Array, Meta]:
    """batch leaves: (S, B, T). Returns the new state, the loss, and the step's exact global sums."""
    key = jax.random.fold_in(key, state.step)
    sums, grads = _accumulate(state, batch, key, accumulate_steps)
    weight = sums["weight"]
    grads = jax.tree.map(lambda g: g / weight, grads)
    loss = sums["loss"] / weight
    counted = grads
    if state.tied is not None:
        grads = tied_gradients(grads, state.params, state.tied > 0)
        counted = without_discarded(grads, state.tied > 0)
    norm = jnp.sqrt(jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(counted)]).sum())
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    limit = state.rules.max_grad_norm
    if limit > 0:
        scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    applied, guard, spikes = judge(state.rules.spikes, state.guard, loss, finite, state.data_step)
    load = sums.pop(LOAD, None)
    new_state = _updated(state, grads, applied, guard, jax.random.fold_in(key, ROUNDING), load)
    targets = sums.pop(TARGETS, weight)  # tokens, where the loss is divided by something else, such as pairs
    meta = {name: value / weight for name, value in sums.items() if name not in ("loss", "weight")}
    meta |= state.rules.rates(jnp.asarray(state.step)) | {
        "loss": loss,
        "grad_norm": norm,
        TARGETS: targets,
        "finite": finite,
        "clipped": finite & (norm > limit) if limit > 0 else jnp.zeros((), bool),
        **spikes,
        **({} if load is None else balance_metrics(load)),
    }
    return new_state, loss, meta


def _accumulate(state: TrainState, batch: Batch, key: jax.Array, accumulate_steps: int) -> tuple[Meta, Any]:
    """Sum weighted losses, weights, metrics and gradients over the micro-batches, in float32.

    The gradient is taken at the float32 form of bf16 parameters, so that it is not rounded to bf16 on the way.
    """

    def micro(params: Any, rows: Batch, index: jax.Array) -> tuple[Meta, Any]:
        count = len(next(iter(rows.values())))
        rows = {**rows, ROW_KEYS: row_keys(key, index * count + jnp.arange(count))}
        if state.rules.steps:
            rows[PROGRESS] = jnp.asarray(state.step / state.rules.steps, jnp.float32)

        def loss_of(p: Any) -> tuple[jax.Array, Meta]:
            loss, weight, metrics = state.objective(p, rows, jax.random.fold_in(key, index))
            counted = {TARGETS: target_weights(rows).sum()} if "target_ids" in rows else {}
            return loss, {"loss": loss, "weight": weight, **metrics, **counted}

        grads, sums = jax.grad(loss_of, has_aux=True)(widened(params))
        sums = jax.tree.map(lambda s: jnp.asarray(s, jnp.float32), sums)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return sums, state.rules.place_gradients(grads)

    if accumulate_steps == 1:
        return micro(state.params, jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32))

    def body(total: tuple[Meta, Any], xs: tuple[Batch, jax.Array]) -> tuple[tuple[Meta, Any], None]:
        return jax.tree.map(jnp.add, total, micro(state.params, *xs)), None

    def turn(index: jax.Array, total: tuple[Meta, Any]) -> tuple[Meta, Any]:
        return body(total, (jax.tree.map(lambda x: x[index], batch), index))[0]

    first = jax.tree.map(lambda x: x[0], batch)
    shapes = jax.eval_shape(micro, state.params, first, jnp.zeros((), jnp.int32))
    zero_sums, zero_grads = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    start = (zero_sums, state.rules.place_gradients(zero_grads))
    if COMPLETIONS in batch:
        return jax.lax.fori_loop(0, used_micro_batches(batch), turn, start)
    total, _ = jax.lax.scan(body, start, (batch, jnp.arange(accumulate_steps)))
    return total


def used_micro_batches(batch: Batch) -> jax.Array:
    """Return how many micro-batches of packed rows hold examples; the others come after them."""
    return jnp.sum(jnp.any(batch[COMPLETIONS] > 0, axis=(1, 2)), dtype=jnp.int32)


def _updated(
    state: TrainState, grads: Any, applied: jax.Array, guard: Statistics | None, key: jax.Array, load: jax.Array | None
) -> TrainState:
    """Apply the optimizer; a bad step advances `step` and changes no parameter and no moment.

    key: for the rounding of bf16 parameters; load: tokens by layer and expert, by which routers are balanced.
    """
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params, step=state.step)
    params = apply_updates(state.params, updates, key)
    if load is not None and state.rules.rebalance is not None:
        params = state.rules.rebalance(params, load)
    tied = state.tied
    if tied is not None:
        params = followed(params, tied > 0)
        tied *= state.step + 1 < state.rules.untied_from

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    params = keep(params, state.params)
    ema = state.ema
    if ema is not None:
        decay = state.rules.ema_decay
        ema = keep(jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, params), ema)
    return state.replace(
        step=state.step + 1,
        data_step=state.data_step + 1,
        params=params,
        opt_state=keep(opt_state, state.opt_state),
        ema=ema,
        guard=guard,
        tied=tied,
    )


def row_moments(nats: jax.Array, size: jax.Array) -> Meta:
    """Sums over rows, from nats and bytes of each row (B,): what the standard error of bits per byte is made of."""
    return {
        "rows": (size > 0).astype(jnp.float32).sum(),
        "nats_nats": (nats * nats).sum(),
        "nats_bytes": (nats * size).sum(),
        "bytes_bytes": (size * size).sum(),
    }


def val_step(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, Meta]:
    """Σ loss, Σ weight over S micro-batches, and the sums that make bits per byte.

    Token batches are measured by their plain negative log-likelihood (no smoothing, no z-loss), unless the objective
    has the trait `own_validation`;
    bits per byte = nats / (ln 2 · bytes) over targets that stand for bytes, so specials do not count.
    """

    def micro(rows: Batch) -> Meta:
        if state.rules.own_validation or "target_ids" not in rows:
            loss, weight, metrics = state.objective(state.params, rows, None)
            return {"loss": loss, "weight": weight, **metrics}
        logprobs = state.apply_fn(state.whole(), rows, method="token_logprobs")
        weights = target_weights(rows)
        sums = {"loss": -(logprobs * weights).sum(), "weight": weights.sum()}
        if "target_bytes" in rows:
            counted = weights * (rows["target_bytes"] > 0)
            sums["nats"] = -(logprobs * counted).sum()
            sums["bytes"] = (counted * rows["target_bytes"]).sum()
            sums |= row_moments(-(logprobs * counted).sum(-1), (counted * rows["target_bytes"]).sum(-1))
        return sums

    def body(total: Meta, rows: Batch) -> tuple[Meta, None]:
        return jax.tree.map(jnp.add, total, micro(rows)), None

    shapes = jax.eval_shape(micro, jax.tree.map(lambda x: x[0], batch))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, _ = jax.lax.scan(body, zero, batch)
    return sums.pop("loss"), sums.pop("weight"), sums
