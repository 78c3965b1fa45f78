"""`bessemer train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from bessemer.cli import BEGAN
from bessemer.cli.options import FORWARD, RUNS, WORDS, refuse_flags
from bessemer.config import Schema, is_shipped_recipe
from bessemer.errors import InputError

DEFAULT = "quickstart"


@click.command("train", context_settings=FORWARD)
@WORDS
@click.option("--name", help="Name of the run; default: recipe and time.")
@RUNS
def command(words: tuple[str, ...], name: str | None, root: str) -> None:
    """Train a model. With no arguments: the quickstart, a few minutes on a CPU.

    RECIPE is a shipped name (see `bessemer recipes`) or a YAML file. `bessemer config RECIPE` lists all settings.

    \b
    Examples:
      bessemer train
      bessemer train quickstart training.steps=100 --name short
      bessemer train training.dataset=my.txt --name mine
      bessemer train sft init=runs/mine training.dataset=chats.jsonl
      bessemer train pretrain training.dataset=data/web model.depth=12      (a GPU; `bessemer plan` first)
    """
    from bessemer.training.signals import stopped_before_run, watched

    with watched(stopped_before_run):  # before jax is imported, which takes seconds
        from bessemer.training.launch import build_trainer

        recipe, overrides = split_words(words)
        trainer = build_trainer(recipe, overrides, name=name, root=root, distributed=True)
        trainer.startup.began(BEGAN)
        trainer.run()


def split_words(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """Split `[RECIPE] key=value …` into recipe and settings. Raise InputError for a flag, naming our setting."""

    def schema(plain: list[str]) -> Schema:
        from bessemer.config.resolve import select_schema
        from bessemer.training.setup.schema import schema_of

        recipes, overrides = parted(plain)
        return select_schema(schema_of, (recipes or [DEFAULT])[0], overrides)

    refuse_flags(words, schema)
    recipes, overrides = parted(words)
    for word in recipes:
        named = "." in word and Path(word).suffix not in (".yaml", ".yml") and not Path(word).exists()
        if named and word in schema([other for other in recipes if other != word][:1]):
            raise InputError(f"the setting '{word}' has no value: write {word}=VALUE.")
    if len(recipes) > 1:
        for word in recipes:
            if Path(word).exists() and Path(word).suffix not in (".yaml", ".yml") and not is_shipped_recipe(word):
                raise InputError(f"'{word}' is not a recipe. To train on it, write training.dataset={word}")
        raise InputError(f"two recipes given ({', '.join(recipes)}); settings are written key=value.")
    return (recipes or [DEFAULT])[0], overrides


def parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without and with an equals sign."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]
