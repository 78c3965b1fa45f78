"""Continuous batching: requests join and leave a running batch, over one model and its live parameters.

A round admits waiting requests into free slots, runs a block of decode steps on the device, reads the tokens once, and
hands them out. Rows never see each other: with the same seed a request has the same text in any batch (exactly so in
float32 on a CPU within one bucket; elsewhere rounding may choose the other of two nearly equal tokens).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np
from jax import Array

from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.generate.decoder import SMALLEST, bucket, check_tokens, end_tokens
from bessemer.generate.load import LoadedModel, check_scores
from bessemer.generate.request import (
    TOP,
    Event,
    Handle,
    Held,
    Prefix,
    PrefixCache,
    QueueFull,
    Ranking,
    Request,
    Result,
    Sample,
    continued_width,
)
from bessemer.generate.rows import STOPS, Admission, Asked, Output, Slots, looks, stop_table
from bessemer.generate.sampling import Filters, SamplingOptions, Way, way_of
from bessemer.generate.speculate import Speculation, acceptance, speculate_block
from bessemer.generate.text import TextStream
from bessemer.generate.weights import Quantizer
from bessemer.models.lora import holds_several
from bessemer.models.protocol import check_decodes
from bessemer.topology import process_count

READING = 0.075  # seconds of a round while somebody reads along; longer ones look like stuttering
GROWTH = 3  # a streamed row triples per round (1, 4, 16 tokens): a quick first token for two more rounds per answer
PAUSE = 1.0  # seconds an idle EngineThread sleeps at most; a request wakes it

log = logging.getLogger(__name__)


@dataclass
class Row:
    """A sample still generating, as the host knows it. `limit`: the most tokens it may have."""

    handle: Handle
    index: int
    stops: frozenset[int]
    limit: int
    text: TextStream | None
    weights: int = 0  # which parameters of the engine it began with, see `Engine.update_params`
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Ranking] = field(default_factory=list)
    policy: list[float] = field(default_factory=list)  # log p of the distribution drawn from
    routes: list[np.ndarray] = field(default_factory=list)  # experts of the tokens read: the prompt's, then by round
    pieces: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)  # ids, and what the device generated after a stop string
    stop: int | str | None = None

    @property
    def length(self) -> int:
        """The number of tokens of prompt and continuation."""
        return len(self.handle.request.prompt_ids) + len(self.made)

    def held(self) -> Held:
        """Return what its cache holds: all tokens but the newest."""
        ids = np.fromiter((*self.handle.request.prompt_ids, *self.made), np.int32, self.length)[:-1]
        return Held(ids, self.handle.request.adapter, np.concatenate(self.routes) if self.routes else None)

    def take(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        ended: bool,
        top: Sequence[Ranking] = (),
        policy: Sequence[float] = (),
        routes: np.ndarray | None = None,
    ) -> Event:
        """Add new tokens and return their event; `ended`: the device generates no more. `top`: their rankings;
        `policy`: their log-probabilities in the distribution drawn from; `routes`: experts of the tokens before."""
        self.made += ids
        if ended and ids and ids[-1] in self.stops:
            self.stop = ids[-1]
        text, taken = "", len(ids)
        if self.lazy:
            text = self._whole_text() if ended else ""
        elif self.text is not None:
            text, count = self.text.push_until_stop(ids if self.stop is None else ids[:-1])
            if self.text.stop is not None:
                self.stop, taken, ended = self.text.stop, count, True
            text += self.text.finish() if ended else ""
        self.policy += policy[:taken]
        if routes is not None:
            self.routes.append(routes[:taken])
        finish = None
        if ended:
            finish = "stop" if self.stop is not None else self._why_full()
        return self._event(text, ids[:taken], logprobs[:taken], finish, top[:taken])

    def cancel(self) -> Event:
        if self.lazy:
            return self._event(self._whole_text(), (), (), "cancelled")
        return self._event(self.text.finish() if self.text is not None else "", (), (), "cancelled")

    @property
    def lazy(self) -> bool:
        """Whether the text is decoded at the end alone: in rounds, every token would be decoded about three times."""
        return self.text is not None and not (self.handle.request.stream or self.text.detector.stops)

    def _whole_text(self) -> str:
        assert self.text is not None
        return self.text.tokenizer.decode(self.made if self.stop is None else self.made[:-1])

    def sample(self, finish: str) -> Sample:
        text = "".join(self.pieces)
        return Sample(
            self.index,
            tuple(self.ids),
            tuple(self.logprobs),
            text,
            finish,
            self.stop,
            tuple(self.top),
            tuple(self.policy),
            np.concatenate(self.routes) if self.routes else None,
        )

    def _event(
        self, text: str, ids: Sequence[int], logprobs: Sequence[float], finish: str | None, top: Sequence[Ranking] = ()
    ) -> Event:
        request = self.handle.request
        scores = logprobs if request.logprobs else ()
        ranked = [ranking[: request.top_logprobs] for ranking in top] if request.top_logprobs else []
        self.ids += ids
        self.logprobs += scores
        self.top += ranked
        self.pieces.append(text)
        return Event(self.index, text, tuple(ids), tuple(scores), finish, tuple(ranked))

    def _why_full(self) -> str:
        asked = self.handle.request.max_tokens
        return "length" if asked is not None and self.limit == asked else "context"


def round_of() -> int:
    """Return the decode steps of a full round. An accelerator waits 2 ms for the host per round, as long as 2 steps."""
    return 16 if jax.default_backend() == "cpu" else 32


class Pace:
    """Chooses the steps of each round: `most`, or few while somebody reads along. The tokens do not depend on it.

    `clocked`: also by the time of the previous round; several processes must choose alike, so they go by counts only.
    `width`: the most tokens of a row per step; above 1 with speculation, where a step is a pass.
    """

    def __init__(self, most: int, clocked: bool, width: int = 1):
        self.most, self.clocked, self.width = most, clocked, width
        self._seconds = 0.0  # per step, at most: includes any prefill or compilation of that round

    def next(self, rows: Collection[Row], unit: int) -> tuple[int, int]:
        """Return (steps, tokens of the longest row after a full round); steps are a multiple of `unit`, as `most` is.

        The second decides how much of the cache is computed with, so a round ends there at the latest.
        """
        longest = max(row.length for row in rows)
        if self.width == 1:
            end = max(row.length - len(row.made) % self.most for row in rows) + self.most
            steps = min(self.most, end - longest)
        else:  # rows are not in step with each other
            steps, end = self.most, longest + self.most * self.width
        read = [len(row.made) for row in rows if row.handle.request.stream]
        if read:
            steps = min(steps, GROWTH * min(read))
            steps = min(steps, int(READING / self._seconds)) if self._seconds else steps
        return max(steps // unit, 1) * unit, end

    def took(self, seconds: float, steps: int) -> None:
        """Record that the last round generated `steps` tokens per row in this time."""
        if self.clocked:
            self._seconds = seconds / max(steps, 1)


@dataclass
class Waiting:
    """A queued request; its samples before `begun` are in slots already."""

    handle: Handle
    begun: int = 0

    @property
    def rows(self) -> int:
        return self.handle.request.n - self.begun


@dataclass
class Joining:
    """Samples `indices` of a request, their slots, and the beginning of the prompt that is in a slot already."""

    handle: Handle
    indices: range
    slots: list[int] = field(default_factory=list)
    prefix: Prefix | None = None
    limit: int = 0

    @property
    def count(self) -> int:
        return len(self.indices)

    @property
    def length(self) -> int:
        return len(self.handle.request.prompt_ids)

    @property
    def held(self) -> int:
        return 0 if self.prefix is None else self.prefix.length


class Engine:
    """`submit` requests from any thread; an EngineThread runs the rounds, or else whoever waits for a result.

    model: has `decode`, `init_cache`, `vocab_size` and `block_size`; rows are the first axis of its cache's arrays.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        *,
        slots: int = 16,
        capacity: int | None = None,  # tokens per row, prompt and continuation; None: the model's block
        tokenizer: Tokenizer | None = None,  # for text and stop strings
        pad_id: int | None = None,
        end_ids: Sequence[int] | None = None,  # end every row; None: the tokenizer's document token
        steps: int | None = None,  # decode steps of a full round; None: see round_of
        queue: int | None = None,  # rows that may wait; None: any number
        reuse: bool = False,  # a prompt that begins as what a slot holds is prefilled from there on: conversations
        narrowest: int = SMALLEST,  # no prompt is padded to fewer tokens: fewer widths to compile
        whole: bool = False,  # a round computes all slots, however few are in use: one size to compile
        least: Way = Way.GREEDY,  # rounds choose tokens by this way or a later one: batches of all kinds share programs
        policy_logprobs: bool = False,  # samples also have log p of the distribution drawn from
        speculate: Speculation | None = None,  # drafts verified in one pass: the same text in fewer passes
        weights: str = "auto",  # fp8, int8: sample from a copy of the matrices in 8 bits, made at their first use
        routes: bool = False,  # samples also have the experts of their tokens
        fetch: Callable[[Any], Any] = jax.device_get,
        scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: int = 0,
    ):
        check_decodes(model)
        self.model, self.tokenizer, self.params = model, tokenizer, params
        self.capacity = capacity or int(model.block_size)
        if not 0 < self.capacity <= model.block_size:
            raise InputError(f"capacity is {capacity}; the model's context is {model.block_size} tokens.")
        if pad_id is None:
            pad_id = tokenizer.pad_id if tokenizer else 0
        if end_ids is None:
            end_ids = end_tokens(model, tokenizer) if tokenizer else ()
        self.pad_id, self.end_ids = pad_id, tuple(end_ids)
        self.queue, self.reuse, self.seed = queue, reuse, seed
        self.narrowest, self.least = narrowest, least
        self.fetch, self.scope = fetch, scope
        self.threaded = False  # an EngineThread runs the rounds
        self._several = holds_several(params)
        self.rounds = self.tokens = 0
        self.prompt_tokens = self.reused_tokens = 0  # of prompts; of them, those that a slot held already
        self.passes = self.drafted = 0  # of rows, with speculation; a pass makes a token and what it accepts
        block = None
        if speculate is not None:
            speculate.check(model)
            block = functools.partial(speculate_block, speculate)
        self.speculate = speculate
        self._quantizer = None if weights == "auto" else Quantizer(model, weights)
        self._cast: Any = None  # the parameters as programs read them, from their first use on
        self._weights = 0  # how often the parameters were replaced
        with scope():
            options = (whole, policy_logprobs, block, routes)
            self._slots = Slots(model, slots, self.capacity, steps or round_of(), self.pad_id, *options)
        width = 1 if speculate is None else speculate.width
        self._pace = Pace(self._slots.steps, process_count() == 1, width)
        self._rows: dict[int, Row] = {}  # by slot
        self._prefilled: list[tuple[Array | None, list[Joining]]] = []  # experts of the prompts of this round
        self._free = deque(range(self._slots.count))  # longest free first
        self._prefixes = PrefixCache(model, routes)  # with `reuse`
        self._waiting: deque[Waiting] = deque()
        self._submitted = 0
        self._stepping = threading.RLock()  # held for a round
        self._lock = threading.Lock()  # of the queue
        self._news = threading.Condition(self._lock)

    @classmethod
    def of(cls, loaded: LoadedModel, **options: Any) -> Self:
        """Return an engine over a loaded run: its parameters, tokenizer and mesh."""
        return cls(loaded.model, loaded.params, **{"tokenizer": loaded.tokenizer, "scope": loaded.scope, **options})

    @property
    def slots(self) -> int:
        return self._slots.count

    @property
    def vocab_size(self) -> int:
        return int(self.model.vocab_size)

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one per bucket of prompts, one per bucket of rows."""
        return self._slots.compilations

    @property
    def acceptance(self) -> dict[str, float] | None:
        """What drafts saved so far; None without speculation."""
        return None if self.speculate is None else acceptance(self.tokens, self.passes, self.drafted)

    @property
    def active(self) -> int:
        """The number of rows still generating."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """The number of rows in the queue."""
        with self._lock:
            return sum(waiting.rows for waiting in self._waiting)

    # --- requests ---

    def submit(self, request: Request) -> Handle:
        """Queue a request; raise InputError if it cannot be served, QueueFull if too many rows wait already."""
        return self._submit([request], self.queue)[0]

    def generate(self, requests: Sequence[Request], progress: Callable[[int, int], None] | None = None) -> list[Result]:
        """Return the results of all requests, in order; the bound of the queue does not apply.

        `progress(rows done, rows)` is called after each round, if no EngineThread runs the engine.
        """
        handles = self._submit(requests, None)
        if progress is not None and not self.threaded:
            total = self.active + self.waiting
            progress(0, total)
            while self.step():
                progress(total - self.active - self.waiting, total)
        return [handle.result() for handle in handles]

    def _submit(self, requests: Sequence[Request], bound: int | None) -> list[Handle]:
        for request in requests:
            self._check(request)
        with self._news:
            rows = sum(waiting.rows for waiting in self._waiting) + sum(request.n for request in requests)
            if bound is not None and rows > bound:
                raise QueueFull(f"{rows} rows would wait for {self.slots} slots, and {bound} may: try again later.")
            handles = [Handle(self, request, self._seed_of(request)) for request in requests]
            self._waiting += [Waiting(handle) for handle in handles]
            self._news.notify_all()
        return handles

    def _check(self, request: Request) -> None:
        """Raise InputError, with the remedy, if a request cannot be served."""
        size, stops = len(request.prompt_ids), {*self.end_ids, *request.stop_ids}
        check_tokens([request.prompt_ids], stops, request.max_tokens, self.vocab_size)
        for holds, problem in (
            (size <= self.capacity, f"the prompt has {size} tokens and the context {self.capacity}: shorten it"),
            (request.n >= 1, f"n is {request.n}; at least one sample can be asked for"),
            (len(stops) <= STOPS, f"{len(stops)} stop tokens, with the model's own; at most {STOPS} are possible"),
            (all(request.stop_strings), "a stop string is empty; it would stop before the first character"),
            (
                not request.stop_strings or self.tokenizer is not None,
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

    def _seed_of(self, request: Request) -> int:
        self._submitted += 1
        named = request.seed if request.seed is not None else request.sampling.seed
        if isinstance(named, int):
            return named
        return int(np.random.SeedSequence((self.seed, self._submitted)).generate_state(1)[0])

    def update_params(self, params: Any) -> None:
        """Use these parameters from the next round on, also for rows still generating.

        Matrices in another dtype than the compute dtype are cast once, at their first use; nothing else is copied. No
        later prompt continues a cache that was computed with the old ones, in whole or in part. Waits for a round that
        another thread runs.
        """
        with self._stepping:
            self.params, self._cast = params, None
            self._weights += 1  # rows still generating leave no prefix behind when they end
            self._prefixes.clear()

    def release(self) -> None:
        """Free the memory of the slots if no row is generating; the next request allocates it again."""
        with self._stepping:
            if not self._rows:
                self._prefixes.clear()
                self._slots.rows = None

    def wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until a request is submitted or cancelled."""
        with self._news:
            if not self._waiting:
                self._news.wait(timeout)

    def lower_ahead(self, params: Any, longest: int) -> list[Any]:
        """Return the lowered programs that batches of prompts of up to `longest` tokens need; rows are compiled here.

        params: abstract, with shardings. For an engine that computes all slots (`whole`). Compiled, they are in JAX's
        cache on disk, where the first round finds them.
        """
        longest = max(longest - 1, 1)
        widths = sorted({bucket(max(length, self.narrowest), self.capacity) for length in (1, longest)})
        with self.scope():
            params = params if self._quantizer is None else self._quantizer.abstract(params)
            admissions = [
                (self._admission((), width, height), width)
                for width in widths
                for height in dict.fromkeys(self._slots.heights(width))
            ]
            if self.reuse:  # of short continuations
                width = continued_width(1, self.capacity)
                heights = dict.fromkeys(self._slots.heights(width, reuse=True))
                admissions += [(self._admission((), width, height, reuse=True), width) for height in heights]
            way = None if way_of([]) is None else self.least
            return self._slots.lower_ahead(params, admissions, way)

    def prepare(self) -> None:
        """Run every program of prefill, and those of decoding without top log-probabilities, on no rows, so that no
        request waits for a compiler. Call it while nothing is generated."""
        slots = self._slots
        with self._stepping, self.scope():
            if self._cast is None:
                self._cast = slots.cast(self._read(self.params))
            for reuse in (False, True) if self.reuse else (False,):
                for width in self._widths(reuse):
                    for height, size in slots.prefills(width, reuse):
                        slots.admit(self._cast, self._admission((), width, height, reuse, size), width)
            ways = (None,) if way_of([]) is None else [way for way in Way if way >= self.least]
            for way in ways:
                for rows, length in slots.blocks():
                    slots.decode(self._cast, range(rows), length, way, slots.steps)
            self._empty()

    def _widths(self, reuse: bool) -> Iterator[int]:
        """Yield the widths of prefill programs, ascending."""
        width = 0
        while width < self.capacity:
            size = width + 1
            width = continued_width(size, self.capacity) if reuse else self._width(size + 1)
            yield width

    def _read(self, params: Any) -> Any:
        return params if self._quantizer is None else self._quantizer(params)

    # --- rounds ---

    def run_until_idle(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """Run one round, one thread at a time; return False if there was nothing to do.

        An error ends every open request.
        """
        with self._stepping:
            try:
                with self.scope():
                    self._drop_cancelled()
                    if self._cast is None:
                        self._cast = self._slots.cast(self._read(self.params))
                    self._admit()
                    if self._rows:
                        self._decode()
                        return True
                    return self.waiting > 0
            except BaseException as error:  # also an interrupt: the state of the device is no longer known
                self.abandon(error)
                raise

    def abandon(self, error: BaseException) -> None:
        """Fail every open request with `error`, and start again with empty slots."""
        with self._lock:
            handles = self._open()
            self._waiting.clear()
        self._rows.clear()
        self._empty()
        for handle in handles:
            handle.put(error)

    def reset(self) -> None:
        """Cancel what is open and free the cache: the engine is as it was created."""
        with self._stepping:
            self.cancel_all()
            self._empty()

    def cancel_all(self) -> None:
        """End every open request as "cancelled", now."""
        with self._stepping:
            with self._lock:
                handles = self._open()
            for handle in handles:
                handle.cancelled = True
            self._drop_cancelled()

    def _open(self) -> list[Handle]:
        handles = [row.handle for row in self._rows.values()] + [item.handle for item in self._waiting]
        return list(dict.fromkeys(handles))

    def _empty(self) -> None:
        self._prefixes.clear()
        self._prefilled.clear()
        self._free = deque(range(self._slots.count))
        self._slots.rows = None

    def _drop_cancelled(self) -> None:
        for slot in [slot for slot, row in self._rows.items() if row.handle.cancelled]:
            self._hand_out(slot, self._rows[slot].cancel())
        with self._lock:
            dropped = [item for item in self._waiting if item.handle.cancelled]
            self._waiting = deque(item for item in self._waiting if not item.handle.cancelled)
        for item in dropped:
            for index in range(item.begun, item.handle.request.n):
                item.handle.put(Event(index, "", (), (), "cancelled"), Sample(index, (), (), "", "cancelled"))

    def _admit(self) -> None:
        """Move waiting requests into free slots, in their order. The samples of a request enter together, so that its
        prompt is prefilled once; those of a request with more samples than can enter together, as slots become free."""
        joining: list[Joining] = []
        with self._lock:
            free = len(self._free)
            while self._waiting and free:
                item, most = self._waiting[0], self._slots.most
                if free < item.rows <= most:
                    break
                count = min(item.rows, free, most)
                joining.append(Joining(item.handle, range(item.begun, item.begun + count)))
                item.begun += count
                free -= count
                if not item.rows:
                    self._waiting.popleft()
        self._place(joining)
        for group, width, height in self._prefills(joining):
            admission = self._admission(group, width, height, reuse=group[0].held > 0)
            routes = self._slots.admit(self._cast, admission, width)
            self._prefilled.append((routes, group))
        if self.reuse:
            for one in joining:
                for slot in one.slots:
                    ids = np.asarray(one.handle.request.prompt_ids, np.int32)[:-1]
                    self._prefixes.put(slot, Held(ids, one.handle.request.adapter))

    def _prefills(self, joining: Sequence[Joining]) -> Iterator[tuple[list[Joining], int, int]]:
        """Yield what each prefill program gets: requests, their width bucket, and the prompts it computes."""
        alike: dict[tuple[bool, int], list[Joining]] = {}
        for one in joining:
            width = self._width(one.length) if not one.held else self._width_after(one.length, one.held)
            alike.setdefault((one.held > 0, width), []).append(one)
        for (held, width), left in alike.items():
            few, many = self._slots.heights(width, held)
            while left:
                # a program for many that is mostly padding takes longer than some for a few
                height = few if len(left) <= few or 4 * len(left) <= many else many
                taken = rows = 0
                while taken < min(height, len(left)) and rows + left[taken].count <= self._slots.most:
                    rows += left[taken].count
                    taken += 1
                yield left[:taken], width, height
                left = left[taken:]

    def _width(self, length: int) -> int:
        """Return the width of the program that prefills a whole prompt."""
        return bucket(max(length - 1, 1, self.narrowest), self.capacity)

    def _width_after(self, length: int, held: int) -> int:
        """Return the width of the program that prefills what follows the first `held` tokens."""
        return continued_width(length - 1 - held, self.capacity)

    def _place(self, joining: Sequence[Joining]) -> None:
        """Assign slots: to a prompt that continues a free slot that slot, to others those free the longest."""
        for one in joining:
            one.prefix = self._prefix_of(one)
        origins = {one.prefix.slot for one in joining if one.prefix is not None}
        for one in sorted(joining, key=lambda one: one.prefix is None or not one.prefix.whole):
            prefix = one.prefix
            if prefix is not None and prefix.whole and prefix.slot in self._free:
                one.slots = [prefix.slot]
                self._free.remove(prefix.slot)
            else:
                own = None if prefix is None else prefix.slot
                one.slots = [self._take_free(origins, own) for _ in one.indices]
        taken = {slot: one for one in joining for slot in one.slots}
        for one in joining:
            if one.prefix is not None and taken.get(one.prefix.slot, one) is not one:
                one.prefix = None  # another row overwrites it in this round
            self._enter(one)

    def _take_free(self, origins: Collection[int], own: int | None) -> int:
        """Return the slot that is free the longest, of those that no prompt of this round begins with; without one,
        slot `own`, whose beginning is used, if it is free."""
        other = own if own is not None and own in self._free else self._free[0]
        slot = next((slot for slot in self._free if slot not in origins), other)
        self._free.remove(slot)
        return slot

    def _enter(self, one: Joining) -> None:
        """Start the rows of a request in their slots."""
        request, length = one.handle.request, one.length
        stops = frozenset((*self.end_ids, *request.stop_ids))
        one.limit = self.capacity - length + 1
        if request.max_tokens is not None:
            one.limit = min(one.limit, request.max_tokens)
        for slot, index in zip(one.slots, one.indices, strict=True):
            self._prefixes.drop(slot)
            text = TextStream(self.tokenizer, request.stop_strings) if self.tokenizer else None
            row = Row(one.handle, index, stops, one.limit, text, self._weights)
            if one.prefix is not None and one.prefix.routes is not None:
                row.routes.append(one.prefix.routes)
            self._rows[slot] = row
        self.prompt_tokens += length
        self.reused_tokens += one.held

    def _prefix_of(self, one: Joining) -> Prefix | None:
        """Return the beginning of the prompt that is worth re-using: what it continues, or what saves computing."""
        request = one.handle.request
        if not self.reuse or request.fresh or one.count > 1 or not len(self._prefixes):
            return None
        lengths = {slot: row.length - 1 for slot, row in self._rows.items()}
        found = self._prefixes.find(request.prompt_ids, request.adapter, lengths)
        if found is None or found.whole:
            return found
        return found if self._width_after(one.length, found.length) < self._width(one.length) else None

    def _admission(
        self, group: Sequence[Joining], width: int, height: int, reuse: bool = False, size: int = 0
    ) -> Admission:
        """Return the arrays of one prefill program, filled up to its buckets: `height` prompts, and `size` slots if it
        is given. `reuse`: prompts continue prefixes."""
        slots, count = self._slots, sum(one.count for one in group)
        size = size or (height if reuse or count == 1 else slots.most)
        origins = np.full(height, slots.count, np.int32) if reuse else None
        prompts = np.full((height, slots.capacity if reuse else width + 1), self.pad_id, np.int32)
        lengths, held = np.ones(height, np.int32), np.zeros(height, np.int32)
        sources = np.zeros(size, np.int32)
        places = np.arange(slots.count, slots.count + size, dtype=np.int32)
        limit, streams = np.zeros(size, np.int32), np.zeros((size, 2), np.uint32)
        options: list[SamplingOptions] = []
        stops: list[Sequence[int]] = []
        for number, one in enumerate(group):
            request = one.handle.request
            prompts[number, : one.length] = request.prompt_ids
            lengths[number], held[number] = one.length, one.held
            if origins is not None and one.prefix is not None:
                origins[number] = one.prefix.slot
            for slot, index in zip(one.slots, one.indices, strict=True):
                at = len(options)
                sources[at], places[at], limit[at] = number, slot, one.limit
                streams[at] = one.handle.seed, index
                options.append(request.sampling)
                stops.append((*self.end_ids, *request.stop_ids))
        filler = size - count
        filters = Filters.rows([*options, *[SamplingOptions()] * filler], self.vocab_size)
        asked = Asked(limit, streams, filters, stop_table([*stops, *[()] * filler]))
        if not self._several:
            return Admission(prompts, lengths, held, sources, places, asked, origins=origins)
        adapters = np.zeros(height, np.int32)
        adapters[: len(group)] = [one.handle.request.adapter for one in group]
        asked = asked._replace(adapter=adapters[sources])
        return Admission(prompts, lengths, held, sources, places, asked, adapters, origins)

    def _decode(self) -> None:
        active, rows, begun = sorted(self._rows), self._rows.values(), time.perf_counter()
        way = way_of(row.handle.request.sampling for row in rows)
        way = None if way is None else max(way, self.least)
        steps, length = self._pace.next(rows, looks(self._slots.steps, way))
        wanted = any(row.handle.request.top_logprobs for row in rows)
        top = min(TOP, self.vocab_size) if wanted else 0
        output, columns = self._slots.decode(self._cast, active, length, way, steps, top)
        output, prompts = self.fetch((output, [routes for routes, _ in self._prefilled]))
        self._note_prompts(prompts)
        taken = output.made if output.passes is None else output.passes
        self._pace.took(time.perf_counter() - begun, int(taken.max()))
        check_scores(output.logprobs)  # 0 where no token is
        self.rounds += 1
        tokens, scores, counts, live = (array.T.tolist() for array in output[:4])
        chances = None if output.policy_logprobs is None else output.policy_logprobs.T.tolist()
        for slot, column in zip(active, columns, strict=True):
            made, row = counts[column], self._rows[slot]
            self.tokens += made
            if output.passes is not None:
                self.passes += int(output.passes[column])
                self.drafted += int(output.drafted[column])
            ranked = _rankings(output, column, made) if row.handle.request.top_logprobs else []
            drawn = [] if chances is None else chances[column][:made]
            routes = None if output.routes is None else output.routes[:made, column]
            event = row.take(tokens[column][:made], scores[column][:made], not live[column], ranked, drawn, routes)
            self._hand_out(slot, event)

    def _note_prompts(self, routes: Sequence[np.ndarray | None]) -> None:
        """Give the rows that entered in this round the experts of their prompts."""
        for found, (_, group) in zip(routes, self._prefilled, strict=True):
            if found is None:
                continue
            for number, one in enumerate(group):
                for slot in one.slots:
                    self._rows[slot].routes.append(found[number, : one.length - 1 - one.held])
        self._prefilled.clear()

    def _hand_out(self, slot: int, event: Event) -> None:
        """Give the event to its request; the last one frees the slot."""
        row = self._rows[slot]
        if event.finish is not None:
            del self._rows[slot]
            self._free.append(slot)
            if self.reuse and row.weights == self._weights:
                self._prefixes.put(slot, row.held())
        if event.ids or event.finish is not None:
            row.handle.put(event, None if event.finish is None else row.sample(event.finish))


def _rankings(output: Output, column: int, made: int) -> list[Ranking]:
    """Return the most likely tokens at each position of a column."""
    assert output.top_ids is not None and output.top_logprobs is not None
    ids, scores = (array[:made, column].tolist() for array in (output.top_ids, output.top_logprobs))
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids, scores, strict=True)]


class EngineThread:
    """`with EngineThread(engine): …` runs rounds in the background; on leaving, open requests are cancelled.

    A round that fails gives its error to every open request, and the thread continues with the next ones.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.engine.threaded = True
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is open, and wait for the thread."""
        self._stopping.set()
        self.engine.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self.engine.step():
                    self.engine.wait(PAUSE)
            except Exception:  # the requests have it; a thread that ended would leave the next ones waiting
                log.exception("a round of the engine failed")
        self.engine.cancel_all()
        self.engine.threaded = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
