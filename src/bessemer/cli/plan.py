"""`bessemer plan`: what a recipe will take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bessemer.cli.options import FORWARD, JSON, WORDS, say
from bessemer.cli.train import split_words
from bessemer.errors import InputError


@click.command("plan", context_settings=FORWARD)
@WORDS
@click.option("--topology", metavar="NAME", help="Hardware that is not here: v5e:4x4, 2xv6e:16x16, h200:8.")
@click.option("--sweep", is_flag=True, help="With --topology: try meshes and micro-batches and pick the best.")
@click.option("--placement", is_flag=True, help="With --topology: how each parameter is sharded.")
@click.option("--prices", type=click.Path(path_type=Path, exists=True), help="With --topology: your own price table.")
@click.option(
    "--plot", "picture", type=click.Path(path_type=Path), help="PNG of the schedules; default: plots/plan-RECIPE.png."
)
@click.option(
    "--no-compile",
    is_flag=True,
    help="Skip memory and timing, for an answer in seconds at any size. With --topology: the analytic model alone.",
)
@click.option(
    "--quick", is_flag=True, help="Compile for TPUs of --topology with the least optimization, in a fifth of the time."
)
@JSON
def command(
    words: tuple[str, ...], topology: str | None, picture: Path | None, no_compile: bool, as_json: bool, **absent: Any
) -> None:
    """Show what a recipe will take; nothing is trained, and no run is created.

    A job of phases (demo, speedrun-gpu) has one plan per phase.

    For this machine: each derived number with its reason, parameters by group, learning rates, FLOPs, memory of the
    compiled step, time at the speed measured here, and the schedules. Data that is not prepared yet is not touched; the
    vocabulary size is then assumed, and the table says so.

    With --topology, for hardware that is not here: memory, collectives, roofline time, days and cost, whether it fits
    and which setting to change. The step is really compiled, for TPUs with the extra tpu-plan, for NVIDIA GPUs with
    gpu-plan; without gpu-plan a GPU's memory and collectives are estimates.

    \b
    Examples:
      bessemer plan
      bessemer plan pretrain model.depth=12
      bessemer plan pretrain model.depth=20 --no-compile --json
      bessemer plan pretrain model.depth=12 --topology v5e:4x4
      bessemer plan finetune-lora init=models/Llama-3.1-8B --topology h200:1
      bessemer plan pretrain model.depth=26 --topology h100:64 --sweep
    """
    recipe, overrides = split_words(words)
    if topology is None:
        if any(absent.values()):
            raise InputError("--sweep, --placement, --prices and --quick need --topology NAME.")
        here(recipe, overrides, picture, no_compile, as_json)
    else:
        if picture is not None:
            raise InputError("--plot draws schedules, which do not depend on hardware; use it without --topology.")
        elsewhere(recipe, overrides, as_json, topology=topology, compiles=not no_compile, **absent)


def here(recipe: str, overrides: list[str], picture: Path | None, no_compile: bool, as_json: bool) -> None:
    """Print a plan for the devices of this machine."""
    from bessemer.plan import check_picture, make_plan, render, write_curves

    place = check_picture(picture or Path("plots") / f"plan-{Path(recipe).stem}.png")

    def made(name: str, recipe: Any, overrides: list[str]) -> dict[str, Any]:
        plan = make_plan(recipe, overrides, compiles=not no_compile, say=say)
        drawn = write_curves(plan["schedules"], place.with_stem("-".join(filter(None, (place.stem, name)))))
        return {**plan, "plot": None if drawn is None else str(drawn)}

    def shown(plan: dict[str, Any]) -> str:
        return render(plan) + (f"\n\nschedules drawn in {plan['plot']}" if plan["plot"] else "")

    show(recipe, overrides, as_json, made, shown)


def elsewhere(
    recipe: str, overrides: list[str], as_json: bool, *, sweep: bool, placement: bool, **options: Any
) -> None:
    """Print a plan for hardware that is not here."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # the hardware is not here, and nothing is computed
    from bessemer.plan.absent_plan import make_absent_plan, make_sweep
    from bessemer.plan.document import render_absent
    from bessemer.topology import keep_stdout_clean

    keep_stdout_clean()  # compilers print where they like
    make = make_sweep if sweep else make_absent_plan

    def made(name: str, recipe: Any, overrides: list[str]) -> dict[str, Any]:
        return make(recipe, overrides, say=say, **options)

    show(recipe, overrides, as_json, made, lambda plan: render_absent(plan, placement))


def show(
    recipe: str,
    overrides: list[str],
    as_json: bool,
    make: Callable[[str, Any, list[str]], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
) -> None:
    """Print the plan of a run, or of every phase of a job. make: (phase or "", recipe, overrides) -> plan."""
    from bessemer.plan.trainer import planned_phases

    phases = planned_phases(recipe, overrides)
    if not phases:
        plan = make("", recipe, overrides)
        click.echo(json.dumps(plan) if as_json else render(plan))
        return
    plans = {}
    for number, phase in enumerate(phases, 1):
        made = make(phase.name, phase.recipe, phase.overrides)
        plans[phase.name] = {**made, "recipe": f"{recipe}, phase {phase.name}"}
        if not as_json:
            click.echo(("" if number == 1 else "\n") + f"phase {number} of {len(phases)}: {phase.name}\n")
            click.echo(render(plans[phase.name]))
    if as_json:
        click.echo(json.dumps({"recipe": recipe, "phases": plans}))
