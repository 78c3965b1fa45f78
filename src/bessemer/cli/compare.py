"""`bessemer compare`: a few runs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from bessemer.errors import InputError


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--out", default="compare.png", show_default=True, help="File of the plot.")
@click.option(
    "--against",
    type=click.Choice(["step", "tokens", "time", "flops"]),
    default="step",
    show_default=True,
    help="What the curves are drawn against.",
)
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(runs: tuple[str, ...], out: str, against: str, root: str) -> None:
    """Print the final numbers of runs and the settings that differ; draw their curves in one picture.

    \b
    Examples:
      bessemer compare runs/one runs/two
      bessemer compare one two three --out curves.png --against flops
    """
    from bessemer.job import find_run
    from bessemer.report.listing import comparison, labels_of
    from bessemer.report.plots import write_overlay
    from bessemer.report.summary import summarise

    if len(runs) < 2:
        raise InputError("compare needs at least two runs.")
    summaries = [summarise(find_run(run, root)) for run in runs]
    click.echo(comparison(summaries))
    path = Path(out) / "compare.png" if Path(out).is_dir() else Path(out)
    drawn = write_overlay(summaries, labels_of(summaries), path, against)
    click.echo(f"\ncurves: {drawn}" if drawn else "\nno curves: none of the runs has metrics yet.")
