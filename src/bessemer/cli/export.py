"""`bessemer export`: write a run's model for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from bessemer.cli.options import BASE, RUN, RUNS, STEP


@click.command("export")
@RUN
@click.argument("out")
@click.option(
    "--format",
    "form",
    type=click.Choice(["hf", "bessemer"]),
    default="hf",
    show_default=True,
    help="hf: what transformers loads; bessemer: safetensors with Bessemer's names (docs/huggingface.md).",
)
@STEP
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the weights; default: that of the imported model, else float32.",
)
@click.option("--adapters", is_flag=True, help="Only the low-rank adapters, in PEFT's layout; default: merged.")
@BASE
@RUNS
def command(
    run: str,
    out: str,
    form: str,
    step: int | str | None,
    dtype: str | None,
    adapters: bool,
    base: str | None,
    root: str,
) -> None:
    """Write a run's model to the new directory OUT.

    Open models become a folder that transformers loads. A GPT has parts that transformers lacks, so it is written in
    Bessemer's own format.

    For GGUF, run llama.cpp's convert_hf_to_gguf.py on the folder of a llama.

    \b
    Examples:
      bessemer export runs/mine exported
      bessemer export mine exported --format hf --step 512 --dtype bfloat16
    """
    from bessemer.console import byte_progress
    from bessemer.generate.export import export_run, export_run_adapters
    from bessemer.job import find_run

    found = find_run(run, root)
    if adapters:
        lines = export_run_adapters(found, Path(out), step)
    else:
        lines = export_run(found, Path(out), form, byte_progress, step=step, dtype=dtype, base=base)
    for line in lines:
        click.echo(line)
    click.echo(f"exported   {out}")
