"""`bessemer eval`: judge a run's model."""

from __future__ import annotations

import json

import click


@click.command("eval")
@click.argument("run")
@click.option("--tasks", required=True, help="Evaluations by name, separated by commas: bpb.")
@click.option("--step", type=int, help="Checkpoint to use; default: the newest valid one.")
@click.option(
    "--limit", type=int, help="Examples at most; for bpb sequences, default as many as in training."
)
@click.option("--batch", type=int, help="Examples in one pass; changes the speed, never the result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(
    run: str, tasks: str, step: int | None, limit: int | None, batch: int | None, as_json: bool, root: str
) -> None:
    """Evaluate a run's model; the results are also written to RUN/eval.

    \b
    Examples:
      bessemer eval runs/mine --tasks bpb
      bessemer eval mine --tasks bpb --step 512 --limit 64 --json
    """
    from bessemer.evaluate import Evaluator, check_tasks
    from bessemer.job import find_run
    from bessemer.report.table import table
    from bessemer.topology import make_topology

    names = check_tasks(tasks.split(","))
    found = find_run(run, root)
    topology = make_topology()
    evaluator = Evaluator.from_run(
        found,
        step,
        topology=topology if topology.device_count > 1 else None,
        tasks=names,
        limit=limit,
        batch_size=batch,
    )
    for note in evaluator.loaded.notes:
        click.echo(f"note: {note}", err=True)
    results = evaluator.run()
    if as_json:
        click.echo(json.dumps({"run": str(found.path), "step": evaluator.loaded.step, "results": results}))
        return
    rows = [
        (task, result["metric"], f"{result['value']:.4f}", f"{result['seconds']:.1f} s")
        for task, result in results.items()
    ]
    click.echo(f"{found.name}, step {evaluator.loaded.step}")
    click.echo(table(("task", "metric", "value", "time"), rows))
