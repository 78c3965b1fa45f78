"""`bessemer rm`: delete a run."""

from __future__ import annotations

import click

from bessemer.errors import InputError, printable


@click.command("rm")
@click.argument("run")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(run: str, yes: bool, root: str) -> None:
    """Delete a run: its directory with all checkpoints. This cannot be undone.

    Refuses a run that a process works in, a link, and anything that is not a run directory. Links inside the run are
    removed; what they point to is not touched.

    \b
    Examples:
      bessemer rm runs/mine
      bessemer rm mine --yes
    """
    from bessemer.console import size
    from bessemer.job.removal import dependents, described, removable, remove, strangers
    from bessemer.report.summary import disk_size

    found = removable(run, root)
    what = printable(f"{found.path} ({described(found)}{size(disk_size(found.path))})")
    if names := strangers(found):
        listed = printable(", ".join(names[:10]))
        click.echo(f"It also contains files that no run wrote: {listed}", err=True)
    if names := dependents(found):
        listed = printable(", ".join(names[:10]))
        click.echo(f"These runs name it as their start or teacher: {listed}", err=True)
    if not yes:
        try:
            agreed = click.confirm(f"Delete {what}?", err=True)
        except click.Abort:
            raise InputError(
                f"not confirmed, so {found.path} was not deleted. Give --yes to delete it unasked."
            ) from None
        if not agreed:
            click.echo("Nothing was deleted.", err=True)
            return
    remove(found)
    click.echo(f"deleted {what}")
