"""`bessemer import`: import a Hugging Face model as a run."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command("import")
@click.argument("source", metavar="HF_DIR|hf:OWNER/NAME")
@click.argument("out", metavar="OUT")
@click.option("--context", type=click.IntRange(min=2), help="Context length; default: the model's, up to 8192.")
def command(source: str, out: str, context: int | None) -> None:
    """Import a Hugging Face folder as the run OUT: llama, mistral, qwen2, qwen3, smollm; safetensors, no torch.

    OUT works like any other run: sample, chat, serve, eval, export, and init=OUT in a recipe. init=HF_DIR also works,
    without an import.

    \b
    Examples:
      bessemer import models/SmolLM2-135M runs/smollm
      bessemer import models/Llama-3.2-1B runs/llama --context 16384
      bessemer import hf:HuggingFaceTB/SmolLM2-135M runs/smollm      (extra: hf)
    """
    from bessemer.console import byte_progress
    from bessemer.interop.folder import fetched, import_folder, is_hub

    _, lines = import_folder(fetched(source) if is_hub(source) else Path(source), Path(out), byte_progress, context)
    for line in lines:
        click.echo(line)
    click.echo(f"imported   {out}; next: bessemer sample {shlex.quote(out)} --prompt 'Once'")
