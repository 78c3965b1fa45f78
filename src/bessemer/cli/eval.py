"""`bessemer eval`: judge a run's model."""

from __future__ import annotations

import json
from typing import Any

import click

from bessemer.cli.options import STEP


@click.command("eval")
@click.argument("run")
@click.option(
    "--tasks",
    required=True,
    help="Separated by commas: bpb, loss, core:DIR, gsm8k:FILE, exact:NAME, arithmetic, harness:TASK, or a task file.",
)
@click.option("--step", type=STEP, help="Checkpoint to use, or stage-N; default: the newest valid one.")
@click.option(
    "--limit", type=int, help="Examples at most; for bpb sequences, default as many as in training."
)
@click.option("--batch", type=int, help="Examples in one pass; changes the speed, never the result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(
    run: str,
    tasks: str,
    step: int | str | None,
    limit: int | None,
    batch: int | None,
    as_json: bool,
    root: str,
) -> None:
    """Evaluate a run's model; the results are also written to RUN/eval.

    \b
    Examples:
      bessemer eval runs/mine --tasks bpb
      bessemer eval mine --tasks bpb --step 512 --limit 64 --json
      bessemer eval mine --tasks core:bundle --limit 100
    """
    from bessemer.evaluate import Evaluator, check_tasks, split_tasks
    from bessemer.evaluate.progress import shown
    from bessemer.job import find_run
    from bessemer.topology import make_topology
    from bessemer.training.setup.compiled import keep_compiled_programs

    names = check_tasks(split_tasks(tasks))
    found = find_run(run, root)
    keep_compiled_programs(None)
    topology = make_topology()
    evaluator: Evaluator[Any] = Evaluator.from_run(
        found,
        step,
        topology=topology if topology.device_count > 1 else None,
        tasks=names,
        limit=limit,
        batch_size=batch,
    )
    for note in (said := list(evaluator.loaded.notes)):
        click.echo(f"note: {note}", err=True)
    with shown():
        results = evaluator.run()
    for note in evaluator.loaded.notes[len(said) :]:
        click.echo(f"note: {note}", err=True)
    if as_json:
        click.echo(json.dumps({"run": str(found.path), "step": evaluator.loaded.step, "results": results}))
        return
    click.echo(f"{found.name}, step {evaluator.loaded.step}")
    show(results)


def _value(result: dict[str, Any]) -> str:
    from bessemer.console import with_error

    return with_error(result["value"], result.get("standard_error"))


def show(results: dict[str, dict[str, Any]]) -> None:
    """A line a task, and the parts of those that have parts."""
    from bessemer.console import number, table

    rows = [
        (task, result["metric"], _value(result), f"{result['seconds']:.1f} s")
        for task, result in results.items()
    ]
    click.echo(table(("task", "metric", "value", "time"), rows, width=80))
    for result in results.values():
        parts = [(name, part) for name, part in result.get("tasks", {}).items() if "centred" in part]
        if parts:
            head = ("task", "accuracy", "centred", "examples", "cropped", "time")
            lines = [
                (
                    name,
                    number(part["accuracy"]),
                    number(part["centred"]),
                    str(part["examples"]),
                    str(part["cropped"]),
                    f"{part['seconds']:.1f} s",
                )
                for name, part in parts
            ]
            click.echo("\n" + table(head, lines, width=80))
        if result.get("missing"):
            click.echo(f"missing from the bundle: {', '.join(result['missing'])}")
        notes: dict[str, list[str]] = {}
        for name, part in [(result["task"], result), *result.get("tasks", {}).items()]:
            if part.get("note"):
                notes.setdefault(part["note"], []).append(name)
        for note, names in notes.items():
            click.echo(f"note: {note} ({', '.join(names)})")
