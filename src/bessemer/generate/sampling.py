"""Choosing the next token from its logits: greedy or sampled, with filters and one random stream per row.

Every setting is an array with one entry per row, so one compiled program serves any mixture of settings. Penalties come
first (repetition on all tokens of the row, presence and frequency on generated ones), then temperature, then top-k by
rank, top-p of what is left, and min-p relative to the most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from bessemer.errors import InputError


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling settings. `seed`: one number, from which each row gets its own stream, or one number per row."""

    temperature: float = 0.0  # 0 = the most likely token, exactly
    top_k: int = 0  # only the k most likely; 0 = all
    top_p: float = 1.0  # only the fewest whose probabilities sum to p; 1 = all
    min_p: float = 0.0  # only those with min_p times the highest probability; 0 = all
    seed: int | Sequence[int] | None = None  # None: 0 in a batch of prompts, the engine's choice in a request
    repetition_penalty: float = 1.0  # logits of tokens in the row: divided by it if above 0, else multiplied; 1 = off
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens; 0 = off
    frequency_penalty: float = 0.0  # subtracted once per time the token was generated; 0 = off

    def __post_init__(self) -> None:
        seeds = [self.seed or 0] if isinstance(self.seed, int | None) else list(self.seed)
        penalty = self.repetition_penalty
        for holds, problem, given in (
            (math.isfinite(self.temperature) and self.temperature >= 0, "temperature is at least 0", self.temperature),
            (self.top_k >= 0, "top-k is at least 1, or 0 for no limit", self.top_k),
            (0 < self.top_p <= 1, "top-p is above 0 and at most 1", self.top_p),
            (0 <= self.min_p <= 1, "min-p is between 0 and 1", self.min_p),
            (all(0 <= seed < 2**32 for seed in seeds), "a seed is between 0 and 4294967295", self.seed),
            (math.isfinite(penalty) and penalty > 0, "repetition penalty is above 0", penalty),
            (math.isfinite(self.presence_penalty), "presence penalty is a number", self.presence_penalty),
            (math.isfinite(self.frequency_penalty), "frequency penalty is a number", self.frequency_penalty),
        ):
            if not holds:
                raise InputError(f"{problem}; got {given}.")

    def streams(self, rows: int) -> np.ndarray:
        """Return (rows, 2) uint32: the pair (seed, number) that defines each row's random stream (`row_keys`)."""
        seed = 0 if self.seed is None else self.seed
        if isinstance(seed, int):
            return np.stack([np.full(rows, seed, np.uint32), np.arange(rows, dtype=np.uint32)], axis=1)
        if len(seed) != rows:
            raise InputError(f"{len(seed)} seeds for {rows} prompts: give one, or one per prompt.")
        return np.stack([np.asarray(seed, np.uint32), np.zeros(rows, np.uint32)], axis=1)


class Way(IntEnum):
    """The work that choosing needs; a batch needs the most of its rows."""

    GREEDY = 0
    DRAWN = 1  # noise
    FILTERED = 2  # noise, ranking all tokens, and penalties


def way_of(options: Iterable[SamplingOptions]) -> Way | None:
    """Return the way of a batch, a program of its own, or None on a CPU, where the program branches at each step.

    Branches are free on a CPU; a GPU waits for the host at each, several times per step.
    """
    if jax.default_backend() == "cpu":
        return None
    return max((_way(sampling) for sampling in options), default=Way.GREEDY)


def _way(sampling: SamplingOptions) -> Way:
    drawn = sampling.temperature > 0
    some = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    penalties = (sampling.repetition_penalty - 1, sampling.presence_penalty, sampling.frequency_penalty)
    if (drawn and some) or any(penalties):
        return Way.FILTERED
    return Way.DRAWN if drawn else Way.GREEDY


def row_keys(streams: Array, step: Array | int) -> Array:
    """Return (B,) keys of one step: fold_in(fold_in(key(seed), number), step). streams: (B, 2); step: () or (B,)."""

    def key(stream: Array, step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(stream[0]), stream[1]), step)

    return jax.vmap(key)(streams, jnp.broadcast_to(jnp.asarray(step), streams.shape[:1]))


@struct.dataclass
class Filters:
    """The settings as arrays: (B,), one entry per row, or () for all rows."""

    temperature: Array | np.ndarray | np.float32
    top_k: Array | np.ndarray | np.int32
    top_p: Array | np.ndarray | np.float32
    min_p: Array | np.ndarray | np.float32
    repetition_penalty: Array | np.ndarray | np.float32
    presence_penalty: Array | np.ndarray | np.float32
    frequency_penalty: Array | np.ndarray | np.float32

    @classmethod
    def of(cls, sampling: SamplingOptions, vocab_size: int) -> Filters:
        values: dict[str, Any] = {field.name: np.float32(getattr(sampling, field.name)) for field in fields(cls)}
        return cls(**values | {"top_k": np.int32(min(sampling.top_k or vocab_size, vocab_size))})

    @classmethod
    def rows(cls, options: Sequence[SamplingOptions], vocab_size: int) -> Filters:
        columns: dict[str, Any] = {
            field.name: np.array([getattr(sampling, field.name) for sampling in options], np.float32)
            for field in fields(cls)
        }
        top_k = [min(sampling.top_k or vocab_size, vocab_size) for sampling in options]
        return cls(**columns | {"top_k": np.array(top_k, np.int32)})

    def columns(self, rows: int) -> Filters:
        """Return the settings as (B, 1), to broadcast against logits (B, V)."""
        return jax.tree.map(lambda value: jnp.broadcast_to(jnp.reshape(value, (-1, 1)), (rows, 1)), self)


def choose(
    logits: Array,
    keys: Array,
    filters: Filters,
    seen: Array | None = None,
    way: Way | None = None,
    made: Array | None = None,
) -> Array:
    """Return the next token of each row, (B,) int32: argmax of the scores, plus Gumbel noise for sampled rows.

    logits: (B, V) float32; keys: (B,). For penalties, `seen` (B, V) marks the tokens of the row, and `made` (B, V)
    counts generated ones. What no row needs is not computed (`way`: see `way_of`); rows do not affect each other.
    """
    return draw(policy_logits(logits, filters, seen, way, made), keys, filters, way)


def policy_logits(
    logits: Array, filters: Filters, seen: Array | None = None, way: Way | None = None, made: Array | None = None
) -> Array:
    """Return the logits (B, V) that tokens are drawn from: after penalties, temperature and filters."""
    filters = filters.columns(logits.shape[0])
    drawn = jnp.asarray(filters.temperature) > 0  # (B, 1)
    special = drawn & ~((filters.top_k >= logits.shape[-1]) & (filters.top_p >= 1) & (filters.min_p <= 0))
    if seen is not None:
        special |= filters.repetition_penalty != 1
    if made is not None:
        special |= (filters.presence_penalty != 0) | (filters.frequency_penalty != 0)

    def temper(logits: Array) -> Array:
        # with the maximum at 0, the smallest temperature overflows to -inf elsewhere, never to inf − inf
        shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
        return jnp.where(drawn, shifted / jnp.where(drawn, filters.temperature, 1), logits)

    def filtered() -> Array:
        return keep(temper(penalise(logits, seen, made, filters)), filters)

    return _either(way, Way.FILTERED, special, filtered, lambda: temper(logits))


def draw(scores: Array, keys: Array, filters: Filters, way: Way | None = None) -> Array:
    """Return the argmax of each row, (B,) int32, after Gumbel noise for sampled rows. scores: see `policy_logits`."""
    drawn = jnp.asarray(filters.columns(scores.shape[0]).temperature) > 0  # (B, 1)

    def noisy() -> Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:], scores.dtype))(keys)
        return jnp.where(drawn, scores + noise, scores)

    scores = _either(way, Way.DRAWN, drawn, noisy, lambda: scores)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def _either(way: Way | None, least: Way, needed: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    """Return yes() if any row needs it, else no(); with a fixed `way` that is known without a branch."""
    if way is None:
        return jax.lax.cond(jnp.any(needed), yes, no)
    return yes() if way >= least else no()


def policy_logprob(scores: Array, token: Array, filters: Filters) -> Array:
    """Return the log-probability (B,) with which each token was drawn: 0 for greedy rows, which have no choice.

    scores: (B, V), see `policy_logits`; token: (B,).
    """
    found = jnp.take_along_axis(jax.nn.log_softmax(scores), token[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.broadcast_to(filters.temperature, found.shape) > 0, found, 0.0)


def penalise(logits: Array, seen: Array | None, made: Array | None, filters: Filters) -> Array:
    """Return the logits with those of tokens already in the row lowered. logits, seen, made: (B, V).

    Repetition, r: logit / r if it is above 0, else logit · r, where seen (CTRL, arXiv 1909.05858). Presence, p, and
    frequency, f, as in OpenAI's protocol: logit − p · [made > 0] − f · made.
    """
    filters = filters.columns(logits.shape[0])
    if seen is not None:
        penalty = filters.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if made is not None:
        lowered = filters.presence_penalty + filters.frequency_penalty * made
        logits = jnp.where(made > 0, logits - lowered, logits)
    return logits


def keep(logits: Array, filters: Filters) -> Array:
    """Return the logits with filtered-out tokens at −∞; the most likely one always stays. logits: (B, V).

    Each filter keeps the first of the ranking, so a row is defined by how many stay and the logit of the last. Of equal
    logits the lowest ids come first, as in argmax: top-k 1 is greedy. A row without filters is unchanged.
    """
    filters = filters.columns(logits.shape[0])
    ranked = -jnp.sort(-logits, axis=-1)  # values only: sorting the ids as well takes several times as long
    rank = jnp.arange(logits.shape[-1])
    stays = rank < filters.top_k
    probabilities = jax.nn.softmax(jnp.where(stays, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # probability of everything ranked higher
    stays &= (before < filters.top_p) | (filters.top_p >= 1)  # a rounded sum may reach 1 before the last token
    stays &= probabilities >= filters.min_p * probabilities[:, :1]
    count = jnp.maximum(jnp.sum(stays, axis=-1, keepdims=True), 1)
    last = jnp.take_along_axis(ranked, count - 1, axis=-1)
    above, equal = logits > last, logits == last
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), logits, -jnp.inf)
