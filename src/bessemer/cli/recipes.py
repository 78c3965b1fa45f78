"""`bessemer recipes`: what is shipped, in one table."""

from __future__ import annotations

import click

from bessemer.config import read_recipe, recipe_names


@click.command("recipes")
def command() -> None:
    """List the shipped recipes.

    \b
    Examples:
      bessemer recipes
      bessemer config NAME        all settings of one
      bessemer train NAME         run it
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    recipes = [read_recipe(name) for name in recipe_names()]
    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for recipe in recipes:
        lines = [line for line in (recipe.title, " ".join(recipe.description.split())) if line]
        table.add_row(Text(recipe.name, style="bold"), Text("\n".join(lines)))
    console.print(table)
