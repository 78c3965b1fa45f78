"""A saved configuration reads back exactly, whatever the values."""

import enum
import re
from dataclasses import dataclass
from dataclasses import field as plain_field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bessemer.config import field, gather, load_saved, resolve
from bessemer.errors import InputError


class Style(enum.Enum):
    PMD = 1
    off = 2


@dataclass(frozen=True)
class Mix:
    name: str
    rate: float = 1.0
    style: Style = Style.PMD
    extra: dict[str, int | None] = plain_field(default_factory=dict)


@dataclass
class Everything:
    flag: bool = field("flag", default=False)
    count: int = field("training/count", default=1)
    rate: float = field("training/rate", default=0.5)
    maybe: float | None = field("training/maybe", default=None)
    text: str = field("text/plain", default="")
    option: str | None = field("text/option", default="x")
    either: int | str | list[str] = field("text/either", default=1)
    kind: Literal["on", "off", "1"] = field("kind/literal", default="on")
    style: Style = field("kind/style", default=Style.PMD)
    path: Path = field("kind/path", default=Path("a"))
    words: list[str] = field("lists/words", default_factory=list)
    pair: tuple[int, float] = field("lists/pair", default=(1, 2.0))
    stages: list[list[Mix]] = field("lists/stages", default_factory=list)
    table: dict[str, list[float]] = field("maps/table", default_factory=lambda: {"a": [1.0]})
    anything: Any = field("maps/anything", default=None)


def schema_of(values):
    return gather(Everything)


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    [
        "",
        "???",
        "${",
        "${seed}",
        "\\${a}",
        "null",
        "yes",
        "1e3",
        "0x1",
        "1:30",
        "- a",
        "#",
        "a: b",
        "~",
        "\x85",
        "none ",
    ]
)
number = st.floats(allow_nan=False)
mixes = st.builds(
    Mix, text, number, st.sampled_from(Style), st.dictionaries(text, st.integers() | st.none(), max_size=2)
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
values = st.fixed_dictionaries(
    {},
    optional={
        "flag": st.booleans(),
        "training/count": st.integers(),
        "training/rate": number,
        "training/maybe": st.none() | number,
        "text/plain": text,
        "text/option": st.none() | text,
        "text/either": st.integers() | text | st.lists(text, max_size=2),
        "kind/literal": st.sampled_from(["on", "off", "1"]),
        "kind/style": st.sampled_from(Style),
        "kind/path": text.map(Path),
        "lists/words": st.lists(text, max_size=3),
        "lists/pair": st.tuples(st.integers(), number),
        "lists/stages": st.lists(st.lists(mixes, max_size=2), max_size=2),
        "maps/table": st.dictionaries(text, st.lists(number, max_size=2), max_size=2),
        "maps/anything": plain_values,
    },
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=values, why=text)
def test_the_round_trip_is_exact(tmp_path, values, why):
    config = resolve(schema_of)
    for key, value in values.items():
        config.set(key, value, why)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    again = load_saved(path, schema_of)
    assert again.values == config.values
    assert {key: type(value) for key, value in again.values.items()} == {
        key: type(value) for key, value in config.values.items()
    }
    assert again.provenance == config.provenance
    assert again.to_yaml() == config.to_yaml()


def save(tmp_path, *overrides):
    config = resolve(schema_of, {"training.count": 4}, overrides)
    config.set("training/rate", 0.25, "it fits")
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    return path


def test_the_file_holds_every_key(tmp_path):
    loaded = load_saved(save(tmp_path), schema_of)
    written = (tmp_path / "config.yaml").read_text()
    for key in loaded.values:
        assert re.search(rf"^\s*{key.split('/')[-1]}:", written, re.M), key


def test_overrides_over_a_saved_configuration(tmp_path):
    path = save(tmp_path, "text.plain=hello")
    config = load_saved(path, schema_of, ["training.count=5"])
    assert (config["training/count"], config["text/plain"]) == (5, "hello")
    assert str(config.provenance["training/count"]) == str(config.provenance["text/plain"]) == "command line"
    assert str(config.provenance["training/rate"]) == "chosen: it fits"


def test_a_saved_configuration_is_strict(tmp_path):
    path = save(tmp_path)
    path.write_text(path.read_text().replace("count: 4", "count: four"))
    with pytest.raises(InputError, match=r"training\.count' \(saved configuration .*config\.yaml"):
        load_saved(path, schema_of)
    path.write_text(path.read_text().replace("count: four", "cuont: 4"))
    with pytest.raises(InputError, match=r"did you mean 'training\.count'"):
        load_saved(path, schema_of)


def test_a_saved_configuration_is_also_a_recipe(tmp_path):
    """What was chosen for that machine is chosen again; a default stays a default."""
    path = save(tmp_path)
    config = resolve(schema_of, path)
    assert config.given() == {"training/count": 4}
    assert config["training/rate"] == 0.5
    path.write_text(path.read_text().replace("plain: ''", "plain: old default"))
    assert str(resolve(schema_of, path).provenance["text/plain"]) == f"recipe {path}"
