"""Batches of prompts for a trainer: what may be asked, what comes back, and the compiled function between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.errors import InputError, nearest
from bessemer.generate.decoder import run_rows
from bessemer.generate.rows import Asked, Output
from bessemer.generate.sampling import Filters, SamplingOptions, Way


@dataclass(frozen=True)
class GenerationConfig:
    """How prompts are continued. The fields from `temperature` on are those of SamplingOptions."""

    max_tokens: int = 64
    n: int = 1  # samples of each prompt
    stop_ids: tuple[int, ...] = ()  # beside the end tokens of the tokenizer
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if self.max_tokens < 1 or self.n < 1:
            raise InputError(f"max_tokens and n are at least 1; got {self.max_tokens} and {self.n}.")
        _ = self.sampling

    @property
    def sampling(self) -> SamplingOptions:
        names = [field.name for field in fields(SamplingOptions)]
        return SamplingOptions(**{name: getattr(self, name) for name in names})

    @classmethod
    def of(
        cls, config: GenerationConfig | Mapping[str, Any] | None, *overrides: Mapping[str, Any]
    ) -> GenerationConfig:
        """`config` with each of the overrides over it; an unknown name is an InputError."""
        base = config if isinstance(config, cls) else cls()
        given = [config] if isinstance(config, Mapping) else []
        for values in (*given, *overrides):
            known = [field.name for field in fields(cls)]
            for name in values:
                if name not in known:
                    close = nearest(name, known)
                    hint = f" Did you mean '{close}'?" if close else ""
                    raise InputError(
                        f"'{name}' is no setting of generation.{hint} Known: {', '.join(known)}."
                    )
            base = replace(base, **values)
        return base


@dataclass(frozen=True)
class GenerationResults:
    """B prompts, n samples of each in sequence: B·n rows. Arrays are int32; masks are 1 where a token is real."""

    generation_results: list[str]  # the text of each completion, end token left off
    prompt_ids: Any  # (B·n, T), left-padded
    prompt_mask: Any
    sequences: Any  # (B·n, T + N): prompt and completion
    completion_ids: Any  # (B·n, N), right-padded; the end token is part of it
    completion_mask: Any
    decoded_prompts: list[str]  # text of the prompts as the model read them
    completion_prompts: list[Any]  # the prompt of each completion, as it was given
    metadata: dict[str, Any] | None = None


def generate_rows(
    model: Any,
    pad_id: int,
    params: Any,
    step: Array,
    ids: Array,
    mask: Array,
    streams: Array,
    filters: Filters,
    stops: Array,
    *,
    tokens: int,
    way: Way | None,
) -> tuple[Array, Array, Array, Output]:
    """(sequences, ids, mask, output) of left-padded prompts. ids, mask: (B, T); streams: (B·n, 2); stops: (1, …).

    A row whose mask is 0 throughout only fills the batch. `step` moves the seed: another step draws otherwise.
    """
    width, each = ids.shape[1], streams.shape[0] // ids.shape[0]
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    begin = (width - lengths)[:, None]
    right = jnp.take_along_axis(ids, (jnp.arange(width) + begin) % width, axis=1)
    ids, mask, lengths = (jnp.repeat(array, each, axis=0) for array in (ids, mask, lengths))
    rows = lengths.shape[0]
    asked = Asked(
        limit=jnp.where(lengths > 0, jnp.minimum(tokens, model.block_size - lengths + 1), 0),
        streams=streams.at[:, 0].add(step.astype(streams.dtype)),
        filters=jax.tree.map(lambda value: jnp.broadcast_to(value, (rows,)), filters),
        stops=jnp.broadcast_to(stops, (rows, stops.shape[1])),
    )
    output = run_rows(model, pad_id, params, right, jnp.maximum(lengths, 1), asked, tokens=tokens, way=way)
    return jnp.concatenate([ids, output.ids.T], axis=1), ids, mask, output
