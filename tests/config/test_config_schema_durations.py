"""JSON Schema of the settings; durations; settings of parts that were not selected."""

import enum
import json
from dataclasses import dataclass
from typing import Literal

import pytest

from bessemer.config import field, gather, parse_duration
from bessemer.errors import InputError
from bessemer.registry import Registry, explain_unselected


class Style(enum.Enum):
    PMD = 1
    PACKED = 2


@dataclass(frozen=True)
class Mix:
    name: str
    style: Style = Style.PMD

    @classmethod
    def from_string(cls, text: str) -> "Mix":
        return cls(text)


@dataclass
class Settings:
    seed: int = field("seed", default=1, minimum=0, help="randomness")
    lr: float | None = field("optimization/lr", default=None, maximum=1)
    kind: Literal["a", "b"] = field("optimization/kl/kind", default="a")
    bar: str = field("logging/bar", default="rich", choices=("rich", "none"))
    dataset: list[Mix] = field("training/dataset", default_factory=lambda: [Mix("x")])
    weights: dict[str, int] = field("training/weights", default_factory=dict)
    pair: tuple[int, str] = field("training/pair", default=(1, "a"))


def test_json_schema():
    schema = gather(Settings).json_schema()
    json.dumps(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert {"title", "description", "extends"} <= set(properties)
    assert properties["seed"] == {"type": "integer", "minimum": 0, "description": "randomness", "default": 1}
    section = properties["optimization"]
    assert section["additionalProperties"] is False
    assert section["properties"]["lr"] == {
        "anyOf": [{"type": "number", "maximum": 1}, {"type": "null"}],
        "default": None,
    }
    assert section["properties"]["kl"]["properties"]["kind"]["enum"] == ["a", "b"]
    assert properties["logging"]["properties"]["bar"]["enum"] == ["rich", "none"]
    training = properties["training"]["properties"]
    array, text, mapping = training["dataset"]["anyOf"]
    assert array["type"] == "array" and text == {"type": "string"}
    assert mapping["required"] == ["name"] and mapping["properties"]["style"]["enum"] == ["PMD", "PACKED"]
    assert training["dataset"]["default"] == [{"name": "x", "style": "PMD"}]
    assert training["weights"]["additionalProperties"] == {"type": "integer"}
    assert training["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h30m", 9000),
        ("1d", 86400),
        ("90", 90),
        (90, 90),
        (1.5, 1.5),
        ("1d2h3m4s", 93784),
        ("1.5h", 5400),
        (" 2H ", 7200),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["2h30", "", "h", "30m2h", "2h2h", "1:30", "-5", "0", "2 h", "1w", "nan", "2h 30m", True, 0]
)
def test_what_is_no_duration(text):
    with pytest.raises(InputError, match="duration"):
        parse_duration(text)


def test_a_setting_of_an_unselected_part_is_explained():
    @dataclass
    class MuonSettings:
        rate: float = field("optimization/matrix_lr", default=0.02)

    @dataclass
    class Llama:
        theta: float = field("model/theta", default=1e4)

    optimizers, models = Registry("optimizer"), Registry("model family")
    optimizers.register("adamw")(object)
    optimizers.register("muon", settings=(MuonSettings,))(print)
    models.register("llama")(Llama)
    tables = {"optimization/name": optimizers, "model/family": models}
    explained = explain_unselected("optimization/matrix_lr", tables)
    assert explained == "is a setting of optimizer 'muon'; add optimization.name=muon"
    assert explain_unselected("model/theta", tables) == "is a setting of model family 'llama'; add model.family=llama"
    assert explain_unselected("model/no", tables) is None
