"""`bessemer compare`: a few runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bessemer.cli.completion import complete_run
from bessemer.cli.options import RUNS, print_notes
from bessemer.errors import InputError

if TYPE_CHECKING:
    from bessemer.report.summary import Summary


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", shell_complete=complete_run)
@click.option("--out", default="compare.png", show_default=True, help="File of the plot.")
@click.option(
    "--against",
    type=click.Choice(["step", "tokens", "time", "flops"]),
    default="step",
    show_default=True,
    help="Horizontal axis of the curves.",
)
@click.option("--common", is_flag=True, help="Also measure all models on the same held-out text.")
@click.option("--limit", type=click.IntRange(min=1), help="With --common: maximum held-out sequences.")
@click.option("--noise", is_flag=True, help="Group runs that differ only in their seed; say which group is better.")
@RUNS
def command(
    runs: tuple[str, ...], out: str, against: str, common: bool, limit: int | None, noise: bool, root: str
) -> None:
    """Print the final numbers of runs and the settings that differ; plot their curves in one picture.

    Runs evaluated on different held-out sets cannot be ranked by their bits per byte. --common measures the
    newest checkpoint of each on the held-out text of every run. --noise compares final validation losses of runs with
    equal tokens, FLOPs or training time: paired by seed where two groups share at least two seeds, otherwise with an
    assumed deviation of .02 between seeds.

    \b
    Examples:
      bessemer compare runs/one runs/two
      bessemer compare runs/one runs/two --common
      bessemer compare base-0 base-1 new-0 new-1 --noise
      bessemer compare one two three --out curves.png --against flops
    """
    from bessemer.job import find_run
    from bessemer.report.plots import write_overlay
    from bessemer.report.summary import summarize
    from bessemer.report.tables import compare_seeds, comparison, labels_of

    if len(runs) < 2:
        raise InputError("compare needs at least two runs.")
    if limit is not None and not common:
        raise InputError("--limit needs --common.")
    summaries = [summarize(find_run(run, root)) for run in runs]
    click.echo(comparison(summaries))
    if noise:
        click.echo("\n" + "\n".join(compare_seeds(summaries, labels_of(summaries))))
    if common:
        click.echo(f"\n{on_common_text(summaries, labels_of(summaries), limit)}")
    path = Path(out) / "compare.png" if Path(out).is_dir() else Path(out)
    drawn = write_overlay(summaries, labels_of(summaries), path, against)
    click.echo(f"\ncurves: {drawn}" if drawn else "\nno curves: none of the runs has metrics yet.")


def on_common_text(summaries: Sequence[Summary], labels: Sequence[str], limit: int | None) -> str:
    """Return a table of every model's bits per byte on the held-out text of every run; equal texts share a row."""
    from bessemer.console import counted, size, table, with_error
    from bessemer.evaluate.bpb import held_out_documents, measure_on
    from bessemer.generate import load_model
    from bessemer.training.setup.compiled import keep_compiled_programs

    keep_compiled_programs(None)
    models = [load_model(summary.run) for summary in summaries]
    texts: dict[tuple[str, ...], list[str]] = {}
    for label, loaded in zip(labels, models, strict=True):
        print_notes(f"{label}: {note}" for note in loaded.notes)
        texts.setdefault(tuple(held_out_documents(loaded, limit)), []).append(label)
    rows, remarks = [], []
    for documents, owners in texts.items():
        measured = [measure_on(loaded, documents) for loaded in models]
        rows.append((" and ".join(owners), *(with_error(one.bpb, one.error) for one in measured)))
        best = min(range(len(models)), key=lambda place: measured[place].bpb)
        total = size(sum(len(text.encode()) for text in documents))
        remarks.append(f"Held out by {' and '.join(owners)}: {counted(len(documents), 'document')}, {total}.")
        for place, one in enumerate(measured):
            if place != best:
                gap, error = one.above(measured[best])
                paired = f" ± {error:.4f}, paired by document" if error is not None else ""
                remarks.append(f"  {labels[place]} is {gap:.4f} above {labels[best]}{paired}.")
    lines = [table(("bits per byte of text held out by", *labels), rows), *remarks]
    if len(texts) > 1:
        lines.append("A run may have trained on text that another holds out, which favors it there.")
    return "\n".join(lines)
