"""`bessemer report`."""

from __future__ import annotations

import click

from bessemer.cli.options import RUN, RUNS


@click.command("report")
@RUN
@click.option("--html", is_flag=True, help="Also write RUN/report.html, one self-contained file.")
@RUNS
def command(run: str, html: bool, root: str) -> None:
    """Rewrite RUN/report.md and RUN/plots from what the run has recorded so far.

    \b
    Examples:
      bessemer report runs/mine
      bessemer report mine --html
    """
    from bessemer.job import find_run
    from bessemer.report import write_report

    found = find_run(run, root)
    click.echo(str(write_report(found)))
    if html:
        from bessemer.report.pages import write_html

        click.echo(str(write_html(found)))
