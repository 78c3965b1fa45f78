"""How a conversation becomes a prompt: with the special tokens of its turns, or as a plain transcript.

Our tokenizers always have `<|user_start|>` and the like, but only a fine-tuned model knows them. A model trained on
documents alone gets a text with names and colons.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from bessemer.data.tokenize.chat import TURN_TOKENS, can_chat, render, stop_ids
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.data.tokenize.turns import form_of
from bessemer.errors import InputError
from bessemer.generate import LoadedModel

ROLES = ("system", "user", "assistant")
ON_DOCUMENTS = ("pretrain", "kl")  # objectives that train on text without turns

Message = Mapping[str, Any]  # role, content; of a template that takes tools also tool_calls and the like
Tool = Mapping[str, Any]


class Exchange(NamedTuple):
    """A question, its answer, and their tokens in the conversation."""

    question: str
    answer: str
    ids: list[int]


PREPARING = "preparing the model; the first start also compiles its programs"
"""Printed before a model answers for the first time."""


@dataclass(frozen=True)
class Template(ABC):
    """Turns messages into the tokens before an answer, at once or turn by turn; says what ends the answer."""

    tokenizer: Tokenizer
    name: ClassVar[str]
    stop_strings: ClassVar[tuple[str, ...]] = ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def takes_tools(self) -> bool:
        """Whether it can describe tools."""
        return False

    @property
    def takes_reasoning(self) -> bool:
        """Whether it has a place for the `reasoning_content` of earlier answers."""
        return False

    @abstractmethod
    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...

    @abstractmethod
    def beginning(self, system: str | None) -> list[int]: ...

    @abstractmethod
    def question(self, text: str) -> list[int]:
        """Return the tokens of a user message and of the start of the answer."""

    @abstractmethod
    def answer(self, text: str, ids: Sequence[int]) -> list[int]:
        """Return the tokens of a complete answer in the conversation."""

    def conversation(self, system: str | None, before: Sequence[Exchange], question: str) -> list[int]:
        """Return the conversation so far, token by token as the model saw it, and a new question."""
        history = [token for exchange in before for token in exchange.ids]
        return [*self.beginning(system), *history, *self.question(question)]


class Turns(Template):
    """Each message between the tokens of its role; the answer ends with `<|assistant_end|>`."""

    name = "chat"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return stop_ids(self.tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return render(messages, self.tokenizer, generation_prompt=True, tools=tools)

    def beginning(self, system: str | None) -> list[int]:
        return render(_system(system), self.tokenizer, generation_prompt=False)

    def question(self, text: str) -> list[int]:
        ids = self.prompt([{"role": "user", "content": text}])
        return ids[len(self.beginning(None)) :]

    def answer(self, text: str, ids: Sequence[int]) -> list[int]:
        """Return the generated tokens themselves, which the engine finds in its cache."""
        kept = [token for token in ids if token != self.tokenizer.bos_id]
        return kept if kept[-1:] == list(self.stop_ids) else [*kept, *self.stop_ids]


class Foreign(Turns):
    """The tokenizer's own chat template. It may render the first turn differently (a system message inside the first
    question, say), so the whole conversation is rendered each time."""

    @property
    def takes_tools(self) -> bool:
        template = self.tokenizer.chat_template
        return template is not None and template.takes_tools

    @property
    def takes_reasoning(self) -> bool:
        template = self.tokenizer.chat_template
        return template is not None and form_of(template, self.tokenizer.special_names, False).thinks

    def beginning(self, system: str | None) -> list[int]:
        return []  # known only together with the first question

    def question(self, text: str) -> list[int]:
        return self.prompt([{"role": "user", "content": text}])

    def answer(self, text: str, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def conversation(self, system: str | None, before: Sequence[Exchange], question: str) -> list[int]:
        messages = _system(system)
        for exchange in before:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        return self.prompt([*messages, {"role": "user", "content": question}])


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


class Transcript(Template):
    """`User: …`, `Assistant: …` on lines of their own; the answer ends where the model writes the user's next line."""

    name = "plain"
    stop_strings = ("\nUser:",)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        lines = [
            message["content"]
            if message["role"] == "system"
            else f"{message['role'].capitalize()}: {message['content']}"
            for message in messages
        ]
        return self.tokenizer.prompt("\n".join([*lines, "Assistant:"]))

    def beginning(self, system: str | None) -> list[int]:
        return [*self.tokenizer.beginning, *([] if system is None else self.tokenizer.encode(f"{system}\n"))]

    def question(self, text: str) -> list[int]:
        return self._continued(f"User: {text}\nAssistant:")

    def answer(self, text: str, ids: Sequence[int]) -> list[int]:
        return self._continued(f"{text.rstrip()}\n")

    def _continued(self, text: str) -> list[int]:
        """Encode a text that follows a line."""
        return self.tokenizer.encode(text, after=self.tokenizer.encode("\n"))


def template_of(loaded: LoadedModel, wanted: str = "auto") -> Template:
    """Return the template; `auto` is "chat" for a model trained on conversations, else "plain"."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise InputError("this model was trained on token ids without a tokenizer, so it cannot read text.")
    knows = can_chat(tokenizer)
    if wanted == "chat" and not knows:
        raise InputError(
            f"--template chat needs a tokenizer with a chat template or {', '.join(TURN_TOKENS)}; {tokenizer.origin} "
            "lacks some. Use --template plain."
        )
    trained = knows and loaded.config.get("objective") not in ON_DOCUMENTS
    if wanted == "chat" or (wanted == "auto" and trained):
        return Turns(tokenizer) if tokenizer.chat_template is None else Foreign(tokenizer)
    return Transcript(tokenizer)


def remark(template: Template, wanted: str) -> str | None:
    """Return a remark if a transcript was chosen automatically."""
    if wanted != "auto" or template.name == "chat":
        return None
    return (
        "this model was trained on documents, not on conversations, so it gets a plain transcript (User: … "
        "Assistant: …) to continue. --template chat uses the special tokens of turns instead."
    )
