"""One engine for many requests, and its answers in the formats of the protocol.

Requests are submitted from the event loop, awaited without a thread each, and freed when done. Answers are built from
the engine's events: as one document or as chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.generate import Engine, Event, Handle
from bessemer.generate.request import Ranking
from bessemer.serve.chat import Template
from bessemer.serve.net import ApiError
from bessemer.serve.requests import Ask, Room, chat_ask, completion_ask

# --- answers ---


IMPOSSIBLE = -9999.0
# "context": the context is full, for which the protocol has no word of its own
FINISH = {"stop": "stop", "length": "length", "context": "length"}


@dataclass
class Choice:
    """One continuation as it grows."""

    index: int
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    top: list[Ranking] = field(default_factory=list)  # the most likely tokens at each position, if requested

    def places(self) -> Iterator[tuple[int, float, Ranking]]:
        """Yield (token, log p, the most likely tokens) of each token that has text."""
        yield from zip_longest(self.ids[: len(self.logprobs)], self.logprobs, self.top, fillvalue=())


class Reply(ABC):
    """Base of the two formats. `end_ids` end an answer; they have no text, so no log-probability."""

    prefix = ""
    whole = ""
    part = ""

    def __init__(self, model: str, fingerprint: str, tokenizer: Tokenizer, end_ids: Sequence[int], echo: Sequence[str]):
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.choices = [Choice(index, [text]) for index, text in enumerate(echo)]
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def add(self, index: int, event: Event) -> Choice:
        """Add an event to its choice; return what is new."""
        finish = None if event.finish is None else FINISH.get(event.finish, event.finish)
        shown = len(event.logprobs)
        if event.finish == "stop" and event.ids and event.ids[-1] in self.end_ids:
            shown = min(shown, len(event.ids) - 1)
        ids, logprobs, top = list(event.ids), list(event.logprobs[:shown]), list(event.top[:shown])
        choice = self.choices[index]
        choice.text.append(event.text)
        choice.ids += ids
        choice.logprobs += logprobs
        choice.top += top
        choice.finish = finish
        return Choice(index, [event.text], ids, logprobs, finish, top)

    def usage(self, prompt_tokens: int) -> dict[str, int]:
        made = sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}

    def document(self, prompt_tokens: int, logprobs: bool) -> dict[str, Any]:
        """Return the complete answer."""
        choices = [self.message(choice, logprobs) for choice in self.choices]
        return {**self.head, "object": self.whole, "choices": choices, "usage": self.usage(prompt_tokens)}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        more = {} if usage is None else {"usage": usage}
        return {**self.head, "object": self.part, "choices": choices, **more}

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""
        return []

    @abstractmethod
    def message(self, choice: Choice, logprobs: bool) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, new: Choice, logprobs: bool) -> dict[str, Any]: ...

    def token(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])

    @staticmethod
    def score(logprob: float) -> float:
        """Return a log-probability as JSON can hold it; minus infinity is -9999, as in the protocol."""
        return max(logprob, IMPOSSIBLE)


class CompletionReply(Reply):
    """/v1/completions: a choice is a text."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        return [self.delta(choice, False) for choice in self.choices if choice.text != [""]]

    def message(self, choice: Choice, logprobs: bool) -> dict[str, Any]:
        table = self._table(choice) if logprobs else None
        return {"index": choice.index, "text": "".join(choice.text), "logprobs": table, "finish_reason": choice.finish}

    def delta(self, new: Choice, logprobs: bool) -> dict[str, Any]:
        return self.message(new, logprobs)

    def _table(self, choice: Choice) -> dict[str, Any]:
        places = list(choice.places())
        return {
            "tokens": [self.token(token_id) for token_id, _, _ in places],
            "token_logprobs": [self.score(logprob) for _, logprob, _ in places],
            "top_logprobs": [self._most_likely(*place) for place in places] if choice.top else None,
            "text_offset": None,
        }

    def _most_likely(self, token_id: int, logprob: float, ranking: Ranking) -> dict[str, float]:
        """Return log-probabilities by text, the chosen token included; of equal texts, the most likely counts."""
        found: dict[str, float] = {}
        for other, score in (*ranking, (token_id, logprob)):
            found.setdefault(self.token(other), self.score(score))
        return found


class ChatReply(Reply):
    """/v1/chat/completions: a choice is a message of the assistant."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [
            {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None} for choice in self.choices
        ]

    def message(self, choice: Choice, logprobs: bool) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._table(choice) if logprobs else None,
            "finish_reason": choice.finish,
        }

    def delta(self, new: Choice, logprobs: bool) -> dict[str, Any]:
        content = "".join(new.text)
        return {
            "index": new.index,
            "delta": {"content": content} if content else {},
            "logprobs": self._table(new) if logprobs else None,
            "finish_reason": new.finish,
        }

    def _table(self, choice: Choice) -> dict[str, Any]:
        rows = [
            {**self._entry(token_id, logprob), "top_logprobs": [self._entry(*pair) for pair in ranking]}
            for token_id, logprob, ranking in choice.places()
        ]
        return {"content": rows, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.token(token_id)
        data = None if "\ufffd" in token else list(token.encode())  # None for a part of a character
        return {"token": token, "logprob": self.score(logprob), "bytes": data}


# --- the service ---


class Metrics:
    """Counters of the server in Prometheus' text format; the engine's own are read on request."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (endpoint, status)
        self.gone = 0  # clients that disconnected before their answer was complete
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
            "Clients that disconnected before their answer was complete.",
            [("", self.gone)],
        )
        add("timeouts_total", "counter", "Requests that ran out of time.", [("", self.late)])
        add("request_seconds", "summary", "Duration of a generation request.", self.seconds.values())
        add("first_token_seconds", "summary", "Time to the first token.", self.first_token.values())
        add("rows_active", "gauge", "Continuations still generating.", [("", engine.active)])
        add("rows_waiting", "gauge", "Continuations in the queue.", [("", engine.waiting)])
        add("slots", "gauge", "Continuations that can generate at once.", [("", engine.slots)])
        add("prompt_tokens_total", "counter", "Prompt tokens processed.", [("", engine.prompt_tokens)])
        reused = "Prompt tokens found in the prefix cache."
        add("prompt_tokens_reused_total", "counter", reused, [("", engine.reused_tokens)])
        add("tokens_total", "counter", "Tokens generated.", [("", engine.tokens)])
        add("rounds_total", "counter", "Rounds of the engine.", [("", engine.rounds)])
        if (saved := engine.acceptance) is not None:
            add("passes_total", "counter", "Passes of a row, each of one token or more.", [("", saved["passes"])])
            add("draft_tokens_total", "counter", "Tokens of drafts.", [("", saved["drafted"])])
            add("accepted_tokens_total", "counter", "Tokens of drafts that were accepted.", [("", saved["accepted"])])
        add("compilations_total", "counter", "Programs compiled.", [("", engine.compilations)])
        return "\n".join(lines) + "\n"


@dataclass
class Timer:
    """Sum and number of durations."""

    total: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1

    def values(self) -> list[tuple[str, Any]]:
        return [("_sum", f"{self.total:.6f}"), ("_count", self.count)]


@dataclass(frozen=True)
class Entry:
    """One model name: how its conversations are written, and its adapter in the engine (0: none)."""

    template: Template
    step: int
    adapter: int = 0


@dataclass
class Service:
    """What the endpoints share. `timeout`: seconds per request, waiting included.

    A request that names no model gets `model`; `others` are further names, with adapters over the same base.
    """

    engine: Engine
    template: Template
    model: str
    step: int
    adapter: int = 0
    others: Mapping[str, Entry] = field(default_factory=dict)
    timeout: float = 300.0
    token: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    failure: Exception | None = None  # of the engine, until a later answer is complete
    renders: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "bessemer-template"), repr=False)

    @property
    def body_limit(self) -> int:
        """Maximum bytes of a body, far above any prompt that fits the context."""
        return max(1 << 20, 32 * self.engine.capacity)

    @property
    def entries(self) -> dict[str, Entry]:
        """All model names; the one that needs no name comes first."""
        return {self.model: Entry(self.template, self.step, self.adapter), **self.others}

    def entry(self, name: Any) -> Entry:
        """Return the model of a request; that of an unknown name, which is refused once the request is read, is the
        default."""
        found = self.entries
        return found[name] if isinstance(name, str) and name in found else found[self.model]

    async def ask(self, tree: dict[str, Any], chat: bool) -> Ask:
        """Return what a body asks for. Raise TimeoutError when the request's time is up.

        Texts are tokenized in a thread, so that streams continue meanwhile; conversations in their own threads, since a
        foreign chat template may use all of its time limit.
        """
        template = self.entry(tree.get("model")).template
        room = Room(self.engine.vocab_size, self.engine.capacity, self.engine.queue)
        if chat:
            loop = asyncio.get_running_loop()
            rendered = loop.run_in_executor(self.renders, chat_ask, tree, template, room)
            ask = await asyncio.wait_for(rendered, self.timeout)
        else:
            ask = await asyncio.to_thread(completion_ask, tree, template.tokenizer, room)
        if ask.options.model is not None and ask.options.model not in self.entries:
            raise self.unknown_model(ask.options.model)
        return ask

    def unknown_model(self, name: str) -> ApiError:
        known = [f"'{one}'" for one in self.entries]
        listed = f"{known[0]} is" if len(known) == 1 else f"{', '.join(known[:-1])} and {known[-1]} are"
        message = f"the model '{name[:100]}' is not served here; {listed}."
        return ApiError(404, message, param="model", code="model_not_found")

    def reply(self, ask: Ask, chat: bool) -> Reply:
        echo = [text for text in ask.echo for _ in range(ask.options.n)]
        shape = ChatReply if chat else CompletionReply
        ends = (*self.engine.end_ids, *ask.stop_ids)
        name = ask.options.model or self.model
        entry = self.entry(name)
        return shape(name, f"{name}-step-{entry.step}", entry.template.tokenizer, ends, echo)

    @contextlib.contextmanager
    def submitted(self, ask: Ask) -> Iterator[list[Handle]]:
        """Submit all requests or none and yield their handles; cancel those not finished at the end of the block."""
        handles: list[Handle] = []
        started = time.monotonic()
        try:
            for request in ask.requests(self.entry(ask.options.model).adapter):
                handles.append(self.engine.submit(request))
            yield handles
            self.failure = None
            self.metrics.seconds.add(time.monotonic() - started)
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()

    async def events(self, handles: Sequence[Handle], samples: int) -> AsyncIterator[tuple[int, Event]]:
        """Yield (choice, event) of all handles as they come. Raise TimeoutError when the request's time is up.

        The engine's thread notifies us of new events, which are then taken without waiting.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(news.set)

        for handle in handles:
            handle.subscribe(notify)
        started, first = time.monotonic(), True
        going = dict(enumerate(handles))
        while going:
            news.clear()  # before looking, so that a later event wakes us again
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
        """Yield the events that have arrived; None after the last of all."""
        while True:
            try:
                event = handle.next_event(timeout=0)
            except TimeoutError:
                return
            except Exception as error:  # of one round; the engine continues
                self.failure = error
                message = "the engine failed while generating this answer; the server's log has the error."
                raise ApiError(500, message, code="engine") from error
            yield event
            if event is None:
                return
