"""The decoder: one prefill, then a loop on the device, compiled once a shape bucket.

Prompts are padded on the right to a bucket, rows and new tokens are rounded up likewise, so calls of similar
size share one compilation. The context is the model's block: cached decoding equals the full forward up to
there and is not defined beyond, so a row that fills it stops ("context") and is counted in a notice. A prompt
longer than the block is cropped from the left, with a notice, to leave room for the new tokens (at most half
the block).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

from bessemer.errors import InputError
from bessemer.generate.rows import Asked, Output, begin_rows, decode_block, forward, stop_table
from bessemer.generate.sampling import Filters, SamplingOptions, Way, way_of
from bessemer.topology import CompiledTogether

SMALLEST = 16
"""The shortest bucket of prompts and of new tokens."""


@dataclass(frozen=True)
class Generation:
    """New tokens of each row. `ids` holds the end token where one came, and padding after it."""

    ids: np.ndarray  # (B, N) int32
    lengths: np.ndarray  # (B,) tokens of the row that are real
    logprobs: np.ndarray  # (B, N) float32: log p(token) of the model itself, before temperature and filters
    reasons: tuple[str, ...]  # "stop" (an end token), "length" (max_tokens) or "context" (the block is full)
    notices: list[str] = field(default_factory=list)

    def row(self, index: int) -> list[int]:
        """The new tokens of a row, its end token left off."""
        stop = self.reasons[index] == "stop"
        return [int(token) for token in self.ids[index, : self.lengths[index] - stop]]


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends a text: the tokenizer's document token, and the ends that an imported model brought."""
    return tuple(dict.fromkeys([tokenizer.bos_id, *getattr(model, "end_tokens", ())]))


class Decoder:
    """Generates with any parameters of one model: `decoder(params, prompts, max_tokens=…)`.

    model: has `decode`, `init_cache`, `vocab_size` and `block_size`. `end_ids` end a row, as does any stop id
    of the call. `fetch` reads the results from the device. For requests that come and go there is `Engine`.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int = 0,
        end_ids: Sequence[int] = (),
        fetch: Callable[[Any], Any] = jax.device_get,
    ):
        self.model = model
        self.pad_id = pad_id
        self.end_ids = tuple(end_ids)
        self.fetch = fetch
        static = ("tokens", "way")
        program = jax.jit(functools.partial(run_rows, model, pad_id), static_argnames=static)
        self._run = CompiledTogether(program, "decoding", static)

    @property
    def compilations(self) -> int:
        """How many shape buckets have been compiled."""
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
        self._check(prompts, max_tokens, stop_ids)
        block = self.model.block_size
        rows, notices = crop(prompts, max_tokens, block)
        limits = [min(max_tokens, block - len(row) + 1) for row in rows]
        stops = {*self.end_ids, *stop_ids}
        sampling = sampling or SamplingOptions()
        arguments = self._arguments(rows, limits, sampling, stops)
        tokens = bucket(min(max_tokens, block), block)
        output = self.fetch(self._run(params, *arguments, tokens=tokens, way=way_of([sampling])))
        count, longest = len(rows), max(limits)
        ids, logprobs, lengths = output.ids.T, output.logprobs.T, output.made[:count]
        reasons = tuple(
            _reason(int(ids[i, lengths[i] - 1]) in stops, limits[i] < max_tokens) for i in range(count)
        )
        full = reasons.count("context")
        if full:
            notices.append(
                f"{full} of {count} rows stopped before {max_tokens} new tokens, because prompt and "
                f"continuation filled the context of {block} tokens."
            )
        return Generation(ids[:count, :longest], lengths, logprobs[:count, :longest], reasons, notices)

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int, stop_ids: Sequence[int]) -> None:
        if max_tokens < 1:
            raise InputError(f"max tokens is {max_tokens}; at least one token can be generated.")
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise InputError("a prompt has no tokens; begin it with the document token at least.")
        size = self.model.vocab_size
        if not all(0 <= token < size for ids in (*prompts, self.end_ids, stop_ids) for token in ids):
            raise InputError(f"a prompt or stop token lies outside the model's vocabulary of {size}.")

    def _arguments(
        self,
        rows: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: SamplingOptions,
        stops: set[int],
    ) -> tuple[np.ndarray, np.ndarray, Asked]:
        """Prompts (B, P), lengths (B,) and the rest; B and P are buckets."""
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


def bucket(size: int, most: int) -> int:
    """`size` up to the next power of two, at least SMALLEST and at most `most`."""
    return min(max(SMALLEST, 1 << (size - 1).bit_length()), most)


def crop(
    prompts: Sequence[Sequence[int]], max_tokens: int, block: int
) -> tuple[list[Sequence[int]], list[str]]:
    """Prompts that fit the block, and a notice if any had to lose its beginning."""
    room = max(block - max_tokens + 1, block // 2, 1)
    rows = [prompt if len(prompt) <= block else prompt[-room:] for prompt in prompts]
    lost = [
        len(prompt) - len(row) for prompt, row in zip(prompts, rows, strict=True) if len(row) < len(prompt)
    ]
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
) -> Output:
    """Prefill and loop to the end of every row. prompts: (B, P), right-padded; lengths, `asked`: (B·n,), n samples of
    a prompt in sequence; `tokens` is the most a row may make, `way` of choosing them."""
    width, each = prompts.shape[1], lengths.shape[0] // prompts.shape[0]
    cache = model.init_cache(prompts.shape[0], min(width + tokens, model.block_size))
    _, cache = forward(model, params, prompts, cache, lengths[::each] - 1)
    cache, prompts = jax.tree.map(lambda leaf: jax.numpy.repeat(leaf, each, axis=0), (cache, prompts))
    rows = begin_rows(model.vocab_size, cache, prompts, lengths, asked)
    return decode_block(model, pad_id, tokens, params, rows, way)[1]
