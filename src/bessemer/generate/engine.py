"""Continuous batching: requests join a running batch and leave it, over one model and its live parameters.

A round admits waiting requests into free slots, runs a block of decode steps on the device, reads its tokens once,
and hands them out. Rows never see each other: with the same seed a request has the same text in any company (exactly
so in float32 on a CPU within one bucket; elsewhere rounding may choose another of two nearly equal tokens).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np

from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.generate.admission import PROMPTS, ROWS, Joining, admission, by_width, check_request
from bessemer.generate.decoder import end_tokens
from bessemer.generate.load import LoadedModel, check_scores
from bessemer.generate.request import TOP, Event, Handle, QueueFull, Ranking, Request, Result, Sample
from bessemer.generate.rows import Output, looks
from bessemer.generate.sampling import way_of
from bessemer.generate.slots import Slots
from bessemer.generate.text import TextStream
from bessemer.topology import process_count

# A sample that is being written, as the host knows it: its tokens so far, their text, and why it ends.


@dataclass
class Row:
    """Takes what the device made and says what is new. `limit`: the most tokens it may have."""

    handle: Handle
    index: int
    stops: frozenset[int]
    limit: int
    text: TextStream | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Ranking] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)  # ids, and what the device made after a stop string
    stop: int | str | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.handle.request.prompt_ids) + len(self.made)

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens in its cache: all but the newest."""
        return (*self.handle.request.prompt_ids, *self.made)[:-1]

    def take(
        self, ids: Sequence[int], logprobs: Sequence[float], ended: bool, top: Sequence[Ranking] = ()
    ) -> Event:
        """New tokens; `ended`: the device makes no more. `top`: the most likely ones at each, where it noted them."""
        self.made += ids
        if ended and ids and ids[-1] in self.stops:
            self.stop = ids[-1]
        text, taken = "", len(ids)
        if self.text is not None:
            text, count = self.text.push_until_stop(ids if self.stop is None else ids[:-1])
            if self.text.stop is not None:
                self.stop, taken, ended = self.text.stop, count, True
            text += self.text.finish() if ended else ""
        finish = None if not ended else "stop" if self.stop is not None else self._why_full()
        return self._event(text, ids[:taken], logprobs[:taken], finish, top[:taken])

    def cancel(self) -> Event:
        return self._event(self.text.finish() if self.text is not None else "", (), (), "cancelled")

    def sample(self, finish: str) -> Sample:
        """All of it."""
        text = "".join(self.pieces)
        return Sample(
            self.index, tuple(self.ids), tuple(self.logprobs), text, finish, self.stop, tuple(self.top)
        )

    def _event(
        self,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish: str | None,
        top: Sequence[Ranking] = (),
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


# How many steps a round takes: all of them where nobody reads along, few where somebody does.
#
# A short round costs the host its trouble more often and changes nothing else: rows draw by their own count
# of tokens, and each token is computed over as much of the cache as in whole rounds.


READING = 0.075
"""Seconds of a round while somebody reads along; text that comes in fewer pieces a second seems to stutter."""
GROWTH = 3
"""A reader's next round brings three times what there is: 1, 4, 16 tokens. His first one waits for no other, and the
host is asked twice more an answer."""


def round_of() -> int:
    """Decode steps of a whole round. Between rounds an accelerator waits two milliseconds for the host, as long as two
    steps."""
    return 16 if jax.default_backend() == "cpu" else 32


class Pace:
    """Chooses each round's steps, up to `most`. `clocked`: also by the time that the round before took; several
    processes, each with a clock of its own, must choose alike and go by counts alone."""

    def __init__(self, most: int, clocked: bool):
        self.most, self.clocked = most, clocked
        self._seconds = 0.0  # a step's, at most: a prefill or a compilation in that round was counted along

    def next(self, rows: Collection[Row], unit: int) -> tuple[int, int]:
        """(steps, tokens of the longest row where a whole round would end); steps are a multiple of `unit`, as `most`.

        The second decides how much of the cache is computed with, so a round ends there at the latest.
        """
        end = max(row.length - len(row.made) % self.most for row in rows) + self.most
        steps = min(self.most, end - max(row.length for row in rows))
        read = [len(row.made) for row in rows if row.handle.request.stream]
        if read:
            steps = min(steps, GROWTH * min(read))
            steps = min(steps, int(READING / self._seconds)) if self._seconds else steps
        return max(steps // unit, 1) * unit, end

    def took(self, seconds: float, steps: int) -> None:
        """The last round made `steps` tokens of a row in this time."""
        if self.clocked:
            self._seconds = seconds / max(steps, 1)


@dataclass
class Waiting:
    """A request in the queue; its samples up to `begun` are in slots already."""

    handle: Handle
    begun: int = 0

    @property
    def rows(self) -> int:
        return self.handle.request.n - self.begun


class Engine:
    """`submit` requests from any thread; an EngineThread runs the rounds, or else whoever waits for a result.

    model: has `decode`, `init_cache`, `vocab_size` and `block_size`; every array of its cache has the rows first.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        *,
        slots: int = 16,
        capacity: int | None = None,  # tokens of a row, prompt and continuation; none: the model's block
        tokenizer: Tokenizer | None = None,  # for text and stop strings
        pad_id: int | None = None,
        end_ids: Sequence[int] | None = None,  # end every row; none: the tokenizer's document token
        steps: int | None = None,  # decode steps of a whole round; none: see round_of
        queue: int | None = None,  # rows that may wait; none: any number
        reuse: bool = False,  # a prompt that continues what a free slot holds is prefilled from there (chat)
        fetch: Callable[[Any], Any] = jax.device_get,
        scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: int = 0,
    ):
        self.model, self.tokenizer, self.params = model, tokenizer, params
        self.capacity = capacity or int(model.block_size)
        if not 0 < self.capacity <= model.block_size:
            raise InputError(f"capacity is {capacity}; the model's context is {model.block_size} tokens.")
        self.pad_id = pad_id if pad_id is not None else tokenizer.pad_id if tokenizer else 0
        named = end_ids if end_ids is not None else end_tokens(model, tokenizer) if tokenizer else ()
        self.end_ids = tuple(named)
        self.queue, self.reuse, self.seed = queue, reuse, seed
        self.fetch, self.scope = fetch, scope
        self.threaded = False  # an EngineThread runs the rounds
        self.rounds = self.tokens = self.prompt_tokens = 0
        with scope():
            self._slots = Slots(model, slots, self.capacity, steps or round_of(), self.pad_id)
        self._pace = Pace(self._slots.steps, clocked=process_count() == 1)
        self._rows: dict[int, Row] = {}  # by slot
        self._free = deque(range(self._slots.count))  # longest free first
        self._held: dict[int, tuple[int, ...]] = {}  # tokens in the cache of a free slot, with `reuse`
        self._waiting: deque[Waiting] = deque()
        self._submitted = 0
        self._stepping = threading.RLock()  # held for a round
        self._lock = threading.Lock()  # of the queue
        self._news = threading.Condition(self._lock)

    @classmethod
    def of(cls, loaded: LoadedModel, **options: Any) -> Self:
        """Of a loaded run: its parameters, tokenizer and mesh."""
        return cls(
            loaded.model, loaded.params, **{"tokenizer": loaded.tokenizer, "scope": loaded.scope, **options}
        )

    @property
    def slots(self) -> int:
        return self._slots.count

    @property
    def vocab_size(self) -> int:
        return int(self.model.vocab_size)

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one a bucket of prompts, one a bucket of rows."""
        return self._slots.compilations

    @property
    def active(self) -> int:
        """Rows that are being written."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        with self._lock:
            return sum(waiting.rows for waiting in self._waiting)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Queue a request. InputError when it cannot be served, QueueFull when too many rows wait already."""
        return self._submit([request], self.queue)[0]

    def generate(
        self, requests: Sequence[Request], progress: Callable[[int, int], None] | None = None
    ) -> list[Result]:
        """All of them, in order, whatever the bound of the queue. `progress` gets (rows done, rows) after each round of
        an engine that has nothing else to do."""
        handles = self._submit(requests, None)
        if progress is not None and not self.threaded:
            total = self.active + self.waiting
            progress(0, total)
            while self.step():
                progress(total - self.active - self.waiting, total)
        return [handle.result() for handle in handles]

    def _submit(self, requests: Sequence[Request], bound: int | None) -> list[Handle]:
        for request in requests:
            check_request(self, request)
        with self._news:
            rows = sum(waiting.rows for waiting in self._waiting) + sum(request.n for request in requests)
            if bound is not None and rows > bound:
                raise QueueFull(
                    f"{rows} rows would wait for {self.slots} slots, and {bound} may: try again later."
                )
            handles = [Handle(self, request, self._seed_of(request)) for request in requests]
            self._waiting += [Waiting(handle) for handle in handles]
            self._news.notify_all()
        return handles

    def _seed_of(self, request: Request) -> int:
        self._submitted += 1
        named = request.seed if request.seed is not None else request.sampling.seed
        if isinstance(named, int):
            return named
        return int(np.random.SeedSequence((self.seed, self._submitted)).generate_state(1)[0])

    def update_params(self, params: Any) -> None:
        """Use these from the next round on; nothing is copied. Rows that are being written go on with them."""
        self.params = params
        self._held.clear()  # computed with the old ones

    def release(self) -> None:
        """Give the memory of the slots back, once nothing is being written; the next request takes it again."""
        with self._stepping:
            if not self._rows:
                self._held.clear()
                self._slots.rows = None

    def wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def wait(self, timeout: float | None = None) -> None:
        """Until a request is submitted or cancelled."""
        with self._news:
            if not self._waiting:
                self._news.wait(timeout)

    # -- rounds --------------------------------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """One round, by one thread at a time; False if there was nothing to do. An error ends every open request."""
        with self._stepping:
            try:
                with self.scope():
                    self._drop_cancelled()
                    self._admit()
                    if self._rows:
                        self._decode()
                        return True
                    return self.waiting > 0
            except BaseException as error:  # also an interrupt: what the device holds is no longer known
                self.abandon(error)
                raise

    def abandon(self, error: BaseException) -> None:
        """Every open request fails with `error`; the engine starts again with empty slots."""
        with self._lock:
            handles = [row.handle for row in self._rows.values()] + [item.handle for item in self._waiting]
            self._waiting.clear()
        self._rows.clear()
        self._held.clear()
        self._free = deque(range(self._slots.count))
        self._slots.rows = None
        for handle in dict.fromkeys(handles):
            handle.fail(error)

    def reset(self) -> None:
        """End what is open, and let the cache go: what comes next finds the engine as it was made."""
        with self._stepping:
            self.cancel_all()
            self._held.clear()
            self._free = deque(range(self._slots.count))
            self._slots.rows = None

    def cancel_all(self) -> None:
        """End every open request as "cancelled", now."""
        with self._stepping:
            with self._lock:
                handles = [row.handle for row in self._rows.values()]
                handles += [item.handle for item in self._waiting]
            for handle in handles:
                handle.cancelled = True
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        for slot in [slot for slot, row in self._rows.items() if row.handle.cancelled]:
            self._hand_out(slot, self._rows[slot].cancel())
        with self._lock:
            dropped = [item for item in self._waiting if item.handle.cancelled]
            self._waiting = deque(item for item in self._waiting if not item.handle.cancelled)
        for item in dropped:
            for index in range(item.begun, item.handle.request.n):
                sample = Sample(index, (), (), "", "cancelled")
                item.handle.emit(Event(index, "", (), (), "cancelled"), sample)

    def _admit(self) -> None:
        """Waiting requests into free slots, in their order; as many as fit."""
        joining: list[Joining] = []
        with self._lock:
            free = len(self._free)
            while self._waiting and free:
                item = self._waiting[0]
                count = min(item.rows, free, ROWS)
                joining.append(Joining(item.handle, range(item.begun, item.begun + count)))
                item.begun += count
                free -= count
                if not item.rows:
                    self._waiting.popleft()
        for one in joining:
            self._place(one)
        for group, width in by_width(joining, self.capacity, PROMPTS, ROWS):
            new = admission(group, self._slots, self.pad_id, self.end_ids)
            self._slots.admit(self.params, new, width, reuse=group[0].held > 0)

    def _place(self, one: Joining) -> None:
        """Give it slots, if it can one that holds the beginning of its prompt."""
        request, prompt = one.handle.request, tuple(one.handle.request.prompt_ids)
        slot = self._slot_holding(prompt) if one.count == 1 else None
        if slot is not None:
            self._free.remove(slot)
            one.held, one.slots = len(self._held[slot]), [slot]
        else:
            one.slots = [self._free.popleft() for _ in range(one.count)]
        stops = frozenset((*self.end_ids, *request.stop_ids))
        one.limit = self.capacity - len(prompt) + 1
        if request.max_tokens is not None:
            one.limit = min(one.limit, request.max_tokens)
        for slot, index in zip(one.slots, one.indices, strict=True):
            self._held.pop(slot, None)
            text = TextStream(self.tokenizer, request.stop_strings) if self.tokenizer else None
            self._rows[slot] = Row(one.handle, index, stops, one.limit, text)
        self.prompt_tokens += len(prompt)

    def _slot_holding(self, prompt: tuple[int, ...]) -> int | None:
        """The free slot that holds most of the prompt, and nothing else."""
        found = {
            slot: len(held)
            for slot, held in self._held.items()
            if 0 < len(held) < len(prompt) and prompt[: len(held)] == held
        }
        return max(found, key=lambda slot: found[slot], default=None)

    def _decode(self) -> None:
        active, rows, begun = sorted(self._rows), self._rows.values(), time.perf_counter()
        way = way_of(row.handle.request.sampling for row in rows)
        steps, length = self._pace.next(rows, looks(self._slots.steps, way))
        wanted = any(row.handle.request.top_logprobs for row in rows)
        top = min(TOP, self.vocab_size) if wanted else 0
        output, columns = self._slots.decode(self.params, active, length, way, steps, top)
        output = self.fetch(output)
        self._pace.took(time.perf_counter() - begun, int(output.made.max()))
        check_scores(output.logprobs)  # 0 where no token is
        self.rounds += 1
        tokens, scores, counts, live = (array.T.tolist() for array in output[:4])
        for slot, column in zip(active, columns, strict=True):
            made, row = counts[column], self._rows[slot]
            self.tokens += made
            ranked = rankings(output, column, made) if row.handle.request.top_logprobs else []
            event = row.take(tokens[column][:made], scores[column][:made], not live[column], ranked)
            self._hand_out(slot, event)

    def _hand_out(self, slot: int, event: Event) -> None:
        """Give the event to its request; after the last one the slot is free again."""
        row = self._rows[slot]
        if event.finish is not None:
            del self._rows[slot]
            self._free.append(slot)
            if self.reuse and row.made:
                self._held[slot] = row.held
        if event.ids or event.finish is not None:
            row.handle.emit(event, None if event.finish is None else row.sample(event.finish))


def rankings(output: Output, column: int, made: int) -> list[Ranking]:
    """The most likely tokens at each place of a column of a block that noted them."""
    assert output.top_ids is not None and output.top_logprobs is not None
    ids, scores = (array[:made, column].tolist() for array in (output.top_ids, output.top_logprobs))
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids, scores, strict=True)]


# EngineThread: the engine's rounds in the background, for servers and anyone with many threads.


PAUSE = 1.0
"""Seconds an idle thread sleeps at most; a request wakes it."""

log = logging.getLogger(__name__)


class EngineThread:
    """`with EngineThread(engine): …` runs rounds while there is work. On leaving, open requests are cancelled.

    A round that fails gives its error to every open request; the thread goes on with the next ones.
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
