"""`bessemer config`: the settings of a run, each with its value, its origin and its help."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from bessemer.cli.train import FORWARD, split_words
from bessemer.config import Config, dotted, resolve
from bessemer.config.values import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


NAME_WIDTH = 22  # of the first column on a terminal, so that the sections line up


@click.command("config", context_settings=FORWARD)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE] [key=value ...]")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a recipe instead, for editors.")
def command(words: tuple[str, ...], schema: bool) -> None:
    """Show every setting of a recipe: its value, where the value came from, and what it means.

    \b
    Examples:
      bessemer config quickstart
      bessemer config pretrain model.depth=12 optimization.name=muon
      bessemer config pretrain --schema > recipe.schema.json
    """
    recipe, overrides = split_words(words)
    from bessemer.training.setup.schema import (
        schema_of,  # brings jax along: after the cheap mistakes are found
    )

    config = resolve(schema_of, recipe, overrides, allow_open=True)
    if schema:
        click.echo(json.dumps(config.schema.json_schema(), indent=2))
        return
    from rich.console import Console

    print_config(config, Console())


def print_config(config: Config, console: Console) -> None:
    """One table a section. On a terminal long texts fold; in a file or pipe a setting is one line."""
    sections: dict[str, list[str]] = {}
    for key in config.schema.settings:
        sections.setdefault(key.partition("/")[0] if "/" in key else "", []).append(key)
    for section in sorted(sections):
        if console.is_terminal:
            console.print(section_table(config, section, sections[section]), "")
            continue
        table = section_table(config, "", sections[section], fold=False)
        console.width = console.measure(table, options=console.options.update(width=100_000)).maximum
        with console.capture() as captured:
            console.print(table)
        for line in captured.get().splitlines():
            click.echo(line.rstrip(), file=console.file)
        click.echo(file=console.file)


def section_table(config: Config, section: str, keys: list[str], fold: bool = True) -> Table:
    """Columns: key (below its section), value, origin, help; what is not a default stands out."""
    from rich.table import Table
    from rich.text import Text

    names = [dotted(key).removeprefix(f"{section}.") for key in keys]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column(section or "setting", no_wrap=True, min_width=NAME_WIDTH if fold else None)
    table.add_column("value", overflow="fold", max_width=20 if fold else None)
    table.add_column("from", overflow="fold", max_width=14 if fold else None)
    table.add_column("help", overflow="fold")
    for name, key in zip(names, keys, strict=True):
        style = "bold" if config.is_set(key) else "dim"
        words = (show(config[key]), str(config.provenance[key]))
        table.add_row(name, *(Text(word, style=style) for word in words), Text(config.schema[key].help))
    return table


def show(value: Any) -> str:
    """A value as it can be typed on the command line: 'none' for None, true and false, lists in brackets."""
    value = plain(value)
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
