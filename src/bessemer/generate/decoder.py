"""Batch decoding: one prefill, then a loop on the device, compiled once per shape bucket.

Prompts are right-padded to a bucket, and rows and new tokens are rounded up too, so similar calls share a compilation.
A row that fills the context (the model's block) stops with "context" and is counted in a notice. A prompt longer than
the block loses its beginning, with a notice, to leave room for the new tokens (at most half the block).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bessemer.errors import InputError, nearest
from bessemer.generate.rows import Asked, Output, Text, begin_rows, decode_block, ends_of, forward, stop_table
from bessemer.generate.sampling import Filters, SamplingOptions, Way, way_of
from bessemer.generate.speculate import Speculation, speculate_block
from bessemer.models.llama import Llama
from bessemer.models.protocol import check_decodes
from bessemer.topology import CompiledTogether

SMALLEST = 16  # the shortest bucket of prompts and of new tokens


@dataclass(frozen=True)
class Generation:
    """New tokens of each row. `ids` includes the end token, if there is one, then padding."""

    ids: np.ndarray  # (B, N) int32
    lengths: np.ndarray  # (B,) real tokens of each row
    logprobs: np.ndarray  # (B, N) float32: log p(token) of the model itself, before temperature and filters
    reasons: tuple[str, ...]  # "stop" (an end token), "length" (max_tokens) or "context" (the block is full)
    notices: list[str] = field(default_factory=list)
    passes: np.ndarray | None = None  # (B,) with speculation: passes of each row
    drafted: np.ndarray | None = None  # (B,) with speculation: tokens of its drafts

    def row(self, index: int) -> list[int]:
        """Return the new tokens of a row, without its end token."""
        stop = self.reasons[index] == "stop"
        return [int(token) for token in self.ids[index, : self.lengths[index] - stop]]


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text: the tokenizer's document token, and those of an imported model."""
    return tuple(dict.fromkeys([tokenizer.bos_id, *(model.end_tokens if isinstance(model, Llama) else ())]))


class Decoder:
    """Generates with any parameters of one model: `decoder(params, prompts, max_tokens=…)`.

    model: has `decode`, `init_cache`, `vocab_size` and `block_size`. `end_ids` and any stop ids of a call end a row.
    `fetch` reads results from the device. `Engine` serves requests that come and go.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int = 0,
        end_ids: Sequence[int] = (),
        speculate: Speculation | None = None,
        fetch: Callable[[Any], Any] = jax.device_get,
    ):
        if speculate is not None:
            speculate.check(model)
        check_decodes(model)
        self.model, self.pad_id, self.end_ids, self.fetch = model, pad_id, tuple(end_ids), fetch
        static = ("tokens", "way")
        program = jax.jit(functools.partial(run_rows, model, pad_id, speculate=speculate), static_argnames=static)
        self._run = CompiledTogether(program, "decoding", static)

    @property
    def compilations(self) -> int:
        """The number of shape buckets compiled."""
        return self._run.compilations

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: SamplingOptions | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        """Continue each prompt (token ids) by up to `max_tokens` tokens; greedy without `sampling`."""
        stops = {*self.end_ids, *stop_ids}
        check_tokens(prompts, stops, max_tokens, self.model.vocab_size)
        block = self.model.block_size
        rows, notices = crop(prompts, max_tokens, block)
        limits = [min(max_tokens, block - len(row) + 1) for row in rows]
        sampling = sampling or SamplingOptions()
        arguments = self._arguments(rows, limits, sampling, stops)
        tokens = bucket(min(max_tokens, block), block)
        output = self.fetch(self._run(params, *arguments, tokens=tokens, way=way_of([sampling])))
        count, longest = len(rows), max(limits)
        ids, logprobs, lengths = output.ids.T, output.logprobs.T, output.made[:count]
        reasons = tuple(_reason(int(ids[i, lengths[i] - 1]) in stops, limits[i] < max_tokens) for i in range(count))
        full = reasons.count("context")
        if full:
            notices.append(
                f"{full} of {count} rows stopped before {max_tokens} new tokens, because prompt and "
                f"continuation filled the context of {block} tokens."
            )
        passes = None if output.passes is None else output.passes[:count]
        drafted = None if output.drafted is None else output.drafted[:count]
        made = (ids[:count, :longest], lengths, logprobs[:count, :longest])
        return Generation(*made, reasons, notices, passes, drafted)

    def _arguments(
        self, rows: Sequence[Sequence[int]], limits: Sequence[int], sampling: SamplingOptions, stops: set[int]
    ) -> tuple[np.ndarray, np.ndarray, Asked]:
        """Return prompts (B, P), lengths (B,) and the rest; B and P are buckets."""
        count = len(rows)
        height = 1 << (count - 1).bit_length()
        width = bucket(max(len(row) for row in rows), self.model.block_size)
        prompts = np.full((height, width), self.pad_id, np.int32)
        for index, row in enumerate(rows):
            prompts[index, : len(row)] = row
        filler = height - count
        asked = Asked(
            np.array([*limits, *[0] * filler], np.int32),
            np.pad(sampling.streams(count), ((0, filler), (0, 0))),
            Filters.rows([sampling] * height, self.model.vocab_size),
            stop_table([stops] * height),
        )
        return prompts, np.array([len(row) for row in rows] + [1] * filler, np.int32), asked


def check_tokens(
    prompts: Sequence[Sequence[int]], stops: Iterable[int], max_tokens: int | None, vocab_size: int
) -> None:
    """Raise InputError if a prompt is empty, a token is not in the vocabulary, or no token may be generated."""
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max tokens is {max_tokens}; at least one token can be generated.")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("the prompt has no tokens; begin it with the document token at least.")
    if not all(0 <= token < vocab_size for ids in (*prompts, stops) for token in ids):
        raise InputError(f"a prompt or stop token lies outside the model's vocabulary of {vocab_size}.")


def bucket(size: int, most: int) -> int:
    """Return `size` rounded up to a power of two, at least SMALLEST and at most `most`."""
    return min(max(SMALLEST, 1 << (size - 1).bit_length()), most)


def crop(prompts: Sequence[Sequence[int]], max_tokens: int, block: int) -> tuple[list[Sequence[int]], list[str]]:
    """Return prompts that fit the block, and a notice if any lost its beginning."""
    room = max(block - max_tokens + 1, block // 2, 1)
    rows = [prompt if len(prompt) <= block else prompt[-room:] for prompt in prompts]
    lost = [len(prompt) - len(row) for prompt, row in zip(prompts, rows, strict=True) if len(row) < len(prompt)]
    if not lost:
        return rows, []
    return rows, [
        f"{len(lost)} of {len(rows)} prompts are longer than the context of {block} tokens: their first "
        f"tokens ({sum(lost)} in all) were cropped, and the last {room} of each used."
    ]


def _reason(stopped: bool, short: bool) -> str:
    return "stop" if stopped else "context" if short else "length"


def run_rows(
    model: Any,
    pad_id: int,
    params: Any,
    prompts: Array,
    lengths: Array,
    asked: Asked,
    *,
    tokens: int,
    way: Way | None,
    speculate: Speculation | None = None,
) -> Output:
    """Prefill, then decode to the end of every row. prompts: (B, P), right-padded; lengths, `asked`: (B·n,), the n
    samples of a prompt in sequence; `tokens`: the most per row."""
    width, each = prompts.shape[1], lengths.shape[0] // prompts.shape[0]
    cache = model.init_cache(prompts.shape[0], min(width + tokens, model.block_size))
    _, cache = forward(model, params, prompts, cache, lengths[::each] - 1)
    parts = (cache, *ends_of(model.vocab_size, prompts, lengths[::each]))
    cache, token, seen = jax.tree.map(lambda leaf: jax.numpy.repeat(leaf, each, axis=0), parts)
    rows = begin_rows(model.vocab_size, cache, token, seen, asked)
    if speculate is None:
        return decode_block(model, pad_id, tokens, params, rows, way)[1]
    text = jnp.pad(jnp.repeat(prompts, each, axis=0), ((0, 0), (0, tokens)))
    rows = replace(rows, text=Text(text, lengths))
    return speculate_block(speculate, model, pad_id, tokens, params, rows, way, room=tokens)[1]


# --- batches of prompts for a trainer ---


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(SamplingOptions):
    """How `trainer.generate` continues prompts."""

    max_tokens: int = 64
    n: int = 1  # samples per prompt
    stop_ids: tuple[int, ...] = ()  # in addition to the end tokens of the tokenizer
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if self.max_tokens < 1 or self.n < 1:
            raise InputError(f"max_tokens and n are at least 1; got {self.max_tokens} and {self.n}.")

    @classmethod
    def of(cls, config: GenerationConfig | Mapping[str, Any] | None, *overrides: Mapping[str, Any]) -> GenerationConfig:
        """Return `config` updated with each of the overrides; raise InputError for an unknown name."""
        base = config if isinstance(config, cls) else cls()
        given = [config] if isinstance(config, Mapping) else []
        known = [field.name for field in fields(cls)]
        for values in (*given, *overrides):
            for name in values:
                if name not in known:
                    close = nearest(name, known)
                    hint = f" Did you mean '{close}'?" if close else ""
                    raise InputError(f"'{name}' is not a setting of generation.{hint} Known: {', '.join(known)}.")
            base = replace(base, **values)
        return base


@dataclass(frozen=True)
class GenerationResults:
    """B prompts, n samples of each in sequence: B·n rows. Arrays are int32; masks are 1 for real tokens."""

    generation_results: list[str]  # the text of each completion, without the end token
    prompt_ids: Any  # (B·n, T), left-padded
    prompt_mask: Any
    sequences: Any  # (B·n, T + N): prompt and completion
    completion_ids: Any  # (B·n, N), right-padded, with the end token
    completion_mask: Any
    decoded_prompts: list[str]  # the prompts as the model read them, as text
    completion_prompts: list[Any]  # the prompt of each completion, as passed
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
    """Return (sequences, ids, mask, output). ids, mask: (B, T), left-padded; streams: (B·n, 2); stops: (1, S).

    A row whose mask is all 0 only fills the batch. `step` is added to the seed, so that each step draws differently.
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
