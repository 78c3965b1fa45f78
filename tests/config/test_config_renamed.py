"""Settings with a new name: the old spelling works wherever settings are read, and the new one is shown and saved."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from click.testing import CliRunner

from bessemer.cli.config import command
from bessemer.config import is_shipped_recipe, recipe_names, resolve
from bessemer.config.aliases import RENAMED, RENAMED_RECIPES, RENAMED_VALUES
from bessemer.config.recipes import Origin, note_new_name, read_recipe, saved_tree
from bessemer.config.resolve import Config, load_saved
from bessemer.errors import InputError
from bessemer.job.trust import requests_of
from bessemer.models.lora import LoraSettings, split_of
from bessemer.report.summary import recipe_of
from bessemer.training.persistence.checkpoints import Branch, recorded_changes
from bessemer.training.setup.horizon import is_shipped
from bessemer.training.setup.init_recipe import check_circle
from bessemer.training.setup.schema import schema_of

GRPO = ["training.dataset=DIR"]


def grpo(*words: str) -> Config:
    return resolve(schema_of, "grpo", [*GRPO, *words], allow_open=True)


def test_old_names_are_gone_from_the_schema_and_new_ones_are_in_it() -> None:
    settings = {*grpo().schema.settings, *resolve(schema_of, "distill", allow_open=True).schema.settings}
    assert not set(RENAMED) & settings and set(RENAMED.values()) <= settings
    assert set(RENAMED_VALUES) <= settings


def test_an_old_name_on_the_command_line_in_a_recipe_and_in_python_sets_the_new_one(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: grpo\ngrpo: {normalisation: sequence}\nlora.rank_stabilised: true\n")
    given = {"grpo.normalisation": "sequence", "lora": {"rank_stabilised": True}}
    for config in (
        grpo("grpo.normalisation=sequence", "lora.rank_stabilised=true"),
        resolve(schema_of, recipe, GRPO, allow_open=True),
        resolve(schema_of, "grpo", {**given, "training.dataset": "DIR"}, allow_open=True),
    ):
        assert config["grpo/normalization"] == config["grpo.normalisation"] == "sequence"
        assert config["lora.rank_stabilized"] is True and "lora/rank_stabilised" in config
        written = config.to_yaml()
        assert "normalization: sequence" in written and "normalisation" not in written and "stabilised" not in written


def test_an_old_value_means_the_new_one() -> None:
    for given in (["distill.tail=renormalise"], {"distill": {"tail": "renormalise"}}):
        assert resolve(schema_of, "distill", given, allow_open=True)["distill/tail"] == "renormalize"


def test_both_names_with_different_values_are_an_error() -> None:
    with pytest.raises(InputError, match=r"'grpo\.normalization' is given twice"):
        grpo("grpo.normalization=token", "grpo.normalisation=sequence")
    with pytest.raises(InputError, match=r"'grpo\.normalization' is given twice"):
        resolve(schema_of, {"grpo": {"normalisation": "token", "normalization": "fixed"}})


def test_a_configuration_saved_with_old_names_loads_with_its_origins(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    new = grpo("grpo.normalization=sequence", "lora.rank_stabilized=true", "init=BASE")
    path.write_text(new.to_yaml().replace("normalization", "normalisation").replace("stabilized", "stabilised"))
    again = load_saved(path, schema_of)
    assert again.values == new.values and again.provenance == new.provenance
    assert saved_tree(path)["lora"]["rank_stabilized"] is True


def test_saved_adapters_with_the_old_name_keep_their_scale() -> None:
    boxed = {"up": jax.ShapeDtypeStruct((8, 8), "float32")}
    split = split_of({"lora/rank": 4, "lora/alpha": 8.0, "lora/rank_stabilised": True}, boxed)
    assert split.lora == LoraSettings(rank=4, alpha=8.0, rank_stabilized=True) and split.lora.scale == 4.0


def test_config_shows_the_new_name() -> None:
    shown = CliRunner().invoke(command, ["grpo", "lora.rank_stabilised=true", *GRPO])
    assert shown.exit_code == 0 and "rank_stabilized" in shown.output and "stabilised" not in shown.output


def test_a_branch_point_recorded_with_the_old_name_explains_the_change() -> None:
    branch = Branch(4, {"grpo.normalisation": {"from": "token", "to": "fixed"}})
    assert recorded_changes([branch], 4) == {"grpo.normalization"}


# -- recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), RENAMED_RECIPES.items())
def test_a_recipe_is_found_by_its_old_name_which_names_the_new_one(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new in recipe_names() and old not in recipe_names() and is_shipped_recipe(old)
    note_new_name.cache_clear()
    by_old, by_new = resolve(schema_of, old), resolve(schema_of, new)
    assert by_old.values == by_new.values and by_old.provenance == by_new.provenance
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines() == [
        f"note: the recipe '{old}' is now called '{new}'; the old name still works."
    ]
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {old}\nseed: 3\n")
    assert resolve(schema_of, mine).values == {**by_new.values, "seed": 3}
    assert [layer.origin for layer in read_recipe(old).layers] == [layer.origin for layer in read_recipe(new).layers]


@pytest.mark.parametrize(("old", "new"), RENAMED_RECIPES.items())
def test_an_old_run_and_a_start_from_a_recipe_keep_the_old_name(old: str, new: str) -> None:
    check_circle(old)  # what `init=recipe:speedrun` reads first
    assert requests_of({"init": f"recipe:{old}", "extends": old}) == []  # shipped: nothing a foreign run must ask for
    assert requests_of({"init": "recipe:mine.yaml"})
    assert recipe_of({"seed": "recipe speedrun", "job": f"recipe {old}"}) == new
    saved = resolve(schema_of, new)
    saved.set("job", saved["job"], Origin.parse(f"recipe {old}"))  # as the config.yaml of an old run has it
    assert is_shipped(saved, "job")


def test_the_old_name_works_on_the_command_line() -> None:
    result = CliRunner().invoke(command, ["speedrun", "phases.grpo=null"])
    assert result.exit_code == 0, result.output
    assert "phases" in result.stdout
