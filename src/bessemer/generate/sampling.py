"""How the next token is chosen from its logits: greedy, or drawn, with filters; one random stream per row.

Everything is an array, one entry per row, so that one compiled program serves every mixture of settings. Penalties come
first: the repetition penalty on all tokens of the row, then presence and frequency on those that were generated.
Filters are then applied to the tempered distribution in this order: top-k by rank, top-p of what is left, min-p against
the most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from bessemer.errors import InputError


@dataclass(frozen=True)
class SamplingOptions:
    """What a caller asks for. `seed`: one number gives each row a stream of its own; or a list, one a row."""

    temperature: float = 0.0  # 0 = the most likely token, exactly
    top_k: int = 0  # the k most likely; 0 = all
    top_p: float = 1.0  # the fewest whose probabilities reach p; 1 = all
    min_p: float = 0.0  # at least min_p times the most likely one's probability; 0 = all
    seed: int | Sequence[int] | None = None  # none: 0 in a batch of prompts, the engine's choice in a request
    repetition_penalty: float = (
        1.0  # logits of tokens in the row: divided by it if above 0, else multiplied; 1 = off
    )
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated; 0 = off
    frequency_penalty: float = 0.0  # subtracted once for each time the token was generated; 0 = off

    def __post_init__(self) -> None:
        seeds = [] if self.seed is None else [self.seed] if isinstance(self.seed, int) else list(self.seed)
        penalty = self.repetition_penalty
        for holds, problem, given in (
            (
                math.isfinite(self.temperature) and self.temperature >= 0,
                "temperature is at least 0",
                self.temperature,
            ),
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
        """(rows, 2) uint32, the pair (seed, number) that `row_keys` makes a row's random stream of."""
        seed = 0 if self.seed is None else self.seed
        if isinstance(seed, int):
            return np.stack([np.full(rows, seed, np.uint32), np.arange(rows, dtype=np.uint32)], axis=1)
        if len(seed) != rows:
            raise InputError(f"{len(seed)} seeds for {rows} prompts: give one, or one a prompt.")
        return np.stack([np.asarray(seed, np.uint32), np.zeros(rows, np.uint32)], axis=1)


class Way(IntEnum):
    """What choosing takes; a batch takes the most that one of its rows does."""

    GREEDY = 0
    DRAWN = 1  # noise
    FILTERED = 2  # noise, the ranking of all tokens, and the penalties


def way_of(options: Iterable[SamplingOptions]) -> Way | None:
    """The way of a batch where it is worth a program of its own; None: the program finds out, step by step.

    On a CPU that costs nothing. A GPU waits for the host at every branch, several times a step.
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
    """(B,) keys of one step: fold_in(fold_in(key(seed), number), step). streams: (B, 2); step: () or (B,)."""

    def key(stream: Array, step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(stream[0]), stream[1]), step)

    return jax.vmap(key)(streams, jnp.broadcast_to(jnp.asarray(step), streams.shape[:1]))


@struct.dataclass
class Filters:
    """The settings as arrays: (B,), one entry a row, or () for all rows alike."""

    temperature: Array | np.ndarray | np.float32
    top_k: Array | np.ndarray | np.int32
    top_p: Array | np.ndarray | np.float32
    min_p: Array | np.ndarray | np.float32
    repetition_penalty: Array | np.ndarray | np.float32
    presence_penalty: Array | np.ndarray | np.float32
    frequency_penalty: Array | np.ndarray | np.float32

    @classmethod
    def of(cls, sampling: SamplingOptions, vocab_size: int) -> Filters:
        return cls(
            temperature=np.float32(sampling.temperature),
            top_k=np.int32(min(sampling.top_k or vocab_size, vocab_size)),
            top_p=np.float32(sampling.top_p),
            min_p=np.float32(sampling.min_p),
            repetition_penalty=np.float32(sampling.repetition_penalty),
            presence_penalty=np.float32(sampling.presence_penalty),
            frequency_penalty=np.float32(sampling.frequency_penalty),
        )

    @classmethod
    def rows(cls, options: Sequence[SamplingOptions], vocab_size: int) -> Filters:
        """One entry for each of `options`."""
        each = [cls.of(sampling, vocab_size) for sampling in options]
        return jax.tree.map(lambda *values: np.stack(values), *each)

    def columns(self, rows: int) -> Filters:
        """(B, 1) each, to stand beside logits (B, V)."""
        return jax.tree.map(lambda value: jnp.broadcast_to(jnp.reshape(value, (-1, 1)), (rows, 1)), self)


def choose(
    logits: Array,
    keys: Array,
    filters: Filters,
    seen: Array | None = None,
    way: Way | None = None,
    made: Array | None = None,
) -> Array:
    """The next token of each row: argmax of the scores, plus Gumbel noise where it is drawn.

    logits: (B, V) float32, keys: (B,) → (B,) int32. For the penalties, `seen` (B, V) marks the tokens of the row and
    `made` (B, V) counts those that were generated. What no row of the batch asks for is not computed (`way`: see
    `way_of`); what another row asks for changes nothing.
    """
    filters = filters.columns(logits.shape[0])
    drawn = jnp.asarray(filters.temperature) > 0  # (B, 1)
    special = drawn & ~((filters.top_k >= logits.shape[-1]) & (filters.top_p >= 1) & (filters.min_p <= 0))
    if seen is not None:
        special |= filters.repetition_penalty != 1
    if made is not None:
        special |= (filters.presence_penalty != 0) | (filters.frequency_penalty != 0)

    def temper(logits: Array) -> Array:
        # the most likely at 0: the smallest temperature overflows to -inf elsewhere, never to inf − inf
        shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
        return jnp.where(drawn, shifted / jnp.where(drawn, filters.temperature, 1), logits)

    def filtered() -> Array:
        return keep(temper(penalise(logits, seen, made, filters)), filters)

    def noisy() -> Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(keys)
        return jnp.where(drawn, scores + noise, scores)

    def either(least: Way, needed: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
        if way is None:
            return jax.lax.cond(jnp.any(needed), yes, no)
        return yes() if way >= least else no()

    scores = either(Way.FILTERED, special, filtered, lambda: temper(logits))
    scores = either(Way.DRAWN, drawn, noisy, lambda: scores)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def penalise(logits: Array, seen: Array | None, made: Array | None, filters: Filters) -> Array:
    """Logits with those of tokens already in the row lowered. logits, seen, made: (B, V).

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
    """Logits with the filtered-out tokens at −∞; the most likely one always stays. logits: (B, V).

    Each filter keeps the first of the ranking, so a row is settled by how many stay and the last one's logit. Of equal
    logits the lowest ids are first, as in argmax: top-k 1 is greedy. A row without filters comes out as it went in,
    whatever its neighbours ask for.
    """
    filters = filters.columns(logits.shape[0])
    ranked = -jnp.sort(-logits, axis=-1)  # values alone: sorting the ids as well takes several times as long
    rank = jnp.arange(logits.shape[-1])
    stays = rank < filters.top_k
    probabilities = jax.nn.softmax(jnp.where(stays, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # probability of everything ranked higher
    stays &= (before < filters.top_p) | (
        filters.top_p >= 1
    )  # a rounded sum may reach 1 before the last token
    stays &= probabilities >= filters.min_p * probabilities[:, :1]
    count = jnp.maximum(jnp.sum(stays, axis=-1, keepdims=True), 1)
    last = jnp.take_along_axis(ranked, count - 1, axis=-1)
    above, equal = logits > last, logits == last
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), logits, -jnp.inf)
