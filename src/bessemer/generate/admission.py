"""Requests on their way into slots: what is asked of them, how they are grouped, and their arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.errors import InputError
from bessemer.generate.decoder import bucket
from bessemer.generate.request import TOP, Handle, Request
from bessemer.generate.rows import STOPS, Asked, stop_table
from bessemer.generate.sampling import Filters, SamplingOptions
from bessemer.generate.slots import Admission, Slots

if TYPE_CHECKING:
    from bessemer.generate.engine import Engine

PROMPTS, ROWS = 16, 64
"""Prompts prefilled by one program, and slots it fills: what a round may need beside the cache."""


@dataclass
class Joining:
    """Samples `indices` of a request, the slots they go to, and what their slot holds of the prompt already."""

    handle: Handle
    indices: range
    slots: list[int] = field(default_factory=list)
    held: int = 0
    limit: int = 0

    @property
    def count(self) -> int:
        return len(self.indices)

    @property
    def length(self) -> int:
        return len(self.handle.request.prompt_ids)


def check_request(engine: Engine, request: Request) -> None:
    """InputError, with the remedy, when a request cannot be served."""
    prompt, size = request.prompt_ids, engine.vocab_size
    stops = {*engine.end_ids, *request.stop_ids}
    for holds, problem in (
        (len(prompt) > 0, "the prompt has no tokens; begin it with the document token at least"),
        (
            len(prompt) <= engine.capacity,
            f"the prompt has {len(prompt)} tokens and the context {engine.capacity}: shorten it",
        ),
        (request.n >= 1, f"n is {request.n}; at least one sample can be asked for"),
        (
            request.max_tokens is None or request.max_tokens >= 1,
            f"max tokens is {request.max_tokens}; at least one token can be generated",
        ),
        (
            all(0 <= token < size for ids in (prompt, stops) for token in ids),
            f"a prompt or stop token lies outside the model's vocabulary of {size}",
        ),
        (
            len(stops) <= STOPS,
            f"{len(stops)} stop tokens, with the model's own; at most {STOPS} are possible",
        ),
        (all(request.stop_strings), "a stop string is empty; it would stop before the first character"),
        (
            not request.stop_strings or engine.tokenizer is not None,
            "stop strings need a tokenizer, and this engine has none: give it one, or use stop_ids",
        ),
        (
            request.seed is not None or isinstance(request.sampling.seed, int | None),
            "a request has one seed; its samples get streams of their own",
        ),
        (request.seed is None or 0 <= request.seed < 2**32, "a seed is between 0 and 4294967295"),
        (
            0 <= request.top_logprobs <= TOP,
            f"top log-probabilities are between 0 and {TOP}; got {request.top_logprobs}",
        ),
        (
            request.logprobs or not request.top_logprobs,
            "the most likely tokens (top_logprobs) come with logprobs=True",
        ),
    ):
        if not holds:
            raise InputError(f"{problem}.")


def by_width(
    joining: Sequence[Joining], capacity: int, prompts: int, rows: int
) -> Iterator[tuple[list[Joining], int]]:
    """Groups of one program each, with the bucket of what they prefill: alike in it, and within the limits."""
    alike: dict[tuple[bool, int], list[Joining]] = {}
    for one in joining:
        width = bucket(max(one.length - 1 - one.held, 1), capacity)
        alike.setdefault((one.held > 0, width), []).append(one)
    for (_, width), group in alike.items():
        some: list[Joining] = []
        for one in group:
            if len(some) == prompts or sum(other.count for other in some) + one.count > rows:
                yield some, width
                some = []
            some.append(one)
        yield some, width


def admission(group: Sequence[Joining], slots: Slots, pad_id: int, end_ids: Sequence[int]) -> Admission:
    """The arrays of one program, filled up to its buckets."""
    count = sum(one.count for one in group)
    height, size = slots.bucket(len(group)), slots.bucket(count)
    prompts = np.full((height, slots.capacity), pad_id, np.int32)
    lengths, held = np.ones(height, np.int32), np.zeros(height, np.int32)
    sources = np.zeros(size, np.int32)
    places = np.arange(slots.count, slots.count + size, dtype=np.int32)
    limit, streams = np.zeros(size, np.int32), np.zeros((size, 2), np.uint32)
    options: list[SamplingOptions] = []
    stops: list[Any] = []
    for number, one in enumerate(group):
        request = one.handle.request
        prompts[number, : one.length] = request.prompt_ids
        lengths[number], held[number] = one.length, one.held
        for slot, index in zip(one.slots, one.indices, strict=True):
            at = len(options)
            sources[at], places[at], limit[at] = number, slot, one.limit
            streams[at] = one.handle.seed, index
            options.append(request.sampling)
            stops.append((*end_ids, *request.stop_ids))
    filler = size - count
    filters = Filters.rows([*options, *[SamplingOptions()] * filler], slots.model.vocab_size)
    asked = Asked(limit, streams, filters, stop_table([*stops, *[()] * filler]))
    return Admission(prompts, lengths, held, sources, places, asked)
