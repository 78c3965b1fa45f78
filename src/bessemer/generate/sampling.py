"""How the next token is chosen from its logits: greedy, or drawn, with filters; one random stream a row.

Everything is an array, so that one compiled decoder serves every setting. Filters are applied to the tempered
distribution in this order: top-k by rank, top-p of what is left, min-p against the most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    seed: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        seeds = [self.seed] if isinstance(self.seed, int) else list(self.seed)
        for holds, problem in (
            (math.isfinite(self.temperature) and self.temperature >= 0, "temperature is at least 0"),
            (self.top_k >= 0, "top-k is at least 1, or 0 for no limit"),
            (0 < self.top_p <= 1, "top-p is above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min-p is between 0 and 1"),
            (all(0 <= seed < 2**32 for seed in seeds), "a seed is between 0 and 4294967295"),
        ):
            if not holds:
                raise InputError(f"{problem}; got {self}.")

    def streams(self, rows: int) -> np.ndarray:
        """(rows, 2) uint32, the pair (seed, number) that `row_keys` makes a row's random stream of."""
        if isinstance(self.seed, int):
            return np.stack([np.full(rows, self.seed, np.uint32), np.arange(rows, dtype=np.uint32)], axis=1)
        if len(self.seed) != rows:
            raise InputError(f"{len(self.seed)} seeds for {rows} prompts: give one, or one a prompt.")
        return np.stack([np.asarray(self.seed, np.uint32), np.zeros(rows, np.uint32)], axis=1)


def row_keys(streams: Array, step: Array | int) -> Array:
    """(B,) keys of one step: fold_in(fold_in(key(seed), number), step). streams: (B, 2)."""

    def key(stream: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(stream[0]), stream[1]), step)

    return jax.vmap(key)(streams)


@struct.dataclass
class Filters:
    """The settings of all rows as scalars on the device."""

    temperature: Array | np.float32
    top_k: Array | np.int32
    top_p: Array | np.float32
    min_p: Array | np.float32

    @classmethod
    def of(cls, sampling: SamplingOptions, vocab_size: int) -> Filters:
        return cls(
            temperature=np.float32(sampling.temperature),
            top_k=np.int32(min(sampling.top_k or vocab_size, vocab_size)),
            top_p=np.float32(sampling.top_p),
            min_p=np.float32(sampling.min_p),
        )


def choose(logits: Array, keys: Array, filters: Filters) -> Array:
    """The next token of each row. logits: (B, V) float32, keys: (B,) → (B,) int32."""

    def draw() -> Array:
        tempered = logits / filters.temperature
        unfiltered = (filters.top_k >= logits.shape[-1]) & (filters.top_p >= 1) & (filters.min_p <= 0)
        allowed = jax.lax.cond(unfiltered, lambda: tempered, lambda: keep(tempered, filters))
        return jax.vmap(jax.random.categorical)(keys, allowed).astype(jnp.int32)

    def greedy() -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(filters.temperature > 0, draw, greedy)


def keep(logits: Array, filters: Filters) -> Array:
    """Logits with the filtered-out tokens at −∞; the most likely one always stays. logits: (B, V).

    Ranks come from a stable sort, so of equal logits the lowest id is first, as in argmax: top-k 1 is greedy.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    stays = rank < filters.top_k
    probabilities = jax.nn.softmax(jnp.where(stays, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # probability of everything ranked higher
    stays &= before < filters.top_p
    stays &= probabilities >= filters.min_p * probabilities[:, :1]
    stays |= rank == 0
    back = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(stays, back, axis=-1), logits, -jnp.inf)
