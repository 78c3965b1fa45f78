"""Declaring and gathering settings: dataclasses and linen modules, inheritance, conflicts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional  # noqa: UP035

import flax.linen as nn
import pytest

from bessemer.config import field, gather
from bessemer.errors import InputError

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]


@dataclass
class Base:
    lr: float = field("optimization/lr", default=3e-4, minimum=0, help="peak rate")
    steps: list[int] = field("training/steps", default_factory=lambda: [10])


@dataclass
class Sub(Base):
    lr: float = field("optimization/lr", default=1e-3)


class Model(nn.Module):
    depth: int = field("model/depth", default=12, minimum=1)
    unrelated: Unknown | None = None

    @nn.compact
    def __call__(self, x):
        return x * self.depth


def other(annotation, default, **facts):
    return dataclasses.make_dataclass("Other", [("lr", annotation, field("optimization/lr", default=default, **facts))])


def test_dataclasses_and_modules_alike():
    schema = gather(Base, Model)
    assert list(schema.settings) == ["optimization/lr", "training/steps", "model/depth"]
    depth = schema["model.depth"]
    assert (depth.type, depth.default, depth.owner) == (int, 12, Model)
    assert schema["training/steps"].type == list[int]


@pytest.mark.parametrize("classes", [(Base, Sub), (Sub, Base), (Sub,)])
def test_a_subclass_replaces_its_base(classes):
    assert gather(*classes)["optimization/lr"].default == 1e-3


def test_a_conflict_names_both_classes_and_defaults():
    with pytest.raises(InputError, match=r"optimization\.lr.*Base .*0\.0003.*Other .*0\.1"):
        gather(Base, other(float, 0.1))
    with pytest.raises(InputError, match=r"Base .*Other"):
        gather(Base, other(float | None, 3e-4))


def test_siblings_conflict_but_equal_declarations_do_not():
    @dataclass
    class Left(Base):
        lr: float = field("optimization/lr", default=0.5)

    with pytest.raises(InputError, match=r"Sub.*Left"):
        gather(Sub, Left)
    assert gather(Base, other(float, 3e-4))["optimization/lr"].help == "peak rate"


def test_spelling_of_a_type_is_no_conflict():
    one = dataclasses.make_dataclass("One", [("x", Optional[List[int]], field("a/x", default=None))])  # noqa: UP006, UP045
    two = dataclasses.make_dataclass("Two", [("x", list[int] | None, field("a/x", default=None))])
    assert "a/x" in gather(one, two)


def test_ranges_of_two_classes_intersect():
    setting = gather(Base, other(float, 3e-4, minimum=1e-5, maximum=1.0))["optimization/lr"]
    assert (setting.range.minimum, setting.range.maximum) == (1e-5, 1.0)


def test_a_key_cannot_be_a_setting_and_a_section():
    section = dataclasses.make_dataclass("Below", [("x", int, field("optimization/lr/x", default=1))])
    with pytest.raises(InputError, match=r"Base.*section.*Below"):
        gather(Base, section)


def test_a_default_must_fit_its_own_declaration():
    with pytest.raises(InputError, match=r"default of .*Other\.lr.*at least 1"):
        gather(other(int, -1, minimum=1))
    with pytest.raises(InputError, match="nothing"):
        gather(other(int, None))


def test_a_forgotten_decorator_is_found():
    class Forgotten(Base):
        extra: int = field("training/extra", default=1)

    with pytest.raises(TypeError, match="decorate it with @dataclass"):
        gather(Forgotten)


def test_a_plain_class_has_no_settings():
    assert gather(object, Base).settings == gather(Base).settings


@pytest.mark.parametrize("key", ["", "a.b", "a//b", "/a", "extends", "title/x", "a b"])
def test_keys_have_one_form(key):
    with pytest.raises(ValueError, match="cannot be the key"):
        field(key, default=1)


def test_an_annotation_that_cannot_be_resolved_is_named():
    @dataclass
    class Hidden:
        x: Unknown = field("a/x", default=None)

    with pytest.raises(InputError, match=r"Hidden.*Unknown"):
        gather(Hidden)
