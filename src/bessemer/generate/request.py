"""What the engine is asked for and what it returns, and what its slots hold for prompts to come.

Request, Event, Sample, Result, and the Handle between them. The prefix cache: a row that ends leaves its keys and
values in its slot until another row needs the slot, the longest free first. So the cache has as many entries as the
engine has slots, and no memory of its own. A prompt that continues a free slot moves into it; one that shares a
beginning with a slot gets a copy of that, if the rest then fits a narrower program.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from bessemer.errors import BessemerError
from bessemer.generate.sampling import SamplingOptions
from bessemer.models.protocol import Shortening

# --- requests ---


TOP = 20  # the most top_logprobs a request can ask for; a program computes all of them if any row wants some
LOOK = 0.5  # seconds between two checks, while waiting, of whether the engine's thread still runs

Ranking = tuple[tuple[int, float], ...]
"""(token, log p) of the most likely tokens at one position, in descending order."""


class QueueFull(BessemerError):
    """More rows would wait than the engine allows; try again later."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it, `n` times. Sample j uses the random stream (seed, j)."""

    prompt_ids: Sequence[int]
    max_tokens: int | None = None  # None: what the context leaves
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    n: int = 1
    stop_ids: Sequence[int] = ()  # in addition to the engine's end tokens
    stop_strings: Sequence[str] = ()  # the text is cut before the one that ends first
    seed: int | None = None  # None: that of `sampling`; if that is None too, the engine chooses
    logprobs: bool = False  # log p(token) of the model itself, before penalties, temperature and filters
    top_logprobs: int = 0  # with `logprobs`: also this many of the most likely tokens, at most TOP
    stream: bool = False  # its events are read as they come: the same tokens, in short rounds
    fresh: bool = False  # prefill the whole prompt, whatever slots hold: the same bits whatever was asked before
    adapter: int = 0  # of an engine with several over one base: which one; 0 is the base alone


@dataclass(frozen=True)
class Event:
    """New tokens of one sample. `text` lags behind `ids` by what may be part of a character or a stop string; without
    `stream` and stop strings all of it comes with the last event."""

    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None  # None: it continues
    top: tuple[Ranking, ...] = ()  # of each token, if asked for


@dataclass(frozen=True)
class Sample:
    """A finished continuation. The end token is in `ids` (it is trained on), not in `text`."""

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # () unless asked for
    text: str  # "" from an engine without a tokenizer
    finish: str  # "stop", "length" (max_tokens), "context" (the row is full) or "cancelled"
    stop: int | str | None = None  # the token or string that stopped it
    top: tuple[Ranking, ...] = ()  # the most likely tokens at each of `ids`; () unless asked for
    policy_logprobs: tuple[float, ...] = ()  # of the distribution drawn from; () unless the engine records them
    # experts of every token of prompt and continuation but the last, (tokens, layers, k), if the engine records them
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def length(self) -> int:
        """The number of tokens that the model wrote."""
        return len(self.ids)


@dataclass(frozen=True)
class Result:
    """All samples of a request; `seed` reproduces them."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    seed: int


class Rounds(Protocol):
    """What a handle needs of the engine that serves it."""

    threaded: bool

    def step(self) -> bool: ...

    def wake(self) -> None: ...


class Handle:
    """A submitted request. Iterate over it for events, or call `result`; safe from any one thread.

    Both wait for the EngineThread if one runs the engine; otherwise they run its rounds themselves.
    """

    def __init__(self, engine: Rounds, request: Request, seed: int):
        self.request, self.seed, self.cancelled = request, seed, False
        self._engine = engine
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._samples: dict[int, Sample] = {}
        self._left = request.n  # samples whose last event has not been read
        self._notify: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether all samples have finished, even if their events were not read."""
        return len(self._samples) == self.request.n

    @property
    def samples(self) -> Mapping[int, Sample]:
        """The samples that have finished, by their index, even if their events were not read."""
        return self._samples

    def cancel(self) -> None:
        """End unfinished samples at the next round, as "cancelled"."""
        self.cancelled = True
        self._engine.wake()

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` now and on every event, on the engine's thread, so that an event loop can wait elsewhere and
        then read events with `next_event(timeout=0)`."""
        self._notify = notify
        notify()

    def __iter__(self) -> Iterator[Event]:
        while (event := self.next_event()) is not None:
            yield event

    def next_event(self, timeout: float | None = None) -> Event | None:
        """Return the next event, or None when all samples have finished; raise TimeoutError after `timeout` seconds."""
        if self._left == 0:
            return None
        event = self._wait(timeout)
        if isinstance(event, BaseException):
            self._events.put(event)  # for the next call
            raise event
        self._left -= event.finish is not None
        return event

    def result(self, timeout: float | None = None) -> Result:
        """Wait for all samples, at most `timeout` seconds, and return them."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._left:
            self.next_event(None if end is None else max(0.0, end - time.monotonic()))
        samples = tuple(self._samples[index] for index in range(self.request.n))
        return Result(tuple(self.request.prompt_ids), samples, self.seed)

    def _wait(self, timeout: float | None) -> Event | BaseException:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK if end is None else min(LOOK, end - time.monotonic())
            try:
                return self._events.get(timeout=max(left, 0.0) if self._engine.threaded else 0.0)
            except queue.Empty:
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError(
                        f"the engine reported nothing on the request within {timeout:g} seconds"
                    ) from None
            if not self._engine.threaded:
                self._engine.step()

    def put(self, news: Event | BaseException, sample: Sample | None = None) -> None:
        """Called by the engine: an event (with the sample, if it has finished), or an error."""
        if sample is not None:
            self._samples[sample.index] = sample
        self._events.put(news)
        if self._notify is not None:
            self._notify()


# --- the prefix cache ---


STEP = 4  # widths of programs that continue a prefix: NARROWEST, 4 times that, …: few programs, at most 4 times padded


@dataclass(frozen=True)
class Held:
    """The tokens in the cache of a slot. routes: their experts, if the engine records them."""

    ids: np.ndarray
    adapter: int = 0
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class Prefix:
    """The first `length` tokens that `slot` holds begin a prompt. whole: it holds no others, and no row is in it."""

    slot: int
    length: int
    whole: bool
    routes: np.ndarray | None = None


class PrefixCache:
    """What is known of the slots. `free` and `ended` keep it; `find` reads it."""

    def __init__(self, model: Any, routes: bool = False):
        self.routes = routes
        self.most_shortened = model.most_rewound if isinstance(model, Shortening) else 0
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, slot: int) -> bool:
        return slot in self._held

    def put(self, slot: int, held: Held) -> None:
        if len(held.ids) and (not self.routes or (held.routes is not None and len(held.routes) == len(held.ids))):
            self._held[slot] = held
        else:
            self.drop(slot)

    def drop(self, slot: int) -> None:
        self._held.pop(slot, None)

    def clear(self) -> None:
        self._held.clear()

    def find(self, prompt: Sequence[int], adapter: int, lengths: Mapping[int, int]) -> Prefix | None:
        """Return the longest usable beginning of the prompt, at most all tokens but the last.

        lengths: the tokens now in the cache of the slots in use, which have more than they were known with.
        """
        ids = np.asarray(prompt, np.int32)[:-1]
        best: Prefix | None = None
        for slot, held in self._held.items():
            if held.adapter != adapter or not len(ids) or held.ids[0] != ids[0]:
                continue
            most = min(len(ids), len(held.ids))
            if best is not None and most < best.length:
                continue
            differs = held.ids[:most] != ids[:most]
            shared = int(differs.argmax()) if differs.any() else most
            total = lengths.get(slot, len(held.ids))
            whole = slot not in lengths and shared == total
            if not whole and shared < total and total > self.most_shortened:
                continue  # a window has lost keys that the shorter text needs
            if best is None or (shared, whole) > (best.length, best.whole):
                routes = None if held.routes is None else held.routes[:shared]
                best = Prefix(slot, shared, whole, routes)
        return best


def continued_width(size: int, most: int) -> int:
    """Return the width of the program that appends `size` tokens to a prefix."""
    width = 16 if jax.default_backend() == "cpu" else 64  # an accelerator computes 64 tokens in the time of 16
    while width < size:
        width *= STEP
    return min(width, most)
