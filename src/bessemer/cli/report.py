"""`bessemer report`."""

from __future__ import annotations

import click


@click.command("report")
@click.argument("run")
@click.option(
    "--html",
    is_flag=True,
    help="Also write RUN/report.html: one file with everything inside, to send or keep.",
)
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(run: str, html: bool, root: str) -> None:
    """Write RUN/report.md and RUN/plots anew, from what the run has recorded so far.

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
        from bessemer.report.html import write_html

        click.echo(str(write_html(found)))
