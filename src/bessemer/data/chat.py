"""Chat messages as tokens: `<|bos|>`, then each message between the start and end tokens of its role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError

ROLES = ("system", "user", "assistant")


def is_messages(value: Any) -> bool:
    """A conversation: a non-empty list of mappings."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, generation_prompt: bool = True
) -> list[int]:
    """Ids of a conversation; with `generation_prompt` the assistant's turn is opened. Content is text: the name of a
    special token in it stays text."""
    ids = [tokenizer.bos_id]
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise InputError(
                f"a chat message is {{'role': one of {', '.join(ROLES)}, 'content': text}}; got {dict(message)!r:.200}."
            )
        ids += [
            role_token(tokenizer, role, "start"),
            *tokenizer.encode(content),
            role_token(tokenizer, role, "end"),
        ]
    return [*ids, role_token(tokenizer, "assistant", "start")] if generation_prompt else ids


def role_token(tokenizer: Tokenizer, role: str, end: str) -> int:
    """The id of `<|role_start|>` or `<|role_end|>`."""
    name = f"<|{role}_{end}|>"
    if name not in tokenizer.specials:
        raise InputError(
            f"{tokenizer.origin} has no special token {name}, so it cannot write a conversation: give prompts as "
            "text, or use a tokenizer with the chat tokens (`bessemer tokenizer train` makes one)."
        )
    return tokenizer.specials[name]
