"""A conversation as tokens: what the model reads before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bessemer.data import Tokenizer
from bessemer.errors import InputError

ROLES = ("system", "user", "assistant")


def can_chat(tokenizer: Tokenizer) -> bool:
    return all(f"<|{role}_{end}|>" in tokenizer.specials for role in ROLES for end in ("start", "end"))


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation up to the answer. What looks like a special token in a message is text."""
    return turns(tokenizer, [(one["role"], tokenizer.encode(one["content"])) for one in messages])


def turns(tokenizer: Tokenizer, messages: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """bos, each message between the tokens of its role, and the token that opens the assistant's answer."""
    if not can_chat(tokenizer):
        raise InputError(
            f"{tokenizer.origin} has no tokens for the turns of a conversation (<|user_start|> and the like), "
            "which this evaluation needs."
        )
    specials, ids = tokenizer.specials, [tokenizer.bos_id]
    for role, content in messages:
        if role not in ROLES:
            raise InputError(f"a message has the role '{role}'; known: {', '.join(ROLES)}.")
        ids += [specials[f"<|{role}_start|>"], *content, specials[f"<|{role}_end|>"]]
    return [*ids, specials["<|assistant_start|>"]]
