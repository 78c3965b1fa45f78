"""A part selected over a recipe's: what the recipe said about the other part goes, and is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bessemer.config import field, gather, resolve
from bessemer.errors import InputError


@dataclass
class Base:
    family: str = field("model/family", default="one")


@dataclass
class One:
    width: int = field("model/width", default=1)
    window: str = field("model/window", default="L")


@dataclass
class Two:
    width: int = field("model/width", default=2)


def schema_of(values):
    return gather(Base, {"one": One, "two": Two}[values.get("model/family", "one")])


RECIPE = {"model": {"family": "one", "width": 7, "window": "S"}}


def test_settings_of_the_replaced_part_are_left_out_and_named():
    config = resolve(schema_of, RECIPE, ["model.family=two"])
    assert config.tree() == {"model": {"family": "two", "width": 7}}
    assert config.notes == ["python: model.window left out, because another part was selected"]


def test_nothing_is_said_when_nothing_is_replaced():
    config = resolve(schema_of, RECIPE, ["model.width=3"])
    assert config.notes == [] and config["model/window"] == "S"


def test_what_was_never_a_setting_is_still_refused():
    with pytest.raises(InputError, match=r"model.windows.*in python"):
        resolve(schema_of, {"model": {"family": "one", "windows": "S"}}, ["model.family=two"])
    with pytest.raises(InputError, match=r"model.window"):
        resolve(schema_of, RECIPE, ["model.family=two", "model.window=S"])


def test_an_open_setting_can_be_shown_but_not_run():
    recipe = {"model": {"width": "???"}}
    config = resolve(schema_of, recipe, allow_open=True)
    assert config["model/width"] == "???" and str(config.provenance["model/width"]) == "left open by python"
    with pytest.raises(InputError, match=r"leaves 'model.width' open"):
        resolve(schema_of, recipe)
