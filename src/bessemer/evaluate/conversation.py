"""A conversation as tokens: what the model reads before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bessemer.data import Tokenizer
from bessemer.data.chat import can_chat, render
from bessemer.errors import InputError


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation up to the answer. What looks like a special token in a message is text."""
    if not can_chat(tokenizer):
        raise InputError(
            f"{tokenizer.origin} has no tokens for the turns of a conversation (<|user_start|> and the like) and no "
            "chat template, which this evaluation needs."
        )
    return render(messages, tokenizer)
