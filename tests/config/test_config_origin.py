"""The origin of a value: its text in config.yaml and its kind in code are the same thing."""

import pytest

from bessemer.config import Origin, OriginKind

TEXTS = {
    "default": OriginKind.DEFAULT,
    "command line": OriginKind.COMMAND_LINE,
    "python": OriginKind.PYTHON,
    "recipe quickstart": OriginKind.RECIPE,
    "inherited from runs/base": OriginKind.INHERITED,
    "saved configuration runs/a/config.yaml": OriginKind.SAVED,
    "left open by recipe pretrain": OriginKind.OPEN,
    "chosen: the depth dial": OriginKind.DEPTH_DIAL,
    "chosen: the run of recipe:quickstart": OriginKind.BASE_RUN,
    "chosen: not trained for a plan": OriginKind.UNTRAINED,
    "chosen: the depth dialed down": OriginKind.DERIVED,
    "defaults": OriginKind.OTHER,
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_an_origin_reads_back_as_its_kind(text: str) -> None:
    origin = Origin.parse(text)
    assert origin.kind is TEXTS[text] and str(origin) == text
    assert Origin.parse(str(origin)) == origin
    assert origin.is_derived == text.startswith("chosen")
    assert origin.is_caller == (text in ("command line", "python"))


def test_every_kind_has_a_text() -> None:
    assert {Origin.parse(text).kind for text in TEXTS} == set(OriginKind)
