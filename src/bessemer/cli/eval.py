"""`bessemer eval`: evaluate a run's model."""

from __future__ import annotations

import json
from typing import Any

import click

from bessemer.cli.options import BASE, JSON, RUN, RUNS, STEP, print_notes


@click.command("eval")
@RUN
@click.option(
    "--tasks",
    required=True,
    help="Comma-separated: bpb, loss, core:DIR, gsm8k:FILE, exact:NAME, arithmetic, harness:TASK, or a task file.",
)
@STEP
@click.option("--limit", type=int, help="Maximum examples; for bpb sequences, default: as many as in training.")
@click.option("--batch", type=int, help="Examples per batch; changes the speed, never the result.")
@JSON
@BASE
@RUNS
def command(
    run: str,
    tasks: str,
    step: int | str | None,
    limit: int | None,
    batch: int | None,
    as_json: bool,
    base: str | None,
    root: str,
) -> None:
    """Evaluate a run's model; the results are also written to RUN/eval.

    \b
    Examples:
      bessemer eval runs/mine --tasks bpb
      bessemer eval mine --tasks bpb --step 512 --limit 64 --json
      bessemer eval mine --tasks core:bundle --limit 100
    """
    from bessemer.console import showing_ticks
    from bessemer.evaluate import Evaluator, check_tasks, split_tasks
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
        base=base,
        tasks=names,
        limit=limit,
        batch_size=batch,
    )
    known = list(evaluator.loaded.notes)
    print_notes(known)
    with showing_ticks():
        results = evaluator.run()
    print_notes(evaluator.loaded.notes[len(known) :])
    if as_json:
        click.echo(json.dumps({"run": str(found.path), "step": evaluator.loaded.step, "results": results}))
        return
    click.echo(f"{found.name}, step {evaluator.loaded.step}")
    show(results)


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print one line per task, and the parts of those that have parts."""
    from bessemer.console import number, table, with_error

    rows = []
    for task, result in results.items():
        value = with_error(result["value"], result.get("standard_error"))
        rows.append((task, result["metric"], value, f"{result['seconds']:.1f} s"))
    click.echo(table(("task", "metric", "value", "time"), rows, width=80))
    for result in results.values():
        parts = []
        for name, part in result.get("tasks", {}).items():
            if "centred" in part:
                scores, counts = (part["accuracy"], part["centred"]), (part["examples"], part["cropped"])
                parts.append((name, *map(number, scores), *map(str, counts), f"{part['seconds']:.1f} s"))
        if parts:
            head = ("task", "accuracy", "centred", "examples", "cropped", "time")
            click.echo("\n" + table(head, parts, width=80))
        if result.get("missing"):
            click.echo(f"missing from the bundle: {', '.join(result['missing'])}")
        notes: dict[str, list[str]] = {}
        for name, part in [(result["task"], result), *result.get("tasks", {}).items()]:
            if part.get("note"):
                notes.setdefault(part["note"], []).append(name)
        for note, names in notes.items():
            click.echo(f"note: {note} ({', '.join(names)})")
