"""A sample that is being written, as the host knows it: its tokens so far, their text, and why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bessemer.generate.request import Event, Handle, Ranking, Sample
from bessemer.generate.stream import TextStream


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
