"""The recipe of a run is read from the origins of its settings, also where one recipe extends another."""

from __future__ import annotations

import pytest

from bessemer.report.summary import recipe_of


@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        (["default", "command line"], None),
        (["recipe toy", "command line"], "toy"),
        (["recipe toy-start", "recipe sft"], "toy-start"),
        (["recipe sft", "recipe toy-start"], "toy-start"),
        (["recipe kl", "recipe continual", "recipe kl"], "continual"),
        (["recipe mine.yaml", "recipe sft"], "mine.yaml"),
        ([None, 3, "recipe "], ""),
    ],
)
def test_the_recipe_that_was_given_wins_over_those_it_extends(origins: list[object], expected: str | None) -> None:
    assert recipe_of({str(number): origin for number, origin in enumerate(origins)}) == expected
