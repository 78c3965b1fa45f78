"""Which numbers settings take: a value that means nothing is refused where it is given, with what would do."""

from __future__ import annotations

import json
import typing
from dataclasses import make_dataclass

import pytest

from bessemer.config import Setting, declared, field, gather, resolve
from bessemer.config.values import Range
from bessemer.errors import InputError
from bessemer.registry import SELECTORS, settings_classes
from bessemer.training.setup.schema import schema_of

ELSEWHERE = {
    "architecture/loss_chunks": "a number or auto: `check_switches`",
    "training/time_limit": "a number or 2h30m: `parse_duration`",
}
"""Settings that may be numbers and have no range of their own, and what looks at them."""


def all_settings() -> dict[tuple[str, str], Setting]:
    """(key, owner) → setting: of every part that can be selected, and of what every run has; not of other tests'."""
    classes = {cls for table in SELECTORS.values() for entry in table for cls in settings_classes(entry)}
    ours = [cls for cls in classes if cls.__module__.startswith("bessemer.")]
    found = [setting for cls in ours for setting in declared(cls).values()]
    found += resolve(schema_of, {}, {}).schema.settings.values()
    return {(setting.key, setting.owner_name): setting for setting in found}


def is_numeric(annotation: typing.Any) -> bool:
    return annotation in (int, float) or any(map(is_numeric, typing.get_args(annotation)))


def test_every_numeric_setting_says_which_numbers_it_takes() -> None:
    numeric = {
        place: setting
        for place, setting in all_settings().items()
        if is_numeric(setting.type) and setting.choices is None
    }
    assert len(numeric) > 100  # the walk itself works
    floorless = {
        key for (key, _), setting in numeric.items() if setting.range.minimum is None and setting.range.above is None
    }
    assert floorless == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("training.ema=1", "at least 0 and below 1, got 1"),
        ("training.ema=-0.1", "at least 0 and below 1"),
        ("logging.checkpoint_interval=-5", "at least -1, got -5.* 0 or -1: at the end only"),
        ("logging.validation_interval=-2", "at least -1"),
        ("logging.report_interval=-2", "at least -1"),
        ("logging.preview_interval=-2", "at least -1"),
        ("eval.core_interval=-2", "at least -1"),
        ("model.heads=0", "at least 1, or -1, got 0.* -1 = width / head_dim"),
        ("model.kv_heads=-3", "at least 1, or -1"),
        ("training.batch_tokens=0", "at least 1, or -1"),
        ("training.per_device_batch_size=-2", "at least 1, or -1"),
        ("training.ratio=-2", "above 0, or -1, got -2"),
        ("training.flops=-1e18", "above 0"),
        ("training.epochs=0", "above 0"),
        ("training.tokens=[100,-5]", "at least 1"),
        ("topology.fsdp=0", "at least 1, or -1"),
        ("optimization.beta2=1", "at least 0.0 and below 1.0"),
        ("architecture.dropout=1", "below 1.0"),
        ("architecture.rotary_base=.inf", "64 bits"),
        ("optimization.lr=.nan", "a number"),
    ],
)
def test_a_number_that_means_nothing_is_refused(setting: str, wanted: str) -> None:
    with pytest.raises(InputError, match=f"(?s){setting.split('=')[0]}.*{wanted}"):
        resolve(schema_of, {}, [setting])


def test_numbers_that_stand_for_a_word_are_taken_beside_the_range() -> None:
    for setting in ("model.heads=-1", "training.ratio=-1", "logging.checkpoint_interval=-1", "topology.data=-1"):
        resolve(schema_of, {}, [setting])


def test_a_range_in_words_and_in_json_schema() -> None:
    limits = Range(minimum=0, below=1, also=(-1,))
    assert limits.describe() == "at least 0 and below 1, or -1"
    assert [limits.holds(number) for number in (-1, -0.5, 0, 0.5, 1)] == [True, False, True, True, False]
    owner = make_dataclass("Owner", [("x", float, field("a/x", default=0.5, minimum=0, below=1, also=(-1,)))])
    schema = gather(owner).json_schema()["properties"]["a"]["properties"]["x"]
    number, word = schema["anyOf"]
    assert number == {"type": "number", "minimum": 0, "exclusiveMaximum": 1} and word == {"enum": [-1]}
    json.dumps(schema)


def test_ranges_intersect() -> None:
    derived, counted = Range(minimum=1, also=(-1, 0)), Range(minimum=-1, above=-1.5, maximum=8)
    assert derived.intersect(counted) == Range(minimum=1, above=-1.5, maximum=8, also=(-1, 0))
    assert derived.intersect(Range(minimum=0)) == Range(minimum=1, also=(0,))
    assert derived.intersect(Range()) == derived
