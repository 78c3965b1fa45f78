"""A conversation as tokens: what the model reads before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bessemer.data import Tokenizer
from bessemer.errors import InputError

ROLES = ("system", "user", "assistant")


def can_chat(tokenizer: Tokenizer) -> bool:
    return all(f"<|{role}_{end}|>" in tokenizer.specials for role in ROLES for end in ("start", "end"))


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """bos, each message between the tokens of its role, and the token that opens the assistant's answer.

    What looks like a special token in a message is text.
    """
    if not can_chat(tokenizer):
        raise InputError(
            f"{tokenizer.origin} has no tokens for the turns of a conversation (<|user_start|> and the like), "
            "which this evaluation needs."
        )
    specials, ids = tokenizer.specials, [tokenizer.bos_id]
    for message in messages:
        role = message["role"]
        if role not in ROLES:
            raise InputError(f"a message has the role '{role}'; known: {', '.join(ROLES)}.")
        ids += [specials[f"<|{role}_start|>"], *tokenizer.encode(message["content"])]
        ids.append(specials[f"<|{role}_end|>"])
    return [*ids, specials["<|assistant_start|>"]]
