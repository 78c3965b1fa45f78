"""`bessemer export`: a run's model for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from bessemer.cli.options import STEP


@click.command("export")
@click.argument("run")
@click.argument("out")
@click.option(
    "--format",
    "form",
    type=click.Choice(["hf", "bessemer"]),
    default="hf",
    show_default=True,
    help="hf: what transformers loads; bessemer: plain safetensors with our names (docs/huggingface.md).",
)
@click.option("--step", type=STEP, help="Checkpoint to use, or stage-N; default: the newest valid one.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the weights; default: that of the model they were imported from, else float32.",
)
@click.option("--adapters", is_flag=True, help="Low-rank adapters alone, in PEFT's layout; default: merged.")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(
    run: str, out: str, form: str, step: int | str | None, dtype: str | None, adapters: bool, root: str
) -> None:
    """Write a run's model to the new directory OUT.

    Models of the llama family become a folder that transformers loads. A GPT has parts that no model there has: it is
    written in our own format, and a line says so.

    GGUF: convert_hf_to_gguf.py of llama.cpp reads the folder of a llama.

    \b
    Examples:
      bessemer export runs/mine exported
      bessemer export mine exported --format hf --step 512 --dtype bfloat16
    """
    from bessemer.generate.export import export_run, export_run_adapters
    from bessemer.interop.progress import shown
    from bessemer.job import find_run

    found = find_run(run, root)
    if adapters:
        lines = export_run_adapters(found, Path(out), step)
    else:
        lines = export_run(found, Path(out), form, shown, step=step, dtype=dtype)
    for line in lines:
        click.echo(line)
    click.echo(f"exported   {out}")
