"""Conversations under a chat template: the tokens before each answer, its own, and the rows that teach them.

A template gives text and does not say who spoke, so it renders prefixes: the messages before an answer with the answer
opened, and the messages up to the answer. What the second has more than the first is the answer, which ends with the
template's end-of-turn token:

    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎ │ Hello.<|im_end|> │ ⏎<|im_start|>user⏎…
                                                  prompt │ answer, learned   │ the rest

Whether several answers share a row is checked, not assumed. An answer stands in the row of a later one if the later
prompt begins with the earlier prompt and answer, character by character. Templates that rewrite earlier turns (Qwen3
drops their thinking) need a row per answer:

    row 1   user⏎1+1?<|im_end|>⏎assistant⏎ │ <think>⏎…⏎</think>⏎⏎2<|im_end|>
    row 2   user⏎1+1?<|im_end|>⏎assistant⏎2<|im_end|>⏎user⏎2+2?<|im_end|>⏎assistant⏎ │ <think>⏎…⏎</think>⏎⏎4<|im_end|>

Some templates open the thinking in the prompt and remove it from every answer they are given (DeepSeek R1). There the
answer is what the model has to write after that prompt: the thinking, its end, and what the template writes of the
message.

Text is encoded piece by piece between special tokens and at these cuts, in training as at inference.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from bessemer.data.tokenize.templates import ChatTemplate, Message, TemplateUnavailable
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError

PRIVATE = range(0xE000, 0xF8FF)  # characters that mean nothing, for marks in texts
THINK, UNTHINK = "<think>", "</think>"
NO_THOUGHTS = re.compile(rf"{THINK}\s*{UNTHINK}\s*\Z")  # what some templates write before an answer without thinking
REASONING = ("reasoning_content", "thinking")  # keys under which templates read it; gpt-oss has the second
CALL_ID = "call00001"  # nine letters and digits: Mistral's templates refuse others
Row = tuple[list[int], list[int]]  # ids, mask
Piece = tuple[str, int]  # text, whether it is learned
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One answer: its message's number, the text before it, and its own text in pieces, to the end of the turn."""

    number: int
    prompt: str
    pieces: tuple[Piece, ...]

    @cached_property
    def whole(self) -> str:
        """Return the prompt and the answer."""
        return self.prompt + "".join(text for text, _ in self.pieces)


class Writer:
    """One conversation under a template. Names of special tokens in its contents are marked, so that they stay text."""

    def __init__(self, messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools = ()) -> None:
        assert tokenizer.chat_template is not None
        self.template: ChatTemplate = tokenizer.chat_template
        self.tokenizer = tokenizer
        self.special = tokenizer.special_names
        self.form = form_of(self.template, self.special, bool(tools))
        self.given = messages
        plain = [self.form.fitted(_plain(message)) for message in messages]
        written = repr((plain, tools))
        marks = (chr(code) for code in PRIVATE if chr(code) not in written)
        self.mark, self.begin, self.end, self.place = (next(marks) for _ in range(4))
        self.messages: list[Message] = [self._marked(message) for message in plain]
        self.tools: list[Mapping[str, Any]] = [_marked(tool, self.special, self.mark) for tool in tools]

    def tokens(self, opened: bool) -> list[int]:
        """Return the ids of the whole conversation, with the next answer opened or not: what a model gets."""
        text, answers = self._read(self._numbers, opened, lenient=True)
        return self.encoded(text, answers)[0]

    def rows(self, first: int = 0) -> list[Row]:
        """Return the rows that teach the answers from message `first` on, each answer in one of them.

        Raise InputError for what the template does not write, or does not write in a way that can be learned.
        """
        return self.written(first).encode()

    def written(self, first: int = 0) -> Written:
        """Return the rows as the template writes them, not encoded yet."""
        self._check()
        whole, taught = self._read([number for number in self._numbers if number >= first], False)
        earlier = [number for number in self._numbers if number < first]
        before = [*(self._read(earlier, False, lenient=True)[1] if earlier else ()), *taught]
        rows: list[tuple[str, list[Answer]]] = []  # the text of each, and what is learned in it
        left = list(taught)
        while left:
            text = left[-1].whole
            shared = [answer for answer in left if text.startswith(answer.whole)]
            rows.insert(0, (text, shared))
            left = [answer for answer in left if answer not in shared]
        if len(rows) <= 1 and (not rows or whole.startswith(rows[0][0])):
            rows = [(whole, taught)]  # with what follows the last answer
        return Written(self, rows, before)

    def following(self, before: Sequence[int], called: bool, ended: bool) -> list[int]:
        """Return the ids of these messages and the next answer's start, as they follow an answer (`continuation`)."""
        calls = self.form.calls if called else None
        answer: Message = {"role": "assistant", "content": self.place} if calls is None else _called(calls, self.place)
        said = [
            message if self.form.writes(str(message.get("role"))) else {**message, "role": "user"}
            for message in self.messages
        ]
        text = self.template.render([ASKED, answer, *said], True, self.tools)
        tail = text[text.rindex(self.place) + 1 :]
        ends = _known_ends(self.tokenizer)
        end = next(
            (found for found in self.special.finditer(tail) if self.tokenizer.id_of(found.group()) in ends), None
        )
        if end is None:
            other = self.special.search(tail)
            how = (
                "does not end the assistant's turn with a special token"
                if other is None
                else f"ends an answer with {other.group()} once others follow, which is not what the model writes"
            )
            raise InputError(
                f"the chat template of {self.template.origin} {how}, so no turn can follow its own. Environments need "
                "a template that leaves earlier answers as they were."
            )
        newest = list(before[-1:])
        parts = self._parts(tail[end.end() :], end.group()) if ended else self._parts(tail[end.start() :], "")
        encoded = self.tokenizer.encode_parts([*newest, *parts])
        return [one for part in encoded[len(newest) :] for one in part]

    @property
    def _numbers(self) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message.get("role") == "assistant"]

    def _read(self, numbers: Sequence[int], opened: bool, lenient: bool = False) -> tuple[str, list[Answer]]:
        """Return the whole text, with the next answer opened or not, and the answers that these messages are.

        Raise InputError for an answer that cannot be told from the rest. lenient: leave it out, as in a prompt.
        """
        size = len(self.messages)
        prompts, afters = [(number, True) for number in numbers], [(number + 1, False) for number in numbers]
        try:
            whole, *texts = self._rendered([(size, opened), *prompts, *afters])
            pairs = zip(texts[: len(numbers)], texts[len(numbers) :], strict=True)
            answers = [self._answer(n, prompt[0], after) for n, (prompt, after) in zip(numbers, pairs, strict=True)]
            return whole[0], answers
        except InputError as error:
            if not lenient or isinstance(error, TemplateUnavailable):
                raise
        if len(numbers) <= 1:
            return self._rendered([(size, opened)])[0][0], []
        found = [answer for number in numbers for answer in self._read([number], opened, lenient=True)[1]]
        return self._rendered([(size, opened)])[0][0], found

    def _rendered(self, prefixes: Sequence[tuple[int, bool]]) -> list[tuple[str, str]]:
        """(text, text with the marks of what is learned) of prefixes; the same where the template makes no marks."""
        marks = (self.begin, self.end) if self.template.marks_answers else None
        texts = self.template.render_prefixes(self.messages, prefixes, self.tools, marks)
        if marks is None:
            return [(text, text) for text in texts]
        return [(text.replace(self.begin, "").replace(self.end, ""), text) for text in texts]

    def _answer(self, number: int, prompt: str, rendered: tuple[str, str]) -> Answer:
        """rendered: the conversation up to the answer, without and with the marks of what is learned."""
        message, (after, marked) = self.messages[number], rendered
        thinking, said = _thoughts(str(message.get("reasoning_content") or ""), str(message.get("content") or ""))
        if after.startswith(prompt) and thinking.strip() in after[len(prompt) :]:
            text = self._ended(after[len(prompt) :])
            if thinking or message.get("tool_calls"):
                self._complete(message, said, text, thinking)
            marks = (marked, self.begin, self.end) if self.template.marks_answers else None
            return Answer(number, prompt, _learned(text, len(prompt), marks))
        text = self._ended(self._written(number, prompt, after, thinking))
        self._complete(message, said, text, thinking)
        return Answer(number, prompt, ((text, 1),))

    def _written(self, number: int, prompt: str, after: str, thinking: str) -> str:
        """Return what the model has to write after a prompt that is not what the template writes before the answer: its
        thinking, where the prompt opens it or the template removes it, then what the template writes of the message."""
        probe = [*self.messages[:number], {"role": "assistant", "content": self.place}]
        head = NO_THOUGHTS.sub("", self.template.render(probe, False, self.tools).partition(self.place)[0])
        opened = self._opened(number, prompt, head)
        if opened is None or opened.strip() not in ("", THINK) or not after.startswith(head):
            raise self._changed(number)
        text, content = after[len(head) :], str(self.messages[number].get("content") or "")
        if UNTHINK in content and thinking.strip() not in text:
            thought, _, said = content.rpartition(UNTHINK)
            thought = thought.lstrip() if THINK in thought else f"{THINK}\n{thought}"
            text = thought + UNTHINK + said[: len(said) - len(said.lstrip())] + text.lstrip()
        elif opened.strip() and THINK not in text:
            text = f"{THINK}\n\n{UNTHINK}\n\n{text.lstrip()}"
        if opened.strip():
            text = text.lstrip().removeprefix(THINK)
        return text.removeprefix("\n") if opened.endswith("\n") else text

    def _opened(self, number: int, prompt: str, head: str) -> str | None:
        """What the prompt has more than what the template writes before an answer. None if they differ from the last
        message on; before that they may, as a prompt is what the model sees (Mistral's have the system message in the
        last question only)."""
        if prompt.startswith(head):
            return prompt[len(head) :]
        last = str(self.messages[number - 1].get("content") or "").strip() if number else ""
        if not last or last not in prompt or last not in head:
            return None
        prompt, head = prompt[prompt.rindex(last) :], head[head.rindex(last) :]
        return prompt[len(head) :] if prompt.startswith(head) else None

    def _ended(self, text: str) -> str:
        """An answer up to the token that ends it: the template's end-of-turn token, else its last special token."""
        found = list(self.special.finditer(text))
        ends = [place.end() for place in found if place.group() == self.form.end] or [place.end() for place in found]
        if not ends or self.special.sub("", text[ends[-1] :]).strip():
            raise InputError(
                f"the chat template of {self.template.origin} does not end the assistant's turn with a special "
                f"token, so a model could not learn to stop: {text!r:.200}."
            )
        return text[: ends[-1]]

    def _complete(self, message: Message, said: str, text: str, thinking: str) -> None:
        """Raise InputError unless the answer holds the thinking, the content and the tool calls of its message."""
        names = [str(_function(call).get("name")) for call in message.get("tool_calls") or ()]
        lost = [name for name in names if text.count(name) < names.count(name)]
        if lost or said.strip() not in text or thinking.strip() not in text:
            what = f"the call of '{lost[0]}'" if lost else "the reasoning, or the content beside it or the tool calls,"
            raise InputError(
                f"the chat template of {self.template.origin} leaves out {what} of an assistant's message: write the "
                "message as that template wants it, or as two messages."
            )

    def _check(self) -> None:
        """Raise InputError for what the template would leave out without a word."""
        origin = self.template.origin
        if self.tools and not self.template.takes_tools:
            raise InputError(f"the chat template of {origin} has no place for tools: leave out the column 'tools'.")
        for given, message in zip(self.given, self.messages, strict=True):
            if message.get("tool_calls") and self.form.calls is None:
                raise InputError(f"the chat template of {origin} has no place for 'tool_calls'.")
            reasoning = given.get("reasoning_content")
            if reasoning is not None and not isinstance(reasoning, str):
                raise InputError(f"'reasoning_content' is {type(reasoning).__name__}, not text.")
            if reasoning and not self.form.thinks:
                raise InputError(
                    f"the chat template of {origin} has no place for 'reasoning_content': write it into the content, "
                    "or leave it out."
                )
            for function in map(_function, message.get("tool_calls") or ()):
                if isinstance(function["arguments"], str) and not _is_json(function["arguments"]):
                    what = f"{function['arguments']!r:.100}"
                    raise InputError(f"the arguments of '{function['name']}' are not JSON: {what}.")
            role = str(message.get("role"))
            if message.get("content") and not self.form.writes(role):
                raise InputError(f"the chat template of {origin} writes nothing for messages of the role '{role}'.")

    def encoded(self, text: str, answers: Sequence[Answer], learned: Sequence[Answer] = ()) -> Row:
        """(ids, mask) of a text. It is cut where answers begin and end that it holds as they were written."""
        parts: list[str | int] = []
        counted: list[int] = []
        last = ""  # the special token right before
        for piece, counts in self._cut(text, answers, learned):
            parts += self._parts(piece, last)
            counted += [counts] * (len(parts) - len(counted))
            if piece:
                last = next((name for name in self.special.findall(piece)[-1:] if piece.endswith(name)), "")
        encoded = self.tokenizer.encode_parts(parts)
        ids = [one for part in encoded for one in part]
        return ids, [counts for part, counts in zip(encoded, counted, strict=True) for _ in part]

    def _cut(self, text: str, answers: Sequence[Answer], learned: Sequence[Answer]) -> Iterator[Piece]:
        done = 0
        for answer in answers:
            if len(answer.prompt) < done or not text.startswith(answer.whole):
                continue
            yield text[done : len(answer.prompt)], 0
            yield from ((piece, counts if answer in learned else 0) for piece, counts in answer.pieces)
            done = len(answer.whole)
        yield text[done:], 0

    def _parts(self, text: str, last: str) -> Iterator[str | int]:
        """Special tokens by their ids, and the plain text between them. `last`: the special token right before, if
        there is one."""
        names = self.special.findall(text)
        for number, between in enumerate(self.special.split(text)):
            if number:
                yield self._id(names[number - 1])
            before, after = [last, *names][number], [*names, ""][number]
            between = between.lstrip() if self.tokenizer.strips(before)[1] else between
            between = between.rstrip() if self.tokenizer.strips(after)[0] else between
            if between:
                yield between.replace(self.mark, "")

    def _id(self, name: str) -> int:
        found = self.tokenizer.id_of(name)
        if found is None:
            raise InputError(
                f"the chat template of {self.template.origin} writes {name}, which {self.tokenizer.origin} does not "
                f"know: the two files belong to different tokenizers."
            )
        return found

    def _marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with a mark in every name of a special token, except in the tags of thinking."""
        if message.get("role") != "assistant" or not self.form.thinks:
            return dict(_marked(message, self.special, self.mark))
        return dict(_marked(message, self.special, self.mark, (THINK, UNTHINK)))

    def _changed(self, number: int) -> InputError:
        return InputError(
            f"the chat template of {self.template.origin} does not write message {number + 1} after those before it: "
            f"with the answer it changes earlier text, so what the model would see before the answer is not what it "
            f"would be trained on. Give the tokenizer a template whose generation prompt is what it writes before an "
            f"answer."
        )


@dataclass(frozen=True)
class Written:
    """Rows of a conversation as text, each with the answers that are learned in it. `answers`: where they are cut."""

    writer: Writer
    rows: list[tuple[str, list[Answer]]]
    answers: list[Answer]

    @property
    def size(self) -> int:
        """Return the length in characters."""
        return sum(len(text) for text, _ in self.rows)

    def encode(self) -> list[Row]:
        """Return ids and masks. No template is rendered, so any thread may call it."""
        return [self.writer.encoded(text, self.answers, learned) for text, learned in self.rows]


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer under the tokenizer's template: one of text, and one that calls a function."""
    assert tokenizer.chat_template is not None
    form = form_of(tokenizer.chat_template, tokenizer.special_names, False)
    (ids, mask), *_ = Writer([ASKED, {"role": "assistant", "content": "b"}], tokenizer).rows()
    found = [_last_learned(ids, mask)]
    if form.calls is not None:
        try:
            (ids, mask), *_ = Writer([ASKED, _called(form.calls)], tokenizer).rows()
            found.append(_last_learned(ids, mask))
        except TemplateUnavailable:
            raise
        except InputError:
            pass  # calls cannot be trained with it, either
    return found


@lru_cache(maxsize=16)
def _known_ends(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(end_ids(tokenizer))


def _last_learned(ids: Sequence[int], mask: Sequence[int]) -> int:
    return ids[max(place for place, learned in enumerate(mask) if learned)]


# What a template does, found by trial


@dataclass(frozen=True)
class Calls:
    """How tool calls are given to a template: the content of a message that has none, and whether arguments are a JSON
    text (else an object)."""

    empty: str | None
    text: bool


@dataclass(frozen=True)
class Form:
    """What a template does with a conversation. `end`: the token after an answer, "" if there is none; `calls`: None if
    it does not write tool calls; `reasoning`: the key under which it reads reasoning, "" if it does not; `thinks`: it
    does, or it knows the tags of thinking in a content."""

    template: ChatTemplate
    with_tools: bool
    end: str
    calls: Calls | None
    reasoning: str
    thinks: bool

    def writes(self, role: str) -> bool:
        """Return whether the content of messages of the role is in the text."""
        return role in ("user", "assistant") or _writes(self.template, self.with_tools, role, self.calls)

    def fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template wants it: reasoning where it looks for it, the arguments of calls as it reads
        them."""
        if message.get("role") != "assistant":
            return message
        if message.get("tool_calls") and self.calls is not None:
            calls = [_fitted_call(call, self.calls.text) for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls, "content": message.get("content") or self.calls.empty}
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning and self.reasoning:
            message = {**message, self.reasoning: reasoning}
        elif isinstance(reasoning, str) and reasoning and self.thinks:
            said = str(message.get("content") or "")
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
            message["content"] = f"{THINK}\n{reasoning.strip()}\n{UNTHINK}\n\n{said}"
        return message


ASKED: Message = {"role": "user", "content": "a"}
FIRST, SECOND = chr(PRIVATE[-1]), chr(PRIVATE[-2])  # stand for texts in trials


@lru_cache(maxsize=64)
def form_of(template: ChatTemplate, special: re.Pattern[str], with_tools: bool) -> Form:
    """Find out what a template does by rendering trial conversations."""
    answer = {"role": "assistant", "content": FIRST}
    tail = _trial(template, with_tools, [ASKED, answer]).partition(FIRST)[2]
    end = special.search(tail)
    thoughts = (key for key in REASONING if SECOND in _trial(template, with_tools, [ASKED, {**answer, key: SECOND}]))
    reads = next(thoughts, "")
    known = UNTHINK in template.source_for((ASKED,) if with_tools else ())
    calls = next((calls for calls in CALLS if _writes_calls(template, with_tools, calls)), None)
    return Form(template, with_tools, end.group() if end else "", calls, reads, bool(reads) or known)


CALLS = tuple(Calls(empty, text) for empty in ("", None) for text in (False, True))


def _writes_calls(template: ChatTemplate, with_tools: bool, calls: Calls) -> bool:
    """Return whether a call so given is in the text, its arguments as JSON or in a form of the template's own."""
    text = _trial(template, with_tools, [ASKED, _called(calls)])
    return FIRST in text and SECOND in text and f"'{SECOND}'}}" not in text


@lru_cache(maxsize=256)
def _writes(template: ChatTemplate, with_tools: bool, role: str, calls: Calls | None) -> bool:
    """Whether the content of a message of the role is in the text; a conversation that the template refuses says so
    when it is rendered."""
    before = [ASKED] if role != "system" else []
    if role == "tool" and calls is not None:
        before = [ASKED, _called(calls)]
    message = {"role": role, "content": SECOND, "name": "f", "tool_call_id": CALL_ID}
    after = [ASKED] if role == "system" else []
    try:
        return SECOND in template.render([*before, message, *after], False, _tools(with_tools))
    except TemplateUnavailable:
        raise  # and nothing is remembered
    except InputError:
        return True


def rendered_call(tokenizer: Tokenizer, tools: Tools) -> str:
    """What the tokenizer's template writes of an answer that calls a function named FIRST; "" if it writes no calls."""
    template = tokenizer.chat_template
    assert template is not None
    form = form_of(template, tokenizer.special_names, bool(tools))
    if form.calls is None:
        return ""
    messages = [ASKED, _called(form.calls)]
    prompt, text = template.render([ASKED], True, tools), template.render(messages, False, tools)
    return text.removeprefix(prompt) if text.startswith(prompt) else text[text.rindex(ASKED["content"]) :]


def continuation(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools, *, before: Sequence[int], called: bool, ended: bool
) -> list[int]:
    """The tokens between an answer that the model has written and its next one: messages of others, under the
    tokenizer's template. Nothing of what was written is looked at, so nothing of it changes.

    before: all ids so far. called: the answer called a function. ended: its last token ends the turn.
    """
    return Writer(messages, tokenizer, tools).following(before, called, ended)


def _called(calls: Calls, value: str = "") -> Message:
    arguments: Any = {"x": value or SECOND}
    function = {"name": FIRST, "arguments": json.dumps(arguments, ensure_ascii=False) if calls.text else arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": calls.empty, "tool_calls": [call]}


def _tools(wanted: bool) -> Tools:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "b"}}, "required": ["x"]}
    function = {"name": "f", "description": "c", "parameters": parameters}
    return [{"type": "function", "function": function}] if wanted else []


def _trial(template: ChatTemplate, with_tools: bool, messages: Sequence[Message]) -> str:
    """Return the text of a conversation; nothing where the template refuses it."""
    try:
        return template.render(messages, False, _tools(with_tools))
    except TemplateUnavailable:
        raise  # and nothing is remembered
    except InputError:
        return ""


# Parts of messages


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: text parts are one text; our tool parts mean nothing to another template. A key
    without a value (parquet fills them in) is left out."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not kept.get("tool_calls", True):
        del kept["tool_calls"]
    content = kept.get("content")
    if isinstance(content, str) or content is None:
        return kept
    if not isinstance(content, Sequence):
        raise InputError(f"the content of a message is text or a list of parts; got {content!r:.200}.")
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"a content with parts other than text cannot be written with a foreign chat template: {content!r:.200}. "
            f"Write tool calls as that template wants them."
        )
    return {**kept, "content": "".join(map(str, texts))}


def _function(call: Any) -> Mapping[str, Any]:
    """Return the function of a tool call: {"function": {"name", "arguments"}}, or that without the envelope."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(
            f"a tool call is {{'type': 'function', 'function': {{'name': text, 'arguments': object}}}}; got "
            f"{call!r:.200}."
        )
    return function


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _fitted_call(call: Any, text: bool) -> dict[str, Any]:
    """A tool call with its arguments as an object, or as JSON text. A text that is not JSON stays what it is: a model
    may have written it."""
    function = _function(call)
    arguments = function.get("arguments")
    written: Any = {} if arguments is None else arguments
    if isinstance(written, str):
        with contextlib.suppress(ValueError, RecursionError):
            written = json.loads(written or "{}")
    written = json.dumps(written, ensure_ascii=False) if text and not isinstance(written, str) else written
    outside = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
    return {"type": "function", **outside, "function": {"name": function["name"], "arguments": written}}


def _thoughts(reasoning: str, content: str) -> tuple[str, str]:
    """(reasoning, content without it) of an answer."""
    if UNTHINK not in content:
        return reasoning, content
    thought, _, said = content.rpartition(UNTHINK)
    return reasoning or thought.rpartition(THINK)[2], said


def _learned(text: str, start: int, marks: tuple[str, str, str] | None) -> tuple[Piece, ...]:
    """The pieces of an answer. marks: the text from whose place `start` on it was taken, with the characters where what
    is learned begins and ends."""
    if marks is None:
        return ((text, 1),)
    marked, begin, end = marks
    pieces: list[Piece] = []
    counts, place = 0, 0
    for part in re.split(f"([{begin}{end}])", marked):
        if part in (begin, end):
            counts = int(part == begin)
            continue
        inside = part[max(0, start - place) : max(0, start + len(text) - place)]
        place += len(part)
        if inside and pieces and pieces[-1][1] == counts:
            pieces[-1] = (pieces[-1][0] + inside, counts)
        elif inside:
            pieces.append((inside, counts))
    return tuple(pieces)


def _marked(value: Any, special: re.Pattern[str], mark: str, kept: Sequence[str] = ()) -> Any:
    """Return the value with a mark inside each name of a special token in its texts, except for the names in `kept`."""
    if isinstance(value, str):
        return special.sub(
            lambda found: found.group() if found.group() in kept else found.group()[0] + mark + found.group()[1:], value
        )
    if isinstance(value, Mapping):
        return {key: _marked(item, special, mark, kept) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, special, mark, kept) for item in value]
    return value
