"""Chat messages as tokens: `<|bos|>`, then each message between the start and end tokens of its role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError

ROLES = ("system", "user", "assistant")
TURN_TOKENS = tuple(f"<|{role}_{end}|>" for role in ROLES for end in ("start", "end"))


def is_messages(value: Any) -> bool:
    """A conversation: a non-empty list of mappings."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def can_chat(tokenizer: Tokenizer) -> bool:
    """Whether it has a way to write conversations."""
    return all(name in tokenizer.specials for name in TURN_TOKENS)


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, generation_prompt: bool = True
) -> list[int]:
    """Ids of a conversation; with `generation_prompt` the assistant's turn is opened. Content is text: the name of a
    special token in it stays text."""
    ids, _ = supervised(messages, tokenizer)
    return [*ids, role_token(tokenizer, "assistant", "start")] if generation_prompt else ids


def supervised(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(ids, mask) of a whole conversation; mask 1: a token to learn, which is what the assistant says and its end."""
    ids, mask = [tokenizer.bos_id], [0]
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise InputError(
                f"a chat message is {{'role': one of {', '.join(ROLES)}, 'content': text}}; got {dict(message)!r:.200}."
            )
        said = [*tokenizer.encode(content), role_token(tokenizer, role, "end")]
        ids += [role_token(tokenizer, role, "start"), *said]
        mask += [0, *([int(role == "assistant")] * len(said))]
    return ids, mask


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends the assistant's turn: at least one token."""
    return (role_token(tokenizer, "assistant", "end"),)


def role_token(tokenizer: Tokenizer, role: str, end: str) -> int:
    """The id of `<|role_start|>` or `<|role_end|>`."""
    name = f"<|{role}_{end}|>"
    if name not in tokenizer.specials:
        raise InputError(
            f"{tokenizer.origin} has no special token {name}, so it cannot write a conversation: give prompts as "
            "text, or use a tokenizer with the chat tokens (`bessemer tokenizer train` makes one)."
        )
    return tokenizer.specials[name]
