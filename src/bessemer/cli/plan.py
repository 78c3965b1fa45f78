"""`bessemer plan`: what a recipe will take, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bessemer.cli.train import FORWARD, split_words
from bessemer.errors import InputError


@click.command("plan", context_settings=FORWARD)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE] [key=value ...]")
@click.option("--topology", metavar="NAME", help="Hardware that is not here: v5e:4x4, 2xv6e:16x16, h200:8.")
@click.option(
    "--sweep", is_flag=True, help="With --topology: try meshes and micro-batches, end with the best."
)
@click.option("--placement", is_flag=True, help="With --topology: where each parameter lies.")
@click.option(
    "--prices", type=click.Path(path_type=Path, exists=True), help="With --topology: your own price table."
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    help="PNG of the schedules; default: plots/plan-RECIPE.png.",
)
@click.option(
    "--no-compile",
    is_flag=True,
    help="Skip memory and the timed pass: an answer in seconds at any size. With --topology: the analytic model.",
)
@click.option(
    "--quick", is_flag=True, help="Compile for --topology with least effort, in a fifth of the time."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    words: tuple[str, ...],
    topology: str | None,
    sweep: bool,
    placement: bool,
    prices: Path | None,
    picture: Path | None,
    no_compile: bool,
    quick: bool,
    as_json: bool,
) -> None:
    """Say what a recipe will take; nothing is trained, and no run is made.

    On the devices at hand: each derived number with its reason, parameters by group, learning rates, FLOPs, memory of
    the compiled step, time at the rate measured here, and the schedules. Data that is not prepared is not touched: the
    vocabulary's size is then assumed, and the table says so.

    With --topology on hardware that is not here: memory, collectives, roofline time, days and cost, whether it fits
    and which setting to change. TPU steps are compiled for real (extra: tpu-plan).

    \b
    Examples:
      bessemer plan
      bessemer plan pretrain model.depth=12
      bessemer plan pretrain model.depth=20 --no-compile --json
      bessemer plan pretrain model.depth=12 --topology v5e:4x4
      bessemer plan pretrain model.depth=26 --topology h100:64 --sweep
    """
    recipe, overrides = split_words(words)
    if topology is None:
        if sweep or placement or prices or quick:
            raise InputError(
                "--sweep, --placement, --prices and --quick belong to a plan for --topology NAME."
            )
        here(recipe, overrides, picture, no_compile, as_json)
    else:
        options: dict[str, Any] = {"topology": topology, "compiles": not no_compile, "prices": prices}
        options["quick"] = quick
        elsewhere(recipe, overrides, picture, sweep, placement, as_json, options)


def say(text: str) -> None:
    click.echo(text, err=True)


def here(recipe: str, overrides: list[str], picture: Path | None, no_compile: bool, as_json: bool) -> None:
    from bessemer.plan import check_picture, make_plan, render, write_curves

    place = check_picture(picture or Path("plots") / f"plan-{Path(recipe).stem}.png")
    plan = make_plan(recipe, overrides, compiles=not no_compile, say=say)
    drawn = write_curves(plan["schedules"], place)
    plan["plot"] = None if drawn is None else str(drawn)
    if as_json:
        click.echo(json.dumps(plan))
        return
    click.echo(render(plan))
    if drawn is not None:
        click.echo(f"\nschedules drawn in {drawn}")


def elsewhere(
    recipe: str,
    overrides: list[str],
    picture: Path | None,
    sweep: bool,
    placement: bool,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    if picture is not None:
        raise InputError("--plot draws the schedules of a plan without --topology: they do not depend on it.")
    import jax

    jax.config.update("jax_platforms", "cpu")  # the hardware is not here, and nothing is computed
    from bessemer.plan.absent_plan import make_absent_plan
    from bessemer.plan.show import render_absent
    from bessemer.plan.sweep import make_sweep
    from bessemer.topology import keep_stdout_clean

    keep_stdout_clean()  # compilers print where they like
    make = make_sweep if sweep else make_absent_plan
    plan = make(recipe, overrides, say=say, **options)
    click.echo(json.dumps(plan) if as_json else render_absent(plan, placement))
