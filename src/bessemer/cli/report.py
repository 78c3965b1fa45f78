"""`bessemer report`."""

from __future__ import annotations

import click


@click.command("report")
@click.argument("run")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(run: str, root: str) -> None:
    """Write RUN/report.md and RUN/plots anew, from what the run has recorded so far.

    \b
    Examples:
      bessemer report runs/mine
    """
    from bessemer.job import find_run
    from bessemer.report import write_report

    click.echo(str(write_report(find_run(run, root))))
