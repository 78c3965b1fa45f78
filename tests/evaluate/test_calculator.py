"""The calculator: right on arithmetic, deaf to everything else, and quick to refuse what would be huge."""

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.generate.calculator import NotArithmetic, calculate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16-3-4", "9"),
        ("2/2", "1"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("0.1 + 0.2", "0.3"),
        ("1,234 * 2", "2468"),
        ("-3 ** 2", "-9"),
        ("2 ** 3 ** 2", "512"),
        ("2 ** -1", "0.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("--5", "5"),
        ("100 / 3", "33.33333333"),
        ("1 / 1000000", "0.000001"),
        (".5 * 4", "2"),
    ],
)
def test_values(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "two + 2",
        "__import__('os')",
        "abs(-1)",
        "1; 2",
        "1 if 1 else 2",
        "[1]",
        "'a' * 9",
        "1 = 1",
        "1e5",
        "9 ** 9 ** 9",
        "2 ** 10000000",
        "9999999999 ** 64",
        "2 ** 0.5",
        "1 / 0",
        "0 ** -1",
        "5 % 0",
        "(1",
        "1)",
        "1 +",
        "1 2",
        "(" * 100 + "1" + ")" * 100,
        "-" * 150 + "1",
        "9" * 190,
        "1 + " * 100 + "1",
    ],
)
def test_refused(text):
    with pytest.raises(NotArithmetic):
        calculate(text)


def written(depth: int = 3) -> st.SearchStrategy[tuple[str, Fraction]]:
    """Expressions with their values, computed on the way and not by any parser."""
    leaf = st.integers(0, 999).map(lambda n: (str(n), Fraction(n)))

    def joined(inner):
        return st.tuples(inner, st.sampled_from("+-*"), inner).map(_join)

    return st.recursive(leaf, joined, max_leaves=2**depth)


def _join(parts):
    (left, a), sign, (right, b) = parts
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return f"({left} {sign} {right})", value


@given(written())
def test_it_agrees_with_a_tree_of_operations(expression):
    text, value = expression
    if len(text) <= 200:
        assert calculate(text) == str(value)


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_refused(text):
    with contextlib.suppress(NotArithmetic):
        calculate(text)


@given(st.text(alphabet="0123456789+-*/%(). ,", max_size=60))
def test_any_symbols_are_a_value_or_refused(text):
    with contextlib.suppress(NotArithmetic):
        float(calculate(text))
