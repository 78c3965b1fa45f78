"""`bessemer resume`."""

from __future__ import annotations

import functools

import click

from bessemer.cli import BEGAN
from bessemer.cli.options import FORWARD, RUN, RUNS, SETTINGS, refuse_flags


@click.command("resume", context_settings=FORWARD)
@RUN
@SETTINGS
@click.option("--step", type=int, help="Continue from this checkpoint; later ones are discarded.")
@click.option(
    "--trust",
    is_flag=True,
    help="Allow the code, uploads, files and links that a run from elsewhere names, from now on.",
)
@click.option("--change", is_flag=True, help="Allow settings that change the run from here on; records a branch point.")
@click.option("--base", metavar="PATH", help="Where the run's initial weights or base model are now; recorded.")
@RUNS
def command(
    run: str, words: tuple[str, ...], step: int | None, trust: bool, change: bool, base: str | None, root: str
) -> None:
    """Continue a stopped or killed run; the result is bit for bit that of an uninterrupted one.

    Only settings that cannot change the run are accepted: logging.*, topology.*, eval.*, training.time_limit,
    training.per_device_batch_size. --change allows others (a longer horizon, another learning rate, other data): from
    there on it is another run, and branches.json and the report record it.

    \b
    Examples:
      bessemer resume runs/mine
      bessemer resume mine training.steps=2000 --change     # train a finished run further
      bessemer resume mine training.time_limit=2h
      bessemer resume mine --step 512
      bessemer resume s3://bucket/runs/mine     # from its mirror (logging.mirror), on any machine
    """
    from bessemer.training.signals import stopped_before_resume, watched

    with watched(functools.partial(stopped_before_resume, run)):
        from bessemer.job import find_run
        from bessemer.job.trust import adopt
        from bessemer.training.launch import changes_finished, is_finished, point_to_base, reopen
        from bessemer.training.persistence.mirror import fetched

        refuse_flags(words)
        path = str(fetched(run, root))
        if trust:
            adopt(find_run(path, root, trust=True))
        given = list(words)
        if (
            step is None
            and is_finished(path, root)
            and not changes_finished(path, given, root=root, trust=trust, change=change)
        ):
            for line in point_to_base(path, base, root=root) if base is not None else ():
                click.echo(line)
            click.echo(
                f"{path} is finished; nothing to do. To train it further: bessemer resume {path} training.steps=… "
                f"--change. To start a new run from its weights: init={path}."
            )
            return
        trainer = reopen(run, given, root=root, step=step, trust=trust, change=change, base=base, distributed=True)
        trainer.startup.began(BEGAN)
        trainer.run()
