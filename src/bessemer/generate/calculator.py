"""A calculator for what a model writes between <|python_start|> and <|python_end|>: arithmetic only.

    sum    = term (("+" | "-") term)*
    term   = signed (("*" | "/" | "//" | "%") signed)*
    signed = ("+" | "-")* power
    power  = atom ("**" signed)?
    atom   = number | "(" sum ")"

Numbers are exact fractions (0.1 + 0.2 is 0.3); 1,234 is a number too. There are no names and no calls, and
expressions that are slow or huge are refused. The value is inserted between <|output_start|> and <|output_end|>, and
the model continues.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from fractions import Fraction

from bessemer.data.tokenize.tokenizer import Tokenizer

LONGEST = 200  # characters
DEEPEST = 40  # parentheses and signs within each other
LARGEST_EXPONENT = 64
BITS = 512  # of a numerator or denominator
DIGITS = 10  # shown of a number that is not whole
CALLS = 16  # calculations in one answer

OPERATIONS = {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod}
TOKEN = re.compile(r"\s*(?:(\d[\d,]*\.?\d*|\.\d+)|(\*\*|//|[-+*/%()]))")


class NotArithmetic(ValueError):
    """The expression is not arithmetic, or too large; the message says why."""


def calculate(text: str) -> str:
    """Return the value of an expression as text: whole numbers in full, others to ten digits."""
    if len(text) > LONGEST:
        raise NotArithmetic(f"longer than {LONGEST} characters")
    return shown(_Parser(_tokens(text)).whole())


def shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    text = f"{float(value):.{DIGITS}g}"
    return f"{float(text):f}".rstrip("0").rstrip(".") if "e" in text and abs(value) < 1 else text


def _tokens(text: str) -> list[str]:
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:
            raise NotArithmetic(f"'{text[place:].strip()[:1]}' is not part of arithmetic")
        tokens.append(found.group(1) or found.group(2))
        place = found.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens, evaluating as it goes."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.place, self.depth = tokens, 0, 0

    def whole(self) -> Fraction:
        value = self.sum()
        if self.place < len(self.tokens):
            raise NotArithmetic(f"'{self.tokens[self.place]}' comes where the expression should end")
        return value

    def take(self, *wanted: str) -> str | None:
        if self.place < len(self.tokens) and self.tokens[self.place] in wanted:
            self.place += 1
            return self.tokens[self.place - 1]
        return None

    def sum(self) -> Fraction:
        value = self.term()
        while sign := self.take("+", "-"):
            other = self.term()
            value = bounded(value + other if sign == "+" else value - other)
        return value

    def term(self) -> Fraction:
        value = self.signed()
        while sign := self.take("*", "/", "//", "%"):
            other = self.signed()
            if sign != "*" and other == 0:
                raise NotArithmetic("division by zero")
            value = bounded(Fraction(OPERATIONS[sign](value, other)))
        return value

    def signed(self) -> Fraction:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotArithmetic(f"nested deeper than {DEEPEST}")
        sign = self.take("+", "-")
        value = self.power() if sign is None else self.signed() * (-1 if sign == "-" else 1)
        self.depth -= 1
        return value

    def power(self) -> Fraction:
        base = self.atom()
        if not self.take("**"):
            return base
        exponent = self.signed()
        if exponent.denominator != 1 or abs(exponent) > LARGEST_EXPONENT:
            raise NotArithmetic(f"an exponent is a whole number up to {LARGEST_EXPONENT}")
        if base == 0 and exponent < 0:
            raise NotArithmetic("division by zero")
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent) > 2 * BITS:  # refused before it is computed
            raise NotArithmetic("too large")
        return bounded(base**exponent.numerator)

    def atom(self) -> Fraction:
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise NotArithmetic("a parenthesis is not closed")
            return value
        token = self.tokens[self.place] if self.place < len(self.tokens) else ""
        if not token[:1].isdigit() and not token.startswith("."):
            raise NotArithmetic(f"a number should stand where {f'{token!r} does' if token else 'it ends'}")
        self.place += 1
        return bounded(Fraction(token.replace(",", "")))


def bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS:
        raise NotArithmetic("too large")
    return value


def call_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends an expression; None if the tokenizer has none."""
    return tokenizer.specials.get("<|python_end|>")


def output_ids(tokenizer: Tokenizer, written: Sequence[int]) -> list[int]:
    """Return the tokens of the value of the expression just closed; none if it is not arithmetic."""
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
