"""One engine for many requests: submitted from the event loop, awaited without a thread each, freed when done."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bessemer.generate import Engine, Event, Handle
from bessemer.serve.ask import Ask, Room, chat_ask, completion_ask
from bessemer.serve.conversation import Template
from bessemer.serve.errors import ApiError
from bessemer.serve.metrics import Metrics
from bessemer.serve.replies import ChatReply, CompletionReply, Reply


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
