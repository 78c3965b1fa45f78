"""`bessemer doctor`: what is wrong with a run, and whether it can be resumed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator

import click


@click.command("doctor")
@click.argument("run")
@click.option(
    "--fix", is_flag=True, help="Remove what killed saves left behind; nothing else is ever changed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(run: str, fix: bool, as_json: bool, root: str) -> int:
    """Check a run directory and say what can be resumed. Nothing is changed.

    Configuration, status and lock, every byte of every checkpoint, leftovers, metrics, disk, data and tokenizer; then
    the run is built again as resume would do it. Exit code 0: it can be resumed, is at work or finished; 4: damaged
    beyond resume.

    \b
    Examples:
      bessemer doctor runs/mine
      bessemer doctor mine --json
      bessemer doctor mine --fix
    """
    # A look must not take the accelerator's memory from the run that uses it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from bessemer.console import table
    from bessemer.doctor import examine, remove_stale
    from bessemer.job import find_run

    found = find_run(run, root)
    removed = remove_stale(found) if fix else []
    with verifying() as progress:
        diagnosis = examine(found, progress)
    if as_json:
        click.echo(json.dumps({**diagnosis.as_dict(), "removed": removed}))
        return diagnosis.exit_code
    for name in removed:
        click.echo(f"removed {name}")
    rows = [(finding.level, finding.area, finding.line) for finding in diagnosis.findings]
    click.echo(table(("", "part", "finding"), rows))
    click.echo(f"\n{found.name}: {diagnosis.verdict}")
    return diagnosis.exit_code


@contextlib.contextmanager
def verifying() -> Iterator[Callable[[int], None] | None]:
    """Bytes verified so far, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("verifying checkpoints"), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("verifying", total=None)
        yield lambda count: bars.advance(task, count)
