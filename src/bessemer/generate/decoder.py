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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from bessemer.errors import InputError
from bessemer.generate.sampling import Filters, SamplingOptions, choose, row_keys
from bessemer.models.cache import Cache

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


class Request(NamedTuple):
    """One call as arrays; B, P and V are the buckets and the vocabulary."""

    prompts: Any  # (B, P) int32
    lengths: Any  # (B,) real tokens of each prompt
    limits: Any  # (B,) new tokens allowed; 0 for rows that only fill the bucket
    streams: Any  # (B, 2) uint32, the random stream of each row
    filters: Filters
    stops: Any  # (V,) bool


class State(NamedTuple):
    """What the loop carries."""

    step: Array  # new tokens so far
    cache: Cache
    token: Array  # (B,) the newest token
    done: Array  # (B,)
    ids: Array  # (B, N)
    logprobs: Array  # (B, N)
    lengths: Array  # (B,)
    stopped: Array  # (B,) ended by an end token


class Decoder:
    """Generates with any parameters of one model: `decoder(params, prompts, max_tokens=…)`.

    model: has `decode`, `init_cache`, `vocab_size` and `block_size`. `end_ids` end a row, as does any stop id
    of the call. `fetch` reads the results from the device.
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
        self._run = jax.jit(functools.partial(_run, model, pad_id), static_argnames="tokens")

    @property
    def compilations(self) -> int:
        """How many shape buckets have been compiled."""
        return self._run._cache_size()  # type: ignore[attr-defined]

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
        request = self._request(rows, limits, sampling or SamplingOptions(), stop_ids)
        tokens = bucket(min(max_tokens, block), block)
        ids, logprobs, lengths, stopped = self.fetch(self._run(params, request, tokens=tokens))
        count, longest = len(rows), max(limits)
        reasons = tuple(_reason(bool(stopped[i]), limits[i] < max_tokens) for i in range(count))
        full = reasons.count("context")
        if full:
            notices.append(
                f"{full} of {count} rows stopped before {max_tokens} new tokens, because prompt and "
                f"continuation filled the context of {block} tokens."
            )
        return Generation(
            ids[:count, :longest], lengths[:count], logprobs[:count, :longest], reasons, notices
        )

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int, stop_ids: Sequence[int]) -> None:
        if max_tokens < 1:
            raise InputError(f"max tokens is {max_tokens}; at least one token can be generated.")
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise InputError("a prompt has no tokens; begin it with the document token at least.")
        size = self.model.vocab_size
        if not all(0 <= token < size for ids in (*prompts, self.end_ids, stop_ids) for token in ids):
            raise InputError(f"a prompt or stop token lies outside the model's vocabulary of {size}.")

    def _request(
        self,
        rows: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: SamplingOptions,
        stop_ids: Sequence[int],
    ) -> Request:
        count, vocab_size = len(rows), self.model.vocab_size
        height = 1 << (count - 1).bit_length()
        width = bucket(max(len(row) for row in rows), self.model.block_size)
        prompts = np.full((height, width), self.pad_id, np.int32)
        for index, row in enumerate(rows):
            prompts[index, : len(row)] = row
        filler = height - count
        stops = np.zeros(vocab_size, bool)
        stops[[*self.end_ids, *stop_ids]] = True
        streams = sampling.streams(count)
        return Request(
            prompts,
            np.array([len(row) for row in rows] + [1] * filler, np.int32),
            np.array([*limits, *[0] * filler], np.int32),
            np.pad(streams, ((0, filler), (0, 0))),
            Filters.of(sampling, vocab_size),
            stops,
        )


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


def _run(model: Any, pad_id: int, params: Any, request: Request, tokens: int) -> tuple[Array, ...]:
    """Prefill and loop; (ids (B, N), logprobs (B, N), lengths (B,), stopped (B,)) with N = `tokens`."""
    rows, width = request.prompts.shape
    capacity = min(width + tokens, model.block_size)

    def forward(ids: Array, cache: Cache, lengths: Array) -> tuple[Array, Cache]:
        variables = {"params": params}
        logits, cache = model.apply(variables, ids, cache, lengths, last_only=True, method="decode")
        return logits[:, 0], cache

    def goes_on(state: State) -> Array:
        return (state.step < tokens) & ~jnp.all(state.done)

    def advance(state: State) -> State:
        logits, cache = forward(state.token[:, None], state.cache, (~state.done).astype(jnp.int32))
        return _take(request, pad_id, state, logits, cache)

    logits, cache = forward(request.prompts, model.init_cache(rows, capacity), request.lengths)
    nothing = jnp.zeros(rows, jnp.int32)
    start = State(
        step=jnp.zeros((), jnp.int32),
        cache=cache,
        token=nothing,
        done=request.limits < 1,
        ids=jnp.full((rows, tokens), pad_id, jnp.int32),
        logprobs=jnp.zeros((rows, tokens), jnp.float32),
        lengths=nothing,
        stopped=jnp.zeros(rows, bool),
    )
    end = jax.lax.while_loop(goes_on, advance, _take(request, pad_id, start, logits, cache))
    return tuple(_everywhere(array) for array in (end.ids, end.logprobs, end.lengths, end.stopped))


def _take(request: Request, pad_id: int, state: State, logits: Array, cache: Cache) -> State:
    """Choose a token for the rows that go on, and note which of them end with it. logits: (B, V)."""
    chosen = choose(logits, row_keys(request.streams, state.step), request.filters)
    token = jnp.where(state.done, pad_id, chosen)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
    lengths = state.lengths + ~state.done
    stopped = state.stopped | (~state.done & request.stops[token])
    return State(
        step=state.step + 1,
        cache=cache,
        token=token,
        done=state.done | stopped | (lengths >= request.limits),
        ids=state.ids.at[:, state.step].set(token),
        logprobs=state.logprobs.at[:, state.step].set(jnp.where(state.done, 0.0, logprob)),
        lengths=lengths,
        stopped=stopped,
    )


def _everywhere(array: Array) -> Array:
    """Replicated over the mesh, if there is one: every process reads the whole result."""
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec())
