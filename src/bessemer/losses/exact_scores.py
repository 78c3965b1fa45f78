"""Log-probabilities of given tokens whose bits depend on the parameters and the row alone.

A batch is read one row at a time (one per device along the batch), in three steps that every caller shares: the row's
hidden states, then its scores, and for a sampler its choices. Each step is a loop of unknown length, so the compiler
neither unrolls it nor fuses it with what stands around it: on a CPU in float32 the loop's body is the same machine code
in a program that samples, one that scores and one that also differentiates. So a token has the same log-probability in
all of them, whatever the other rows are, wherever the row stands, and (by causality) whatever follows the token.

Reading whole batches, as `token_scores.policy_scores` does, is faster, and rounds differently in each program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.losses.cross_entropy import (
    IGNORED,
    LossOptions,
    Projection,
    _logits,
    _pick,
    _statistics,
    choose_chunks,
    join,
    scan_tiles,
    split,
)
from bessemer.topology.rules import constrain, shards

INPUTS = ("input_ids", "positions", "segment_ids")
Apply = Callable[..., Any]


class Hidden(NamedTuple):
    """Hidden states of a batch, and the projection with the head that reads them (its own states are not used)."""

    projection: Projection
    states: Array  # (devices, turns, T, D): in each turn one row per device is read


def exact_scores(
    apply: Apply, params: Any, batch: Mapping[str, Array], temperature: float = 1.0
) -> tuple[Array, Array, Array]:
    """Return (log π(target), entropy of π, log p(target) at temperature 1), (B, T) each; 0 without a target.

    π = softmax(logits / temperature). Not differentiable; see `value_of`.
    """
    return score_rows(read_rows(apply, params, batch), batch["target_ids"], temperature)


@jax.custom_vjp
def value_of(value: Array, differentiable: Array) -> Array:
    """Return `value`; its gradient goes to `differentiable`, the same quantity computed for differentiation."""
    return value


def _value_forward(value: Array, differentiable: Array) -> tuple[Array, None]:
    return value, None


def _value_backward(_: None, cotangent: Array) -> tuple[None, Array]:
    return None, cotangent


value_of.defvjp(_value_forward, _value_backward)


def read_rows(apply: Apply, params: Any, batch: Mapping[str, Array]) -> Hidden:
    """Return the hidden states of a batch, for `score_rows` and other readers of `tiles_of`."""
    params = jax.lax.stop_gradient(params)
    rows = {name: _in_turns(jnp.asarray(batch[name])) for name in INPUTS if name in batch}

    def project(turn: Array | int) -> Projection:
        return apply(params, {name: array[:, turn] for name, array in rows.items()}, True, method="projection")

    projection = project(0)
    shape = (*rows["input_ids"].shape[:2], *projection.hidden.shape[1:])
    empty = _on_devices(jnp.zeros(shape, projection.hidden.dtype))

    def read(turn: Array, states: Array) -> Array:
        return states.at[:, turn].set(project(turn).hidden)

    return Hidden(projection, jax.lax.fori_loop(0, _last(batch["target_ids"]), read, empty))


def score_rows(hidden: Hidden, targets: Array, temperature: float = 1.0) -> tuple[Array, Array, Array]:
    """Return what `exact_scores` does. targets: (B, T)."""

    def scores(z: Array, lse: Array, logits: Array, targets: Array) -> Array:
        picked, apart = jnp.maximum(targets, 0), z - lse[..., None]
        entropy = -jnp.sum(jnp.where(jnp.isfinite(apart), jnp.exp(apart) * apart, 0.0), axis=-1)
        found = [_pick(z, picked) - lse, entropy]
        if temperature != 1:
            z, lse = _statistics(_options(hidden, 1.0), logits)
            found.append(_pick(z, picked) - lse)
        return jnp.where(targets < 0, 0.0, jnp.stack(found))

    found = tiles_of(hidden, targets, scores, 2 if temperature == 1 else 3, temperature)
    return found[0], found[1], found[0 if temperature == 1 else 2]


def tiles_of(
    hidden: Hidden,
    targets: Array,
    scores: Callable[..., Array],
    count: int,
    temperature: float,
    extra: tuple[Array, ...] = (),
) -> Array:
    """Return `scores(z, logsumexp(z), logits, targets, *extra of the rows)` for every target, (count, B, T) float32.

    z: (rows, t, V), capped logits over the temperature, of one tile of one row per device; targets: (B, T), with the
    positions of a row that have one moved to its front; extra: (B, …). 0 where the target is below 0.
    """
    projection, options = hidden.projection, _options(hidden, temperature)
    table = None
    if projection.columns is not None:
        table = constrain(jax.lax.stop_gradient(projection.columns).astype(hidden.states.dtype), "embed", "vocab")
    rows, others = _in_turns(jnp.asarray(targets)), tuple(_in_turns(jnp.asarray(array)) for array in extra)
    devices, turns, length = rows.shape

    def turn_of(turn: Array, out: Array) -> Array:
        given, order = rows[:, turn], jnp.argsort(rows[:, turn] < 0, axis=1, stable=True)
        states = jnp.take_along_axis(hidden.states[:, turn], order[..., None], axis=1)
        pieces = tuple(
            split(array, options.chunks, fill)
            for array, fill in ((states, 0), (jnp.take_along_axis(given, order, axis=1), IGNORED))
        )

        def tile(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
            h, t = inputs
            logits = h if table is None else _logits(h, table)
            return None, scores(*_statistics(options, logits), logits, t, *(array[:, turn] for array in others))

        _, found = scan_tiles(tile, None, pieces, options.chunks)
        found = jnp.moveaxis(found, 0, 1)  # (count, chunks, devices, t)
        found = jax.vmap(join)(found)[..., :length]
        found = jnp.take_along_axis(found, jnp.argsort(order, axis=1)[None], axis=2)
        return out.at[:, :, turn].set(found)

    empty = jnp.zeros((count, devices, turns, length), jnp.float32)
    out = jax.lax.fori_loop(0, _last(targets), turn_of, empty)
    return out.reshape(count, devices * turns, length)


def _options(hidden: Hidden, temperature: float) -> LossOptions:
    p, (devices, _, length) = hidden.projection, hidden.states.shape[:3]
    width = hidden.states.shape[3] if p.columns is None else p.columns.shape[1]
    chunks = 1 if p.columns is None else choose_chunks(p.chunks, devices, length, width)
    return LossOptions(p.vocab_size, chunks, p.softcap, temperature=temperature)


def _in_turns(array: Array) -> Array:
    """(B, …) → (devices, B / devices, …): rows that stay on their device, one of each at a time."""
    devices = shards("batch")
    devices = devices if len(array) % devices == 0 else 1
    return _on_devices(array.reshape(devices, len(array) // devices, *array.shape[1:]))


def _on_devices(array: Array) -> Array:
    return constrain(array, "batch", *(None,) * (array.ndim - 1))


def _last(targets: Array) -> Array:
    """Return how many turns reach the last row that has a target. It is unknown to the compiler, so that a loop of one
    turn stays a loop."""
    wanted = jnp.any(_in_turns(jnp.asarray(targets)) >= 0, axis=(0, 2))  # (turns,)
    return jnp.max(jnp.where(wanted, jnp.arange(1, wanted.size + 1), 0))
