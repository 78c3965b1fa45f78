"""Recipes: names, paths, `extends`, interpolation, and what is wrong with a file."""

from dataclasses import dataclass

import pytest

from bessemer.config import field, gather, read_recipe, recipe_names, resolve
from bessemer.config import recipes as recipes_module
from bessemer.config.recipes import raw_values
from bessemer.errors import InputError


@dataclass
class Settings:
    seed: int = field("seed", default=1337)
    steps: int = field("training/steps", default=10)
    block: int = field("architecture/block_size", default=512)
    rows: int = field("training/rows", default=0)
    name: str | None = field("run/name", default=None)


def schema_of(values):
    return gather(Settings)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder of shipped recipes that does not change with the real ones."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "quickstart.yaml").write_text("title: Quick\ndescription: two minutes\ntraining: {steps: 5}\n")
    monkeypatch.setattr(recipes_module, "recipe_directory", lambda: folder)


def test_every_shipped_recipe_reads():
    for name in recipe_names():
        recipe = read_recipe(name)
        assert recipe.title, f"recipe {name} has no title"


def test_extends_inherits_and_keeps_each_origin(write, shipped):
    write("deep/base.yaml", "title: Base\nextends: quickstart\nseed: 3\n")
    write("mine.yaml", "extends: deep/base.yaml\narchitecture.block_size: 64\n")
    config = resolve(schema_of, "mine.yaml", ["run.name=x"])
    assert config.given() == {"seed": 3, "training/steps": 5, "architecture/block_size": 64, "run/name": "x"}
    assert str(config.provenance["training/steps"]) == "recipe quickstart"
    assert str(config.provenance["seed"]) == "recipe deep/base.yaml"
    assert str(config.provenance["architecture/block_size"]) == "recipe mine.yaml"
    recipe = read_recipe("mine.yaml")
    assert recipe.title == "Base"
    assert raw_values(recipe.layers) == {"training/steps": 5, "seed": 3, "architecture/block_size": 64}


def test_a_mapping_may_extend(shipped):
    assert resolve(schema_of, {"extends": "quickstart", "seed": 2})["training/steps"] == 5


def test_a_cycle_is_found(write):
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: a.yaml\n")
    with pytest.raises(InputError, match=r"cycle: a\.yaml extends b\.yaml extends a\.yaml"):
        read_recipe("a.yaml")


def test_a_file_may_have_the_name_of_the_shipped_recipe_it_extends(write, shipped):
    write("quickstart.yaml", "extends: quickstart\nseed: 1\n")
    assert raw_values(read_recipe("./quickstart.yaml").layers) == {"training/steps": 5, "seed": 1}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\ntraining: [1\nx: 2\n", ["bad.yaml', line 3", "Correct the YAML"]),
        ("seed: 1\ntraining:\n\tsteps: 1\n", ["bad.yaml', line 3, column 1"]),
        ("seed: 1\nseed: 2\n", ["bad.yaml', line 2", "duplicate key seed"]),
        ("- 1\n", ["must hold a mapping"]),
        ("3\n", ["bad.yaml"]),
        ("1: 2\n", ["the key 1 is not text"]),
        ("training: {1: 2}\n", ["the key 1 in 'training.1' is not text"]),
        ("title: 5\n", ["'title' must be text"]),
        ("extends: [a]\n", ["'extends' must be text"]),
        ("extends: nowhere.yaml\n", ["nowhere.yaml' does not exist"]),
        ("training: {stepz: 1}\n", ["did you mean 'training.steps'? (in recipe bad.yaml)"]),
        ("training: {steps: ten}\n", ["'training.steps' (recipe bad.yaml)", "'ten'"]),
        ("training: {steps: '???'}\n", ["recipe bad.yaml leaves 'training.steps' open"]),
        ("training: {steps: '${no.key}'}\n", ["training.steps", "no.key"]),
        ("training: {steps: '${'}\n", ["bad.yaml"]),
        ("training: 3\n", ["'training' is a section"]),
        ("run: {name: 5}\n", ["expected text or null, got 5", "quote it"]),
    ],
)
def test_what_is_wrong_with_a_file(write, text, parts):
    write("bad.yaml", text)
    with pytest.raises(InputError) as caught:
        resolve(schema_of, "bad.yaml")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_unreadable_files(write, tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"title: \xe9\n")
    with pytest.raises(InputError, match=r"latin\.yaml' cannot be read"):
        read_recipe("latin.yaml")
    with pytest.raises(InputError, match=r"no/such\.yaml' does not exist"):
        read_recipe("no/such.yaml")


def test_an_unknown_name_gets_the_nearest(shipped):
    with pytest.raises(InputError, match=r"unknown recipe 'quikstart'. Did you mean 'quickstart'\? Shipped:"):
        read_recipe("quikstart")


def test_interpolation_sees_overrides_and_defaults(write):
    write("i.yaml", "training: {rows: '${architecture.block_size}', steps: '${seed}'}\nrun: {name: 'r-${seed}'}\n")
    config = resolve(schema_of, "i.yaml", ["architecture.block_size=64"])
    assert (config["training/rows"], config["training/steps"], config["run/name"]) == (64, 1337, "r-1337")


def test_an_empty_section_changes_nothing(write):
    write("base.yaml", "training: {steps: 5}\n")
    write("child.yaml", "extends: base.yaml\ntraining:\narchitecture:\nrun:\n  name: null\n")
    assert resolve(schema_of, "child.yaml")["training/steps"] == 5


def test_empty_file(write):
    write("e.yaml", "# nothing\n")
    assert resolve(schema_of, "e.yaml").given() == {}
