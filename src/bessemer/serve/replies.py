"""Answers in the protocol's shapes, built from the engine's events: whole, or chunk by chunk of the same events."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.data.tokenizer import Tokenizer
from bessemer.generate import Event

# "context": the row is full. Nothing else is left to say in the protocol's words.
FINISH = {"stop": "stop", "length": "length", "context": "length"}


@dataclass
class Choice:
    """One continuation as it grows."""

    index: int
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


class Reply(ABC):
    """Base of the two shapes. `end_ids` are tokens that end an answer; they carry no text, so no log-probability."""

    prefix = ""
    whole = ""
    part = ""

    def __init__(
        self, model: str, fingerprint: str, tokenizer: Tokenizer, end_ids: Sequence[int], echo: Sequence[str]
    ):
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
        """Take an event into its choice; returns what is new of it."""
        finish = None if event.finish is None else FINISH.get(event.finish, event.finish)
        shown = len(event.logprobs)
        if event.finish == "stop" and event.ids and event.ids[-1] in self.end_ids:
            shown = min(shown, len(event.ids) - 1)
        ids, logprobs = list(event.ids), list(event.logprobs[:shown])
        choice = self.choices[index]
        choice.text.append(event.text)
        choice.ids += ids
        choice.logprobs += logprobs
        choice.finish = finish
        return Choice(index, [event.text], ids, logprobs, finish)

    def usage(self, prompt_tokens: int) -> dict[str, int]:
        made = sum(len(choice.ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
        }

    def document(self, prompt_tokens: int, logprobs: bool) -> dict[str, Any]:
        """The whole answer."""
        choices = [self.message(choice, logprobs) for choice in self.choices]
        return {**self.head, "object": self.whole, "choices": choices, "usage": self.usage(prompt_tokens)}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        more = {} if usage is None else {"usage": usage}
        return {**self.head, "object": self.part, "choices": choices, **more}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    @abstractmethod
    def message(self, choice: Choice, logprobs: bool) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, new: Choice, logprobs: bool) -> dict[str, Any]: ...

    def token(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])


class CompletionReply(Reply):
    """/v1/completions: a choice is a text."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        return [self.delta(choice, False) for choice in self.choices if choice.text != [""]]

    def message(self, choice: Choice, logprobs: bool) -> dict[str, Any]:
        table = self._table(choice) if logprobs else None
        return {
            "index": choice.index,
            "text": "".join(choice.text),
            "logprobs": table,
            "finish_reason": choice.finish,
        }

    def delta(self, new: Choice, logprobs: bool) -> dict[str, Any]:
        return self.message(new, logprobs)

    def _table(self, choice: Choice) -> dict[str, Any]:
        tokens = [self.token(token_id) for token_id in choice.ids[: len(choice.logprobs)]]
        return {
            "tokens": tokens,
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": None,
        }


class ChatReply(Reply):
    """/v1/chat/completions: a choice is a message of the assistant."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [
            {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None}
            for choice in self.choices
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
        rows = []
        for token_id, logprob in zip(choice.ids, choice.logprobs, strict=False):
            token = self.token(token_id)
            rows.append({"token": token, "logprob": logprob, "bytes": self._bytes(token), "top_logprobs": []})
        return {"content": rows, "refusal": None}

    @staticmethod
    def _bytes(token: str) -> list[int] | None:
        """UTF-8 of a token; none where it is part of a character."""
        return None if "\ufffd" in token else list(token.encode())
