"""`bessemer doctor`: check a run and say whether it can be resumed."""

from __future__ import annotations

import dataclasses
import json
import os

import click

from bessemer.cli.options import JSON, RUN, RUNS


@click.command("doctor")
@RUN
@click.option("--fix", is_flag=True, help="Remove leftovers of killed saves; nothing else is ever changed.")
@JSON
@RUNS
def command(run: str, fix: bool, as_json: bool, root: str) -> int:
    """Check a run directory and say what can be resumed. Nothing is changed.

    Checks configuration, status and lock, every byte of every checkpoint, leftovers, metrics, disk, data and tokenizer,
    then rebuilds the run as resume would. Exit code 0: it can be resumed, is in progress or finished; 4: damaged beyond
    resume.

    \b
    Examples:
      bessemer doctor runs/mine
      bessemer doctor mine --json
      bessemer doctor mine --fix
    """
    # do not take the accelerator's memory from the run that uses it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from bessemer.console import byte_progress, table
    from bessemer.doctor import examine, remove_stale
    from bessemer.job import find_run

    found = find_run(run, root)
    removed = remove_stale(found) if fix else []
    with byte_progress("verifying checkpoints") as progress:
        diagnosis = examine(found, progress)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(diagnosis), "removed": removed}))
        return diagnosis.exit_code
    for name in removed:
        click.echo(f"removed {name}")
    rows = [(finding.level, finding.area, finding.line) for finding in diagnosis.findings]
    click.echo(table(("", "part", "finding"), rows))
    click.echo(f"\n{found.name}: {diagnosis.verdict}")
    return diagnosis.exit_code
