"""What is asked of the engine and what comes back: Request, Event, Sample, Result, and the Handle between them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bessemer.errors import BessemerError
from bessemer.generate.sampling import SamplingOptions

if TYPE_CHECKING:
    from bessemer.generate.engine import Engine


TOP = 20
"""The most likely tokens that can be asked for: what a decoding program notes when one of its rows wants any."""
LOOK = 0.5
"""Seconds after which one who waits looks whether the engine's thread still runs."""


Ranking = tuple[tuple[int, float], ...]
"""(token, log p) of the most likely tokens at a place, falling."""


class QueueFull(BessemerError):
    """More rows would wait than the engine allows: try again later."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it, `n` times. Sample j draws from the random stream (seed, j)."""

    prompt_ids: Sequence[int]
    max_tokens: int | None = None  # none: what the context leaves
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    n: int = 1
    stop_ids: Sequence[int] = ()  # beside the engine's end tokens
    stop_strings: Sequence[str] = ()  # the text is cut before the one that ends first
    seed: int | None = None  # none: that of `sampling`; none there either: the engine chooses
    logprobs: bool = False  # log p(token) of the model itself, before penalties, temperature and filters
    top_logprobs: int = 0  # with `logprobs`: so many of the most likely tokens beside each, at most TOP
    stream: bool = False  # somebody reads its events as they come: the same tokens in short rounds


@dataclass(frozen=True)
class Event:
    """News of one sample. `text` may lag behind `ids` by what could be part of a character or of a stop string."""

    index: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None  # None: it goes on
    top: tuple[Ranking, ...] = ()  # of each token, where they were asked for


@dataclass(frozen=True)
class Sample:
    """A finished continuation. The end token is in `ids` (it is trained on) and not in `text`."""

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # () unless asked for
    text: str  # "" from an engine without a tokenizer
    finish: str  # "stop", "length" (max_tokens), "context" (the row is full) or "cancelled"
    stop: int | str | None = None  # the token or string that stopped it
    top: tuple[Ranking, ...] = ()  # the most likely tokens at each of `ids`; () unless asked for


@dataclass(frozen=True)
class Result:
    """All samples of a request; `seed` makes them again."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    seed: int


class Handle:
    """A request on its way. Iterate it for events, or ask for the result; safe from any one thread.

    While an EngineThread runs the engine, both wait for it; otherwise they run its rounds themselves.
    """

    def __init__(self, engine: Engine, request: Request, seed: int):
        self.request = request
        self.seed = seed
        self.cancelled = False
        self._engine = engine
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._samples: dict[int, Sample] = {}
        self._left = request.n  # samples whose last event has not been read
        self._notify: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """All samples have finished, whether or not their events were read."""
        return len(self._samples) == self.request.n

    def cancel(self) -> None:
        """End what goes on at the next round, as "cancelled"; nothing if it has finished."""
        self.cancelled = True
        self._engine.wake()

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` whenever there is news, on the engine's thread, and once now: for those who wait elsewhere than
        in `next_event`, such as an event loop, and then take events with `next_event(timeout=0)`."""
        self._notify = notify
        notify()

    def __iter__(self) -> Iterator[Event]:
        while (event := self.next_event()) is not None:
            yield event

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event; None when all samples have finished. TimeoutError after `timeout` seconds."""
        if self._left == 0:
            return None
        event = self._wait(timeout)
        if isinstance(event, BaseException):
            self._events.put(event)  # for whoever asks next
            raise event
        self._left -= event.finish is not None
        return event

    def result(self, timeout: float | None = None) -> Result:
        """All samples; waits for them, at most `timeout` seconds."""
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
                    raise TimeoutError(f"no news of the request within {timeout:g} seconds") from None
            if not self._engine.threaded:
                self._engine.step()

    # -- the engine's side ---------------------------------------------------------------------------------------

    def emit(self, event: Event, sample: Sample | None) -> None:
        if sample is not None:
            self._samples[sample.index] = sample
        self._put(event)

    def fail(self, error: BaseException) -> None:
        self._put(error)

    def _put(self, news: Event | BaseException) -> None:
        self._events.put(news)
        if self._notify is not None:
            self._notify()
