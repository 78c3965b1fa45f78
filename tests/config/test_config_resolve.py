"""Resolving: order, provenance, overrides, and errors that say what, where and what to do."""

import enum
from dataclasses import dataclass
from typing import Literal

import pytest

from bessemer.config import PYTHON, field, gather, resolve
from bessemer.errors import InputError


class Style(enum.Enum):
    PMD = 1
    PACKED = 2


@dataclass(frozen=True)
class Mix:
    name: str
    rate: float = 1.0
    style: Style = Style.PMD

    @classmethod
    def from_string(cls, text: str) -> "Mix":
        return cls(text)


@dataclass
class Settings:
    seed: int = field("seed", default=1337, minimum=0)
    init: str | None = field("init", default=None)
    batch_size: int = field("training/batch_size", default=512, minimum=1, help="sequences per optimizer step")
    tokens: list[int] | None = field("training/tokens", default=None, minimum=1)
    dataset: list[list[Mix]] = field("training/dataset", default_factory=list)
    validate: bool = field("training/validation", default=True)
    lr: float = field("optimization/lr", default=3e-4, minimum=0, maximum=10)
    beta: float = field("optimization/kl/beta", default=0.1)
    remat: Literal["off", "block"] = field("architecture/remat", default="off")
    progress: str = field("logging/progress", default="auto", choices=("auto", "rich", "none"))
    weights: dict[str, float] = field("reward/weights", default_factory=lambda: {"length": 1.0})


def schema_of(values):
    return gather(Settings)


def run(*overrides, recipe=None, **kw):
    return resolve(schema_of, recipe, overrides, **kw)


def error(*overrides, recipe=None):
    with pytest.raises(InputError) as caught:
        run(*overrides, recipe=recipe)
    return str(caught.value)


def test_defaults_recipe_command_line_in_this_order():
    config = run("training.batch_size=8", recipe={"training": {"batch_size": 4, "validation": False}, "seed": 1})
    assert config["training/batch_size"] == config["training.batch_size"] == 8
    assert config["training/validation"] is False
    assert str(config.provenance["training/batch_size"]) == "command line"
    assert str(config.provenance["training/validation"]) == "python"
    assert str(config.provenance["optimization/lr"]) == "default"
    assert config.is_set("seed") and not config.is_set("optimization.lr")
    assert config.given() == {"seed": 1, "training/batch_size": 8, "training/validation": False}
    assert config.get("no/such", 5) == 5


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("training.batch_size=1e3", "training/batch_size", 1000),
        ("training/batch_size=1_000", "training/batch_size", 1000),
        ("optimization.lr=1e-3", "optimization/lr", 1e-3),
        ("optimization.kl.beta=2", "optimization/kl/beta", 2.0),
        ("training.tokens=5e6", "training/tokens", [5_000_000]),
        ("training.tokens=[1e6, 2e6]", "training/tokens", [1_000_000, 2_000_000]),
        ("training.validation=false", "training/validation", False),
        ("training.dataset=*.txt", "training/dataset", [[Mix("*.txt")]]),
        ("training.dataset=[{name: *.txt}]", "training/dataset", [[Mix("*.txt")]]),
        ("training.dataset=[*/a.txt,*.txt]", "training/dataset", [[Mix("*/a.txt"), Mix("*.txt")]]),
        ("training.dataset=my #1.txt", "training/dataset", [[Mix("my #1.txt")]]),
        ("training.dataset={name: a, style: packed}", "training/dataset", [[Mix("a", style=Style.PACKED)]]),
        ("init=2024", "init", "2024"),
        ("init=on", "init", "on"),
        ("init=1:30", "init", "1:30"),
        ("init=a: b", "init", "a: b"),
        ("init=@x", "init", "@x"),
        ("init=a=b", "init", "a=b"),
        ("init='7'", "init", "7"),
        ("init=null", "init", None),
        ("init=none", "init", None),
        ("init=", "init", None),
        ("architecture.remat=off", "architecture/remat", "off"),
        ("reward.weights.math=2", "reward/weights", {"math": 2.0}),
        ("optimization.lr=${optimization.kl.beta}", "optimization/lr", 0.1),
    ],
)
def test_values_from_the_command_line(word, key, value):
    config = run(word)
    assert config[key] == value
    assert type(config[key]) is type(value)


def test_a_misspelt_key_gets_the_nearest():
    assert error("optimizaton.lr=1").startswith("unknown setting 'optimizaton.lr': write optimization.lr=1.")
    assert error("optimizaton.kl.beta=1").endswith("did you mean 'optimization.kl.beta'?")
    assert "write training.batch_size=3" in error("batch_size=3")
    assert "did you mean 'optimization.kl.beta'?" in error("optimization.beta=3")
    assert error("zzz=3") == "unknown setting 'zzz'"


def test_all_unknown_keys_at_once_and_where_they_are():
    message = error("sed=1", recipe={"training": {"batchsize": 2}})
    assert "'sed'; did you mean 'seed'?" in message
    assert "'training.batchsize'; did you mean 'training.batch_size'? (in python)" in message


def test_a_section_is_not_a_setting():
    assert error("training=5") == "'training' is a section, not a setting: write training.NAME=value"


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("training.batch_size=many", ["'training.batch_size' (command line)", "an integer", "'many'", "sequences per"]),
        ("training.batch_size=1.5", ["an integer", "1.5"]),
        ("training.batch_size=010", ["an integer", "'010'"]),
        ("training.batch_size=0", ["at least 1", "got 0"]),
        ("training.tokens=[5, 0]", ["training.tokens", "at least 1"]),
        ("training.batch_size.x=0", ["an integer", "{'x': 0}"]),
        ("training.validation=1", ["true or false", "1"]),
        ("optimization.lr=11", ["at most 10"]),
        ("optimization.lr=fast", ["a number", "'fast'"]),
        ("architecture.remat=blok", ["'off', 'block'", "'blok'"]),
        ("logging.progress=reich", ["auto, rich, none", "did you mean 'rich'?"]),
        ("training.dataset={nam: a}", ["training.dataset[0][0]", "no field 'nam'", "'name'"]),
        ("training.tokens=[1", ["training.tokens", "cannot be read", "[1"]),
        ("init=${no.such}", ["'init'", "no.such"]),
        ("training.batch_size", ["key=value"]),
        ("=3", ["key=value"]),
        ("init=???", ["leaves 'init' open"]),
    ],
)
def test_bad_values(word, parts):
    message = error(word)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_given_twice():
    assert run("seed=1", "seed=1")["seed"] == 1
    message = error("training.batch_size=1", "training/batch_size=2")
    assert "training.batch_size=1" in message and "training.batch_size=2" in message
    assert "given twice" in error(recipe={"training.batch_size": 1, "training": {"batch_size": 2}})
    assert "settings below" in error("reward=1", "reward.weights.a=1")


def test_mappings_merge_and_replace_the_default():
    config = run("reward.weights.b=2", recipe={"reward": {"weights": {"a": 1}}})
    assert config["reward/weights"] == {"a": 1.0, "b": 2.0}
    assert run()["reward/weights"] == {"length": 1.0}


def test_what_is_no_mapping_is_replaced_as_a_whole():
    recipe = {"training": {"dataset": {"name": "a", "rate": 2}}}
    assert run("training.dataset={name: b}", recipe=recipe)["training/dataset"] == [[Mix("b")]]
    assert run("training.dataset=[b, c]", recipe=recipe)["training/dataset"] == [[Mix("b"), Mix("c")]]
    recipe = {"training": {"dataset": ["a", "b"]}}
    assert run("training.dataset={name: c}", recipe=recipe)["training/dataset"] == [[Mix("c")]]
    assert run("reward.weights={}", recipe={"reward.weights": {"a": 1}})["reward/weights"] == {}


def test_overrides_as_a_mapping_take_python_values():
    config = resolve(
        schema_of, None, {"training.dataset": [Mix("a")], "training/tokens": 5, "init": "${x}"}, source=PYTHON
    )
    assert config["training/dataset"] == [[Mix("a")]]
    assert config["training/tokens"] == [5]
    assert config["init"] == "${x}"
    assert str(config.provenance["training/dataset"]) == "python"
    with pytest.raises(InputError, match="not a value that a setting can hold"):
        resolve(schema_of, None, {"init": object()}, source=PYTHON)


def test_set_is_checked_and_remembers_why():
    config = run()
    config.set("training.batch_size", 64, "largest that fits")
    assert config["training/batch_size"] == 64
    assert str(config.provenance["training/batch_size"]) == "chosen: largest that fits"
    assert config.is_set("training/batch_size")
    with pytest.raises(InputError, match="at least 1"):
        config.set("training/batch_size", 0, "why not")
    with pytest.raises(InputError, match=r"did you mean 'training\.batch_size'"):
        config["training/batchsize"]


def test_a_frozen_configuration_refuses_changes_and_replace_returns_a_changed_copy():
    config = run("training.batch_size=8").freeze()
    with pytest.raises(TypeError, match=r"training\.batch_size cannot be set: the configuration is frozen"):
        config.set("training/batch_size", 4, "why not")
    with pytest.raises(TypeError):
        config.values["training/batch_size"] = 4
    with pytest.raises(TypeError):
        config.provenance["training/batch_size"] = PYTHON
    config.set("training/batch_size", 8, "the same")
    assert config["training/batch_size"] == 8 and not config.provenance["training/batch_size"].is_derived
    other = config.replace({"training.batch_size": 4}, "it fits")
    assert (config["training/batch_size"], other["training/batch_size"]) == (8, 4)
    assert str(other.provenance["training/batch_size"]) == "chosen: it fits"
    assert config.replace({"training/batch_size": 2}).provenance == config.provenance
    with pytest.raises(TypeError):
        other.set("training/batch_size", 3, "a copy of a frozen one is frozen")
    with pytest.raises(InputError, match="at least 1"):
        config.replace({"training/batch_size": 0})
    loose = config.copy()
    loose.set("training/batch_size", 3, "a copy")
    assert config["training/batch_size"] == 8


def test_two_configurations_share_no_default():
    first, second = run(), run()
    first["reward/weights"]["x"] = 1.0
    assert second["reward/weights"] == {"length": 1.0}


def test_a_setting_without_default_must_be_given():
    @dataclass
    class Needy:
        path: str = field("data/path", help="where the text is")

    with pytest.raises(InputError, match=r"'data.path' has no default.*where the text is"):
        resolve(lambda values: gather(Needy))
    assert resolve(lambda values: gather(Needy), None, ["data.path=x"])["data/path"] == "x"


def test_selectors_decide_the_schema():
    @dataclass
    class Muon:
        rate: float = field("optimization/matrix_lr", default=0.02)

    seen = []

    def select(values):
        seen.append(dict(values))
        explain = {"optimization/matrix_lr": "is a setting of optimizer 'muon'; add seed=7"}.get
        return gather(Settings, *([Muon] if values.get("seed") == 7 else []), explain=explain)

    assert resolve(select, {"seed": 7}, ["optimization.matrix_lr=1"])["optimization/matrix_lr"] == 1.0
    assert seen[0] == {"seed": 7, "optimization/matrix_lr": 1}
    with pytest.raises(InputError, match=r"'optimization.matrix_lr': it is a setting of optimizer 'muon'; add seed=7"):
        resolve(select, None, ["optimization.matrix_lr=1"])
