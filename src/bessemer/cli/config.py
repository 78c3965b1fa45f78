"""`bessemer config`: the settings of a recipe, each with its value, its origin and its help."""

from __future__ import annotations

import json
import shutil
import sys

import click

from bessemer.cli.options import FORWARD, WORDS
from bessemer.cli.train import split_words
from bessemer.config import Config, dotted, resolve
from bessemer.config.values import plain
from bessemer.console import folded_table, show, table

NAME_WIDTH, VALUE_WIDTH, ORIGIN_WIDTH = 22, 20, 14  # of the columns on a terminal, so that the sections line up


@click.command("config", context_settings=FORWARD)
@WORDS
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
    from bessemer.training.setup.schema import schema_of  # imports jax, so after the cheap checks

    config = resolve(schema_of, recipe, overrides, allow_open=True)
    if schema:
        click.echo(json.dumps(config.schema.json_schema(), indent=2))
    else:
        click.echo(config_text(config, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def config_text(config: Config, width: int | None) -> str:
    """Return one table per section. With a terminal's `width` long cells fold; without, a setting is one line.

    On a terminal, settings that are not defaults are bold.
    """
    sections: dict[str, list[str]] = {}
    for key in config.schema.settings:
        sections.setdefault(key.partition("/")[0] if "/" in key else "", []).append(key)
    return "\n\n".join(_section_table(config, name, sections[name], width) for name in sorted(sections))


def _section_table(config: Config, section: str, keys: list[str], width: int | None) -> str:
    head = ("value", "from", "help")
    rows = [
        (dotted(key), show(plain(config[key])), str(config.provenance[key]), config.schema[key].help) for key in keys
    ]
    if width is None:
        return table(("setting", *head), rows)
    rows = [(name.removeprefix(f"{section}."), value, origin, about) for name, value, origin, about in rows]
    first = max(NAME_WIDTH, *(len(name) for name, *_ in rows))
    widths = (first, VALUE_WIDTH, ORIGIN_WIDTH, max(10, width - first - VALUE_WIDTH - ORIGIN_WIDTH - 6))
    bold = [config.is_set(key) for key in keys]
    return folded_table(((section or "setting").ljust(NAME_WIDTH), *head), rows, widths, bold)
