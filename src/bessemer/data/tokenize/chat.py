"""Chat messages as tokens, and which of them are learnt: what the assistant says, its tool calls, its end of turn.

With our tokens: `<|bos|>`, then each message between the start and end tokens of its role. An assistant's content is
text, or a list of parts in the order they were written:

    {"type": "text", "text": …}            learnt
    {"type": "python", "text": …}          learnt, between <|python_start|> and <|python_end|>
    {"type": "python_output", "text": …}   never learnt: the tool wrote it; between <|output_start|> and <|output_end|>

A tokenizer that brings a chat template of its own is written with that (data/tokenize/template_chat.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bessemer.data.tokenize import template_chat
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError

ROLES = ("system", "user", "assistant")
TOOL_TOKENS = {
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}
TURN_TOKENS = tuple(f"<|{role}_{end}|>" for role in ROLES for end in ("start", "end"))

Message = Mapping[str, Any]
Part = tuple[str, str]  # type, text


def is_messages(value: Any) -> bool:
    """A conversation: a non-empty list of mappings."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def can_chat(tokenizer: Tokenizer) -> bool:
    """Whether it has a way to write conversations: a template, or our tokens."""
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
        return template_chat.render(messages, tokenizer, generation_prompt, tools)
    if tools:
        raise InputError(f"{tokenizer.origin} has no chat template that takes tools: leave them out.")
    ids, _ = _with_our_tokens(messages, tokenizer)
    return [*ids, role_token(tokenizer, "assistant", "start")] if generation_prompt else ids


def supervised(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(ids, mask) of a whole conversation; mask 1: a token to learn. A conversation with nothing to learn is an
    error."""
    write = template_chat.supervised if tokenizer.chat_template is not None else _with_our_tokens
    ids, mask = write(messages, tokenizer)
    if not any(mask):
        raise InputError("the conversation has no message of the assistant, so there is nothing to learn.")
    return ids, mask


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends the assistant's turn: at least one token. They come with the template."""
    if tokenizer.chat_template is not None:
        return template_chat.stop_ids(tokenizer)
    return (role_token(tokenizer, "assistant", "end"),)


def conversation_of(row: Mapping[str, Any]) -> list[Message] | None:
    """The messages of a row of `messages`, `prompt` and `completion`, or `instruction`, `input` and `output`; None:
    no such columns."""
    if "messages" in row:
        return _listed(row["messages"], "messages")
    if "prompt" in row and "completion" in row:
        return [*_turn(row["prompt"], "user", "prompt"), *_turn(row["completion"], "assistant", "completion")]
    if "instruction" in row and "output" in row:
        asked = [_text(row["instruction"], "instruction"), _text(row.get("input") or "", "input")]
        return [
            {"role": "user", "content": "\n\n".join(filter(None, asked))},
            {"role": "assistant", "content": _text(row["output"], "output")},
        ]
    return None


def spoken(messages: Sequence[Message]) -> str:
    """Everything that is said in a conversation, as one text: what a tokenizer is trained on."""
    contents = [message.get("content") or "" for message in messages]
    listed = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    texts = [part.get("text") for parts in listed for part in parts if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def role_token(tokenizer: Tokenizer, role: str, end: str) -> int:
    """The id of `<|role_start|>` or `<|role_end|>`."""
    return _token(tokenizer, f"<|{role}_{end}|>")


def _with_our_tokens(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    ids, mask = [tokenizer.bos_id], [0]
    for message in messages:
        role = message.get("role")
        if role not in ROLES or message.get("tool_calls"):
            raise InputError(
                f"a chat message is {{'role': one of {', '.join(ROLES)}, 'content': text or a list of parts}}, and a "
                f"tool call is a part of type python; got {dict(message)!r:.200}."
            )
        learnt = int(role == "assistant")
        ids.append(role_token(tokenizer, role, "start"))
        mask.append(0)
        for kind, text in _parts(message):
            if kind in TOOL_TOKENS:
                before, after = (_token(tokenizer, name) for name in TOOL_TOKENS[kind])
                said = [before, *tokenizer.encode(text, after=[before]), after]
            else:
                said = tokenizer.encode(text, after=ids)
            ids += said
            mask += [learnt if kind != "python_output" else 0] * len(said)
        ids.append(role_token(tokenizer, role, "end"))
        mask.append(learnt)
    return ids, mask


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
    """A text is one message of the role; messages are themselves."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, column)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"'{what}' is {type(value).__name__}, not text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(f"'{what}' holds half of a surrogate pair, which is no valid Unicode.") from None
    return value


def _token(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.specials:
        raise InputError(
            f"{tokenizer.origin} has no special token {name}, so it cannot write a conversation: give prompts as "
            "text, or use a tokenizer with the chat tokens (`bessemer tokenizer train` makes one) or with a chat "
            "template."
        )
    return tokenizer.specials[name]
