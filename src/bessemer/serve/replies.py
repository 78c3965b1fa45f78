"""Answers in the protocol's formats, built from the engine's events: as one document or as chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.generate import Event
from bessemer.generate.request import Ranking

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
