"""`bessemer train`."""

from __future__ import annotations

import click

from bessemer.cli import BEGAN
from bessemer.cli.options import refuse_flags
from bessemer.config import Schema
from bessemer.errors import InputError

FORWARD = {"ignore_unknown_options": True, "allow_extra_args": True}


@click.command("train", context_settings=FORWARD)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE] [key=value ...]")
@click.option("--name", help="Name of the run; default: recipe and time.")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(words: tuple[str, ...], name: str | None, root: str) -> None:
    """Train a model. With no arguments: the quickstart, a few minutes on a CPU.

    RECIPE is a shipped name (see `bessemer recipes`) or a YAML file; settings are dotted
    (`bessemer config RECIPE` lists them all).

    \b
    Examples:
      bessemer train
      bessemer train quickstart training.steps=100 --name short
      bessemer train training.dataset=my.txt --name mine
      bessemer train sft init=runs/mine training.dataset=chats.jsonl
      bessemer train pretrain training.dataset=data/web model.depth=12      (a GPU; `bessemer plan` first)
    """
    from bessemer.training.signals import before_a_run, watched

    with watched(before_a_run):  # before jax is imported: that alone takes a while
        from bessemer.training.launch import build_trainer

        recipe, overrides = split_words(words)
        trainer = build_trainer(recipe, overrides, name=name, root=root, distributed=True)
        trainer.startup.began(BEGAN)
        trainer.run()


def split_words(words: tuple[str, ...], default: str = "quickstart") -> tuple[str, list[str]]:
    """[RECIPE] key=value … ; another system's flag is answered with our setting."""
    refuse_flags(words, lambda plain: _schema_of_words(plain, default))
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise InputError(f"two recipes given ({', '.join(recipes)}); settings are written key=value.")
    return (recipes[0] if recipes else default), [word for word in words if "=" in word]


def _schema_of_words(words: list[str], default: str) -> Schema:
    from bessemer.config.resolve import select_schema
    from bessemer.training.setup.schema import schema_of

    recipes = [word for word in words if "=" not in word]
    return select_schema(schema_of, (recipes or [default])[0], [word for word in words if "=" in word])
