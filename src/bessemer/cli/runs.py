"""`bessemer runs`: list the runs of a directory."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click

from bessemer.cli.options import JSON
from bessemer.errors import InputError


@click.command("runs")
@click.argument("directory", default="runs", metavar="[DIR]")
@JSON
def command(directory: str, as_json: bool) -> None:
    """List the runs in DIR (default: runs), the most recently active first.

    State is running, done, stopped, failed, or crashed (its status says running, but no process holds its lock). Age is
    the time since the last heartbeat. `bessemer doctor RUN` checks one run in detail.

    \b
    Examples:
      bessemer runs
      bessemer runs /data/runs --json
    """
    from bessemer.report.tables import remarks, run_rows, runs_table

    if not Path(directory).is_dir() and directory != "runs":
        raise InputError(f"there is no directory {directory}. Pass the directory that holds the runs.")
    rows = run_rows(directory)
    if as_json:
        click.echo(json.dumps(rows))
    elif not rows:
        click.echo(f"no runs in {directory}. Start one with `bessemer train`.")
    else:
        click.echo(runs_table(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
        for line in remarks(rows):
            click.echo(line)
