"""The calculator in what a model writes: <|python_start|> expression <|python_end|> is answered by its value, between
<|output_start|> and <|output_end|>, and the model writes on."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.data.tokenizer import Tokenizer
from bessemer.generate.calculator import NotArithmetic, calculate

CALLS = 16
"""Calculations in one answer; whoever wants more has lost the thread."""


def call_id(tokenizer: Tokenizer) -> int | None:
    """The token that asks for the value of what stands before it; None: such a model has no calculator."""
    return tokenizer.specials.get("<|python_end|>")


def output_ids(tokenizer: Tokenizer, written: Sequence[int]) -> list[int]:
    """What the calculator says to the expression just closed; nothing where it is no arithmetic."""
    specials, before = tokenizer.specials, list(written[:-1])
    names = ("<|python_start|>", "<|output_start|>", "<|output_end|>")
    if not all(name in specials for name in names) or specials[names[0]] not in before:
        return []
    start, opened, closed = (specials[name] for name in names)
    begin = len(before) - before[::-1].index(start)  # just after the last opening
    try:
        value = calculate(tokenizer.decode(before[begin:]))
    except NotArithmetic:
        return []
    return [opened, *tokenizer.encode(value, after=[opened]), closed]
