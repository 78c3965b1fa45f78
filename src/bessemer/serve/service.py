"""One engine for many requests: submitted from the event loop, awaited without a thread each, freed when done."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bessemer.generate import Engine, Event, Handle
from bessemer.serve.conversation import Template
from bessemer.serve.errors import ApiError
from bessemer.serve.replies import ChatReply, CompletionReply, Reply
from bessemer.serve.requests import Ask, Room, chat_ask, completion_ask

# Counters of the server, as the text that Prometheus reads.


class Metrics:
    """Counted by the server itself; the engine's own numbers are read when they are asked for."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (endpoint, status)
        self.gone = 0  # clients that left before their answer was whole
        self.late = 0  # requests that ran out of time
        self.seconds = Timer()
        self.first_token = Timer()

    def render(self, engine: Engine) -> str:
        lines: list[str] = []

        def add(name: str, kind: str, about: str, values: list[tuple[str, Any]]) -> None:
            name = f"bessemer_{name}"
            lines.extend([f"# HELP {name} {about}", f"# TYPE {name} {kind}"])
            lines.extend(f"{name}{suffix} {value}" for suffix, value in values)

        served = [
            (f'{{endpoint="{endpoint}",status="{status}"}}', count)
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        add("requests_total", "counter", "Requests answered.", served)
        add(
            "disconnects_total",
            "counter",
            "Clients that left before their answer was whole.",
            [("", self.gone)],
        )
        add("timeouts_total", "counter", "Requests that ran out of time.", [("", self.late)])
        add("request_seconds", "summary", "Time of a generation request.", self.seconds.values())
        add("first_token_seconds", "summary", "Time to the first token.", self.first_token.values())
        add("rows_active", "gauge", "Continuations being written.", [("", engine.active)])
        add("rows_waiting", "gauge", "Continuations in the queue.", [("", engine.waiting)])
        add("slots", "gauge", "Continuations that can be written at once.", [("", engine.slots)])
        add("prompt_tokens_total", "counter", "Tokens read.", [("", engine.prompt_tokens)])
        add("tokens_total", "counter", "Tokens written.", [("", engine.tokens)])
        add("rounds_total", "counter", "Rounds of the engine.", [("", engine.rounds)])
        add("compilations_total", "counter", "Programs compiled.", [("", engine.compilations)])
        return "\n".join(lines) + "\n"


class Timer:
    """Sum and number of durations."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1

    def values(self) -> list[tuple[str, Any]]:
        return [("_sum", f"{self.total:.6f}"), ("_count", self.count)]


@dataclass
class Service:
    """What the endpoints share. `timeout`: seconds a request may take, waiting included."""

    engine: Engine
    template: Template
    model: str
    step: int
    timeout: float = 300.0
    token: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    failure: Exception | None = None  # of the engine, until a later answer is whole
    renders: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, "bessemer-template"), repr=False
    )

    @property
    def fingerprint(self) -> str:
        return f"{self.model}-step-{self.step}"

    @property
    def body_limit(self) -> int:
        """Bytes of a body: far above any prompt that fits the context."""
        return max(1 << 20, 32 * self.engine.capacity)

    async def ask(self, tree: dict[str, Any], chat: bool) -> Ask:
        """A body as what it asks for; TimeoutError when the request's time is up.

        Texts are tokenized in a thread, so that streams go on meanwhile; conversations in threads of their own, since a
        chat template from elsewhere may take all the time it is allowed.
        """
        room = Room(self.engine.vocab_size, self.engine.capacity, self.engine.queue)
        if chat:
            loop = asyncio.get_running_loop()
            rendered = loop.run_in_executor(self.renders, chat_ask, tree, self.template, room)
            ask = await asyncio.wait_for(rendered, self.timeout)
        else:
            ask = await asyncio.to_thread(completion_ask, tree, self.template.tokenizer, room)
        if ask.options.model not in (None, self.model):
            raise ApiError(
                404,
                f"the model '{ask.options.model[:100]}' is not served here; '{self.model}' is.",
                param="model",
                code="model_not_found",
            )
        return ask

    def reply(self, ask: Ask, chat: bool) -> Reply:
        tokenizer = self.template.tokenizer
        echo = [text for text in ask.echo for _ in range(ask.options.n)]
        shape = ChatReply if chat else CompletionReply
        ends = (*self.engine.end_ids, *ask.stop_ids)
        return shape(self.model, self.fingerprint, tokenizer, ends, echo)

    @contextlib.contextmanager
    def submitted(self, ask: Ask) -> Iterator[list[Handle]]:
        """The ask's handles, all or none; whatever ends the block, what is not finished then is cancelled."""
        handles: list[Handle] = []
        started = time.monotonic()
        try:
            for request in ask.requests():
                handles.append(self.engine.submit(request))
            yield handles
            self.failure = None
            self.metrics.seconds.add(time.monotonic() - started)
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()

    async def events(self, handles: Sequence[Handle], samples: int) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event) of all handles as they come; TimeoutError when the request's time is up.

        The engine's thread says that there is news; the events are then taken without waiting.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(news.set)

        for handle in handles:
            handle.subscribe(notify)
        started, first = time.monotonic(), True
        going = dict(enumerate(handles))
        while going:
            news.clear()  # before looking, so that what comes while we look wakes us again
            for number, handle in list(going.items()):
                for event in self._ready(handle):
                    if event is None:
                        del going[number]
                    else:
                        if first:
                            self.metrics.first_token.add(time.monotonic() - started)
                        first = False
                        yield number * samples + event.index, event
            if going:
                left = started + self.timeout - time.monotonic()
                await asyncio.wait_for(news.wait(), max(0.0, left))

    def _ready(self, handle: Handle) -> Iterator[Event | None]:
        """Events that are there; None after the last one of all."""
        while True:
            try:
                event = handle.next_event(timeout=0)
            except TimeoutError:
                return
            except (
                Exception
            ) as error:  # of a round: the engine has given it to all who were in it, and goes on
                self.failure = error
                message = "the engine failed while it wrote this answer; the server's log says more."
                raise ApiError(500, message, code="engine") from error
            yield event
            if event is None:
                return
