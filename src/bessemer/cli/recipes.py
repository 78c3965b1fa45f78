"""`bessemer recipes`: list the shipped recipes."""

from __future__ import annotations

import shutil

import click

from bessemer.config import read_recipe, recipe_names
from bessemer.console import folded_table


@click.command("recipes")
def command() -> None:
    """List the shipped recipes.

    \b
    Examples:
      bessemer recipes
      bessemer config NAME        all settings of one
      bessemer train NAME         run it
    """
    recipes = [read_recipe(name) for name in recipe_names()]
    rows = [(one.name, f"{one.title}\n{' '.join(one.description.split())}".strip()) for one in recipes]
    first = max(len(name) for name, _ in rows)
    click.echo(folded_table(("recipe", "what it does"), rows, (first, shutil.get_terminal_size().columns - first - 2)))
