"""Strict conversion: what each annotation accepts, and what it refuses."""

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import pytest

from bessemer.config.values import Mismatch, convert, plain


class Style(enum.Enum):
    PMD = 1
    PACKED = 2


@dataclass(frozen=True)
class Mix:
    name: str
    rate: float = 1.0
    style: Style = Style.PMD
    tags: list[str] = field(default_factory=list)

    @classmethod
    def from_string(cls, text: str) -> "Mix":
        name, _, style = text.partition(":")
        return cls(name, style=convert(style or "PMD", Style))


ACCEPTED = [
    (True, bool, True),
    (3, int, 3),
    (1e9, int, 1_000_000_000),
    (np.int64(4), int, 4),
    (3, float, 3.0),
    (np.float64(0.5), float, 0.5),
    ("x", str, "x"),
    ("a/b", Path, Path("a/b")),
    (None, int | None, None),
    ("none", Optional[str], None),  # noqa: UP045  the old spelling must work too
    ("none", Literal["none", "block"] | None, "none"),
    (1, int | float, 1),
    (1.0, int | float, 1.0),
    ("packed", Style, Style.PACKED),
    (Style.PMD, Style, Style.PMD),
    ("block", Literal["none", "block"] | list[str], "block"),
    (["a"], Literal["none", "block"] | list[str], ["a"]),
    (5, list[int], [5]),
    ([1, 2], tuple[int, ...], (1, 2)),
    ([1, "a"], tuple[int, str], (1, "a")),
    ("my.txt", list[list[Mix]], [[Mix("my.txt")]]),
    (["a", "b:packed"], list[list[Mix]], [[Mix("a"), Mix("b", style=Style.PACKED)]]),
    ([["a"], ["b"]], list[list[Mix]], [[Mix("a")], [Mix("b")]]),
    ({"name": "a", "rate": 2}, list[list[Mix]], [[Mix("a", 2.0)]]),
    (7, list[list[int]], [[7]]),
    ([], list[list[int]], []),
    ({"a": 1}, dict[str, float], {"a": 1.0}),
    ([1, {"a": (2,)}], Any, [1, {"a": [2]}]),
]
REFUSED = [
    (1, bool),
    ("true", bool),
    (True, int),
    (1.5, int),
    ("12", int),
    (None, int),
    (True, float),
    (float("nan"), float),
    (10**400, float),
    (5, str),
    (True, Literal["on", "off"]),
    ("padded", Style),
    ("x", list[int]),
    (None, list[int]),
    ([[1], 2], list[list[int]]),
    ([1], tuple[int, int]),
    (1, dict[str, int]),
    ({1: 2}, dict[str, int]),
    ({"nam": "a"}, Mix),
    ({"rate": 1.0}, Mix),
    (object(), Any),
    (1, set[int]),
]


@pytest.mark.parametrize(("value", "annotation", "expected"), ACCEPTED)
def test_accepted(value, annotation, expected):
    converted = convert(value, annotation)
    assert converted == expected
    assert type(converted) is type(expected)
    assert convert(plain(converted), annotation) == expected


@pytest.mark.parametrize(("value", "annotation"), REFUSED)
def test_refused(value, annotation):
    with pytest.raises(Mismatch):
        convert(value, annotation)


def test_a_mismatch_says_where_inside_the_value():
    with pytest.raises(Mismatch) as caught:
        convert([["a"], [{"name": "b", "rate": "fast"}]], list[list[Mix]])
    assert caught.value.where == "[1][0].rate"
    assert caught.value.problem == "expected a number, got 'fast' (str)"


def test_a_wrong_field_name_gets_the_right_one():
    with pytest.raises(Mismatch, match="did you mean 'rate'"):
        convert({"name": "a", "rat": 1}, Mix)


def test_conversion_copies_containers():
    given = [1, 2]
    assert convert(given, list[int]) is not given
