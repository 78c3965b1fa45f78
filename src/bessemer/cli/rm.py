"""`bessemer rm`: delete a run."""

from __future__ import annotations

import click

from bessemer.cli.options import RUN, RUNS, say
from bessemer.errors import InputError, printable


@click.command("rm")
@RUN
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@RUNS
def command(run: str, yes: bool, root: str) -> None:
    """Delete a run: its directory with all checkpoints. This cannot be undone.

    Refuses a run in use, a link, and anything that is not a run directory. Links inside the run are removed; their
    targets are not touched.

    \b
    Examples:
      bessemer rm runs/mine
      bessemer rm mine --yes
    """
    from bessemer.console import size
    from bessemer.job.runs import dependents, described, removable, remove, strangers
    from bessemer.report.summary import disk_size

    found = removable(run, root)
    what = printable(f"{found.path} ({described(found)}{size(disk_size(found.path))})")
    if names := strangers(found):
        say(f"It also contains files that no run wrote: {printable(', '.join(names[:10]))}")
    if names := dependents(found):
        say(f"These runs were initialized or distilled from it: {printable(', '.join(names[:10]))}")
    if not yes:
        try:
            agreed = click.confirm(f"Delete {what}?", err=True)
        except click.Abort:
            raise InputError(f"{found.path} was not deleted: not confirmed. Pass --yes to skip the question.") from None
        if not agreed:
            say("Nothing was deleted.")
            return
    remove(found)
    click.echo(f"deleted {what}")
