"""`bessemer plan`: what a recipe will take, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import click

from bessemer.cli.train import FORWARD, split_words


@click.command("plan", context_settings=FORWARD)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE] [key=value ...]")
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    help="PNG of the schedules; default: plots/plan-RECIPE.png.",
)
@click.option(
    "--no-compile", is_flag=True, help="Skip memory and the timed pass: an answer in seconds at any size."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(words: tuple[str, ...], picture: Path | None, no_compile: bool, as_json: bool) -> None:
    """Say what a recipe will take on the devices at hand; nothing is trained, and no run is made.

    Each derived number with its reason, parameters by group, learning rates, FLOPs, memory of the compiled step, time
    at the rate measured here, and the schedules. Data that is not prepared is not touched: the vocabulary's size is
    then assumed, and the table says so.

    \b
    Examples:
      bessemer plan
      bessemer plan pretrain model.depth=12
      bessemer plan pretrain model.depth=20 --no-compile --json
    """
    recipe, overrides = split_words(words)
    from bessemer.plan import check_picture, make_plan, render, write_curves

    place = check_picture(picture or Path("plots") / f"plan-{Path(recipe).stem}.png")
    plan = make_plan(recipe, overrides, compiles=not no_compile, say=lambda text: click.echo(text, err=True))
    drawn = write_curves(plan["schedules"], place)
    plan["plot"] = None if drawn is None else str(drawn)
    if as_json:
        click.echo(json.dumps(plan))
        return
    click.echo(render(plan))
    if drawn is not None:
        click.echo(f"\nschedules drawn in {drawn}")
