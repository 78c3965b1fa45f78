"""How a conversation becomes a prompt, and `bessemer chat`: a conversation in the terminal.

A prompt has the special tokens of its turns, or is a plain transcript. Our tokenizers always have `<|user_start|>` and
the like, but only a fine-tuned model knows them. A model trained on documents alone gets a text with names and colons.
The chat is streamed, with a calculator for models that can call it.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from bessemer.data.tokenize.chat import TURN_TOKENS, can_chat, render, stop_ids
from bessemer.data.tokenize.tokenizer import NOT_UNICODE, Tokenizer
from bessemer.data.tokenize.turns import form_of
from bessemer.errors import InputError, printable
from bessemer.generate import Engine, EngineThread, Event, LoadedModel, Request, Sample, SamplingOptions
from bessemer.generate.calculator import CALLS, call_id, output_ids

# --- conversations as prompts ---


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


# --- the chat in the terminal ---


HELP = """\
/clear     start a new conversation
/seed N    the same seed gives the same answers (/seed alone shows it)
/help      this list
/quit      leave (so do /exit and Ctrl-D)
Ctrl-C     stop the answer"""
SEEDS = 2**32
GREETING = "Hello!"


@dataclass
class Chat:
    """A conversation, kept token by token as the model saw it, so that the engine can reuse its cache."""

    engine: Engine
    template: Template
    sampling: SamplingOptions
    seed: int
    max_tokens: int | None = None
    system: str | None = None
    write: Callable[[str], None] = lambda text: print(printable(text), end="", flush=True)
    turns: list[Exchange] = field(default_factory=list)
    asked: int = 0  # requests since the seed was set; each has its own seed

    def warm_up(self) -> None:
        """Compile the programs of a first question and of one that follows it; call it before an EngineThread runs."""
        prompt = self.template.conversation(self.system, [], GREETING)
        if len(prompt) + 2 * len(self.template.question(GREETING)) >= self.engine.capacity:
            return
        [result] = self.engine.generate([self._request(prompt, 1)])
        held = [*prompt, *result.samples[0].ids, *self.template.question(GREETING)]
        self.engine.generate([self._request(held, 1)])
        self.engine.reset()

    def say(self, text: str) -> str | None:
        """Answer a message, streamed to `write`. Return a remark for the user, or None."""
        template = self.template
        question = template.question(text)
        room = self.engine.capacity - 1
        if len(template.conversation(self.system, [], text)) > room:
            return (
                f"the message is too long ({len(question)} tokens; the model's context has {self.engine.capacity}), so "
                "it was not added to the conversation."
            )
        room -= min(self.max_tokens or room, room // 4)  # for the answer
        dropped = 0
        while self.turns and len(template.conversation(self.system, self.turns, text)) > room:
            del self.turns[0]
            dropped += 1
        answer, written, finish = self._answer(template.conversation(self.system, self.turns, text))
        self.turns.append(Exchange(text, answer, [*question, *template.answer(answer, written)]))
        return _remark(finish, dropped)

    def _answer(self, prompt: list[int]) -> tuple[str, list[int], str]:
        """Return text, tokens and why the answer ended. Results of calculator calls are part of it."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        call = call_id(tokenizer) if self.template.name == "chat" else None
        answer = ""
        written: list[int] = []
        for _ in range(CALLS):
            sample = self._stream([*prompt, *written], call, len(written))
            answer += sample.text
            written += sample.ids
            called = sample.stop is not None and sample.stop == call
            result = output_ids(tokenizer, written) if called else []
            full = len(prompt) + len(written) + len(result) >= self.engine.capacity
            if not called or full or (self.max_tokens and len(written) + len(result) >= self.max_tokens):
                return answer, written, sample.finish if not called else "length"
            shown = tokenizer.decode([written[-1], *result])
            self.write(shown)
            answer += shown
            written += result
        return answer, written, "length"

    def _request(self, prompt: list[int], max_tokens: int | None, call: int | None = None) -> Request:
        return Request(
            prompt,
            max_tokens=max_tokens,
            sampling=self.sampling,
            stop_ids=(*self.template.stop_ids, *([] if call is None else [call])),
            stop_strings=self.template.stop_strings,
            seed=(self.seed + self.asked) % SEEDS,
            stream=True,
        )

    def _stream(self, prompt: list[int], call: int | None, used: int) -> Sample:
        """Send one request and show it as it comes. Ctrl-C cancels it; what was shown by then is the answer."""
        left = None if self.max_tokens is None else self.max_tokens - used
        handle = self.engine.submit(self._request(prompt, left, call))
        self.asked += 1
        shown: list[Event] = []
        try:
            for event in handle:
                shown.append(event)
                self.write(event.text)
        except KeyboardInterrupt:
            handle.cancel()
            ids = tuple(token for event in shown for token in event.ids)
            return Sample(0, ids, (), "".join(event.text for event in shown), "cancelled")
        return handle.result().samples[0]


def _remark(finish: str, dropped: int) -> str | None:
    ends = {
        "length": "cut off at the maximum length of an answer (--max-tokens)",
        "context": "cut off: the model's context is full; /clear makes room",
        "cancelled": "stopped",
    }
    lines = [ends[finish]] if finish in ends else []
    if dropped:
        lines.append(f"the context is full: the oldest {dropped} exchange(s) were dropped")
    return "; ".join(lines) or None


class Repl:
    """Reads lines until /quit, /exit or the end of input, where `read` raises EOFError."""

    def __init__(self, chat: Chat, read: Callable[[], str], note: Callable[[str], None]):
        self.chat, self.read, self.note = chat, read, note

    def run(self) -> None:
        interrupted = False
        with EngineThread(self.chat.engine):
            while True:
                try:
                    line = self.read().strip()
                except EOFError:
                    self.chat.write("\n")
                    return
                except KeyboardInterrupt:
                    if interrupted:
                        return
                    interrupted = True
                    self.note("\n/quit or Ctrl-D leaves, or Ctrl-C again.")
                    continue
                interrupted = False
                if line in ("/quit", "/exit"):
                    return
                if line.startswith("/"):
                    self.note(self.command(line))
                elif line:
                    self.answer(line)

    def answer(self, line: str) -> None:
        try:
            remark = self.chat.say(line)
        except KeyboardInterrupt:  # before the first token, or a second time
            remark = "stopped; the message was not added to the conversation"
        self.chat.write("\n")
        if remark:
            self.note(f"({remark})")

    def command(self, line: str) -> str:
        """Run a command that starts with a slash; return what to show."""
        word, _, rest = line.partition(" ")
        if word == "/clear":
            self.chat.turns.clear()
            return "the conversation was cleared."
        if word == "/seed":
            if rest.strip().isdecimal() and int(rest) < SEEDS:
                self.chat.seed, self.chat.asked = int(rest), 0
            elif rest:
                return f"a seed must be between 0 and {SEEDS - 1}."
            return f"seed {self.chat.seed}"
        return HELP if word == "/help" else f"unknown command {word}.\n{HELP}"


def read_line(prompt: str = "> ") -> str:
    """Read a line, on a terminal with editing and history."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 -- input() uses it once imported
        return input(prompt)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise InputError(NOT_UNICODE) from None
    if not line:
        raise EOFError
    return line
