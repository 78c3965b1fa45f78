"""`bessemer import`: a Hugging Face model as a run."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command("import")
@click.argument("source", metavar="HF_DIR|hf:OWNER/NAME")
@click.argument("out", metavar="OUT")
@click.option(
    "--context", type=click.IntRange(min=2), help="Tokens it reads at once; default: the model's, up to 8192."
)
def command(source: str, out: str, context: int | None) -> None:
    """Make the run OUT of a Hugging Face folder: llama, mistral, qwen2, qwen3, smollm; safetensors, no torch.

    OUT is then a run like any other: sample, chat, serve, eval, export, and init=OUT in a recipe. init=HF_DIR works
    without an import, too.

    \b
    Examples:
      bessemer import models/SmolLM2-135M runs/smollm
      bessemer import models/Llama-3.2-1B runs/llama --context 16384
      bessemer import hf:HuggingFaceTB/SmolLM2-135M runs/smollm      (extra: hf)
    """
    from bessemer.interop.folder import fetched, is_hub
    from bessemer.interop.import_hf import import_folder
    from bessemer.interop.progress import shown

    _, lines = import_folder(fetched(source) if is_hub(source) else Path(source), Path(out), shown, context)
    for line in lines:
        click.echo(line)
    click.echo(f"imported   {out}; next: bessemer sample {shlex.quote(out)} --prompt 'Once'")
