"""Chat messages as tokens, and which of them are learned: what the assistant says, its tool calls, its end of turn.

With our tokens: `<|bos|>`, then each message between the start and end tokens of its role. An assistant's content is
text, or a list of parts in the order they were written:

    {"type": "text", "text": …}            learned
    {"type": "python", "text": …}          learned, between <|python_start|> and <|python_end|>
    {"type": "python_output", "text": …}   never learned: the tool wrote it; between <|output_start|> and <|output_end|>

A tokenizer with a chat template of its own is written with that (turns.py).

Tool calls in what a model wrote are read in the format of its template. With our tokens a call is the expression
between <|python_start|> and <|python_end|>. Of a template, one call is rendered to see what stands before its JSON:

    <tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>      Hermes, Qwen
    [TOOL_CALLS][{"name": …, "arguments": {…}}]                 Mistral
    {"name": …, "parameters": {…}}                              Llama 3: the whole answer is the call

Templates that do not write calls as JSON are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bessemer.config.bounded import parse_json
from bessemer.data.sources.readers import DEEPEST, deeper_than
from bessemer.data.tokenize.templates import Message
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.data.tokenize.turns import CALL_ID, FIRST, Row, Writer, continuation, end_ids, rendered_call
from bessemer.errors import InputError

ROLES = ("system", "user", "assistant")
TOOL_TOKENS = {
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}
TURN_TOKENS = tuple(f"<|{role}_{end}|>" for role in ROLES for end in ("start", "end"))

Part = tuple[str, str]  # type, text
Finished = TypeVar("Finished")


@dataclass(frozen=True, slots=True)
class Unencoded(Generic[Finished]):
    """What was read and written as text, of `size` characters. `finish` encodes it, on any thread: nearly all of its
    time is spent outside Python's global lock."""

    finish: Callable[[], Finished]
    size: int


def is_messages(value: Any) -> bool:
    """Return whether a value is a conversation: a non-empty list of mappings."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def can_chat(tokenizer: Tokenizer) -> bool:
    """Return whether it has a way to write conversations: a template, or our tokens."""
    return tokenizer.chat_template is not None or all(name in tokenizer.specials for name in TURN_TOKENS)


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of a conversation; with `generation_prompt` the assistant's turn is opened. Content is text: the name of a
    special token in it stays text. `tools`: descriptions of functions, for a template that takes them."""
    if tokenizer.chat_template is not None:
        return Writer(messages, tokenizer, tools).tokens(generation_prompt)
    if tools:
        raise _no_tools(tokenizer)
    ids, _ = _with_our_tokens(messages, tokenizer)
    return [*ids, role_token(tokenizer, "assistant", "start")] if generation_prompt else ids


def render_next(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    before: Sequence[int],
    ended: bool,
    called: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of the messages that follow what the model wrote, with its next answer opened; none of its own are written
    again.

    before: all ids so far. ended: the last of them ends the assistant's turn; otherwise it is ended first. called: it
    called a tool. With our tokens the result of a call (role `tool`) is written into the open turn of the assistant.
    """
    if tokenizer.chat_template is not None:
        given = [{"tool_call_id": CALL_ID, **one} if one.get("role") == "tool" else one for one in messages]
        return continuation(given, tokenizer, tools, before=before, called=called, ended=ended)
    ids: list[int] = []
    for message in messages:
        if message.get("role") == "tool":
            if ended:
                raise InputError("a tool's result follows a call, and the assistant's turn has ended without one.")
            start, end = (_token(tokenizer, name) for name in TOOL_TOKENS["python_output"])
            ids += [start, *tokenizer.encode(_text(message.get("content"), "content"), after=[start]), end]
            continue
        if not ended:
            ids.append(role_token(tokenizer, "assistant", "end"))
            ended = True
        ids += _with_our_tokens([message], tokenizer)[0][1:]  # without the bos
    return [*ids, role_token(tokenizer, "assistant", "start")] if ended else ids


def supervised_rows(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), first: int = 0
) -> list[Row]:
    """(ids, mask) of the rows that teach a conversation; mask 1: a token to learn. Each answer is learned in one of
    them, after the very tokens that stand before it at inference; one row is enough unless a template writes an answer
    differently once others follow. A conversation with nothing to learn is an error.

    first: learn only the answers from this message on.
    """
    return unencoded_rows(messages, tokenizer, tools, first).finish()


def unencoded_rows(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), first: int = 0
) -> Unencoded[list[Row]]:
    """`supervised_rows` whose encoding is left to `finish`; the chat template is asked now."""
    if tokenizer.chat_template is not None:
        written = Writer(messages, tokenizer, tools).written(first)
        return Unencoded(lambda: _with_answers(written.encode(), messages[:first]), written.size)
    if tools:
        raise _no_tools(tokenizer)

    def finish() -> list[Row]:
        ids, mask = _with_our_tokens(messages, tokenizer)
        before = len(_with_our_tokens(messages[:first], tokenizer)[0]) if first else 0
        return _with_answers([(ids, [0] * before + mask[before:])], messages[:first])

    return Unencoded(finish, sum(len(str(message.get("content"))) for message in messages))


def _with_answers(rows: list[Row], before: Sequence[Message]) -> list[Row]:
    """The rows. Raise InputError if they hold nothing to learn and no answer stands `before` them."""
    answered = any(message.get("role") == "assistant" for message in before)
    if not answered and not any(any(mask) for _, mask in rows):
        raise InputError("the conversation has no message of the assistant, so there is nothing to learn.")
    return rows


def supervised(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), first: int = 0
) -> Row:
    """(ids, mask) of a conversation that one row teaches. Raise InputError if it takes several."""
    return unencoded_row(messages, tokenizer, tools, first).finish()


def unencoded_row(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), first: int = 0
) -> Unencoded[Row]:
    """`supervised` whose encoding is left to `finish`."""
    unencoded = unencoded_rows(messages, tokenizer, tools, first)

    def finish() -> Row:
        rows = unencoded.finish()
        if len(rows) > 1:
            raise InputError(
                f"the chat template of {tokenizer.origin} writes earlier answers differently once others follow, so "
                f"these {len(rows)} answers have no common sequence of tokens: end the conversation with one answer."
            )
        return rows[0]

    return Unencoded(finish, unencoded.size)


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the descriptions of functions in the column `tools` of a row: a list of mappings, or that as JSON."""
    value = row.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except ValueError:
            raise InputError(f"'tools' is a text that is not JSON: {value!r:.100}.") from None
    if not value:
        return []
    if not is_messages(value):
        raise InputError(f"'tools' must be a list of descriptions of functions, or that as JSON; got {value!r:.100}.")
    return [dict(tool) for tool in value]


def _no_tools(tokenizer: Tokenizer) -> InputError:
    return InputError(f"{tokenizer.origin} has no chat template that takes tools: leave them out.")


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return what ends the assistant's turn: of a template, what ends it in trial conversations, and the eos."""
    if tokenizer.chat_template is None:
        return (role_token(tokenizer, "assistant", "end"),)
    eos = tokenizer.id_of(tokenizer.chat_template.tokens.get("eos_token", ""))
    return tuple(dict.fromkeys([*end_ids(tokenizer), *([] if eos is None else [eos])]))


SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


def conversation_of(row: Mapping[str, Any]) -> list[Message] | None:
    """Return the messages of a row; None if it has none of the columns that make a conversation.

    `messages`; `conversations` (ShareGPT's from and value); `prompt` and `completion`; `instruction`, `input` and
    `output`; `question` and `answer`.
    """
    if "messages" in row:
        return _listed(row["messages"], "messages")
    if "conversations" in row:
        return _from_sharegpt(row["conversations"])
    if "prompt" in row and "completion" in row:
        return [*_turn(row["prompt"], "user", "prompt"), *_turn(row["completion"], "assistant", "completion")]
    if "instruction" in row and "output" in row:
        asked = [_text(row["instruction"], "instruction"), _text(row.get("input") or "", "input")]
        return [
            {"role": "user", "content": "\n\n".join(filter(None, asked))},
            {"role": "assistant", "content": _text(row["output"], "output")},
        ]
    if "question" in row and "answer" in row:
        return [*_turn(row["question"], "user", "question"), *_turn(row["answer"], "assistant", "answer")]
    return None


def _from_sharegpt(turns: Any) -> list[Message]:
    """Return ShareGPT's turns, {"from": …, "value": …}, as messages."""
    if not isinstance(turns, list) or not turns:
        raise InputError("'conversations' is not a list of turns {'from': 'human' or 'gpt', 'value': text}.")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        return _listed(turns, "conversations")
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str) or "value" not in turn:
            raise InputError(f"'conversations' holds a turn without 'from' and 'value': {turn!r:.100}.")
        role = SHAREGPT_ROLES.get(turn["from"], turn["from"])
        messages.append({"role": role, "content": _text(turn["value"], "value")})
    return messages


def spoken(messages: Sequence[Message]) -> str:
    """Return all text of a conversation, which a tokenizer is trained on."""
    texts: list[Any] = []
    for message in messages:
        content = message.get("content") or ""
        listed = [{"text": content}] if isinstance(content, str) else content
        texts += [message["reasoning_content"]] if message.get("reasoning_content") else []
        texts += [part.get("text") for part in listed if isinstance(part, Mapping)]
        texts += [json.dumps(call, ensure_ascii=False, default=str) for call in message.get("tool_calls") or ()]
    return "\n".join(text for text in texts if isinstance(text, str))


def role_token(tokenizer: Tokenizer, role: str, end: str) -> int:
    """Return the id of `<|role_start|>` or `<|role_end|>`."""
    return _token(tokenizer, f"<|{role}_{end}|>")


def _with_our_tokens(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    parts: list[str | int] = [tokenizer.bos_id]
    counted = [0]  # whether each is learned
    for message in messages:
        role = message.get("role")
        if role not in ROLES or message.get("tool_calls"):
            raise InputError(
                f"a chat message is {{'role': one of {', '.join(ROLES)}, 'content': text or a list of parts}}, and a "
                f"tool call is a part of type python; got {dict(message)!r:.200}."
            )
        if message.get("reasoning_content"):
            raise InputError(
                f"{tokenizer.origin} writes turns with our tokens, which have no place for 'reasoning_content': write "
                "it into the content, or leave it out."
            )
        learned = int(role == "assistant")
        parts.append(role_token(tokenizer, role, "start"))
        counted.append(0)
        for kind, text in _parts(message):
            said: list[str | int] = [text]
            if kind in TOOL_TOKENS:
                before, after = (_token(tokenizer, name) for name in TOOL_TOKENS[kind])
                said = [before, text, after]
            parts += said
            counted += [learned if kind != "python_output" else 0] * len(said)
        parts.append(role_token(tokenizer, role, "end"))
        counted.append(learned)
    encoded = tokenizer.encode_parts(parts)
    ids = [one for part in encoded for one in part]
    return ids, [counts for part, counts in zip(encoded, counted, strict=True) for _ in part]


def _parts(message: Message) -> Iterator[Part]:
    """(type, text) of each part of a message; a plain text is one part."""
    content = message.get("content")
    if isinstance(content, str):
        yield "text", _text(content, "content")
        return
    allowed = ("text", *TOOL_TOKENS) if message.get("role") == "assistant" else ("text",)
    if not isinstance(content, Sequence):
        raise InputError(f"the content of a message is text or a list of parts; got {content!r:.200}.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in allowed:
            raise InputError(
                f"a part of the {message.get('role')}'s content is {{'type': one of {', '.join(allowed)}, 'text': "
                f"text}}; got {part!r:.200}."
            )
        yield kind, _text(part.get("text"), f"text of a {kind} part")


def _listed(value: Any, column: str) -> list[Message]:
    if not is_messages(value):
        raise InputError(f"'{column}' is a list of messages {{'role': …, 'content': …}}; got {value!r:.200}.")
    return list(value)


def _turn(value: Any, role: str, column: str) -> list[Message]:
    """Return a text as one message of the role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, column)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"'{what}' is {type(value).__name__}, not text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(f"'{what}' holds half of a surrogate pair, which is not valid Unicode.") from None
    return value


def _token(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.specials:
        raise InputError(
            f"{tokenizer.origin} has no special token {name}, so it cannot write a conversation: give prompts as "
            "text, or use a tokenizer with the chat tokens (`bessemer tokenizer train` makes one) or with a chat "
            "template."
        )
    return tokenizer.specials[name]


# --- tool calls in what a model wrote ---


PYTHON = "python"
EXPRESSION = "expression"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """One call. `error` says why it could not be read; the name is then empty."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class CallParser:
    """Reads the calls of a tokenizer's format; without tools there are none. Raise InputError if its template writes
    calls that cannot be read."""

    def __init__(self, tokenizer: Tokenizer, tools: Tools):
        self.end_id: int | None = None  # a token that ends a call and with it the completion, beside the ends of turns
        self.opening: str | None = None
        if tools and tokenizer.chat_template is not None:
            self.opening = _opening(tokenizer, tools)
        elif tools:
            self.end_id = tokenizer.specials.get(PYTHON_END)

    def parse(self, text: str, stop: int | str | None) -> tuple[ToolCall, ...]:
        """Return the calls in a completion. stop: the token that ended it."""
        if self.opening is None:
            if self.end_id is None or stop != self.end_id:
                return ()
            _, start, expression = text.rpartition(PYTHON_START)
            if not start:
                return (ToolCall("", error=f"{PYTHON_END} without {PYTHON_START}"),)
            return (ToolCall(PYTHON, {EXPRESSION: expression}),)
        if not self.opening:
            text = text.strip()
            return tuple(_calls(text)) if text[:1] in ("{", "[") else ()
        return tuple(call for part in text.split(self.opening)[1:] for call in _calls(part.strip()))


def _opening(tokenizer: Tokenizer, tools: Tools) -> str:
    """Return what the template writes before the JSON of a call; "" if nothing."""
    text = rendered_call(tokenizer, tools)
    for place, letter in enumerate(text or ""):
        if letter in "{[":
            found = _decoded(text[place:])
            if found is not None and FIRST in json.dumps(found, ensure_ascii=False):
                return text[:place].strip()
    raise InputError(
        f"the chat template of {tokenizer.origin} does not write tool calls as JSON, so they cannot be read from what "
        "the model writes: use a template that does, or an environment without tools."
    )


def _decoded(text: str) -> Any:
    """Return the JSON value that a text begins with; None if it begins with none, or with one nested too deeply."""
    try:
        value = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None
    return None if deeper_than(value, DEEPEST) else value


def _calls(text: str) -> Iterator[ToolCall]:
    value = _decoded(text)
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function", item) if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            yield ToolCall("", error="not a JSON object with a name and arguments")
            continue
        given = function.get("arguments", function.get("parameters", {}))
        arguments = _decoded(given) if isinstance(given, str) else given
        if isinstance(arguments, dict):
            yield ToolCall(name, arguments)
        else:
            yield ToolCall("", error=f"the arguments of {name} are not a JSON object")
