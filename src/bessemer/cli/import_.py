"""`bessemer import`: import a Hugging Face model, or adapters of PEFT, as a run."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from bessemer.cli.options import RUNS, print_notes
from bessemer.errors import InputError


@click.command("import")
@click.argument("source", metavar="HF_DIR|PEFT_DIR|hf:OWNER/NAME")
@click.argument("out", metavar="OUT")
@click.option("--context", type=click.IntRange(min=2), help="Context length; default: the model's, up to 8192.")
@click.option("--base", metavar="PATH", help="Base model of adapters; default: the one that PEFT_DIR names.")
@RUNS
def command(source: str, out: str, context: int | None, base: str | None, root: str) -> None:
    """Import a Hugging Face folder as the run OUT: llama, mistral, mixtral, qwen, smollm, olmo, gemma, gpt-oss.

    OUT works like any other run: sample, chat, serve, eval, export, and init=OUT in a recipe. init=HF_DIR also works,
    without an import. Of adapters that PEFT saved (LoRA, DoRA, rsLoRA) the run holds the adapters alone; their base
    stays where it is.

    \b
    Examples:
      bessemer import models/SmolLM2-135M runs/smollm
      bessemer import models/Llama-3.2-1B runs/llama --context 16384
      bessemer import hf:HuggingFaceTB/SmolLM2-135M runs/smollm      (extra: hf)
      bessemer import models/my-adapters runs/adapted --base models/SmolLM2-135M
    """
    from bessemer.console import byte_progress
    from bessemer.interop.folder import fetched, import_folder, is_hub
    from bessemer.interop.peft import PeftFolder, is_peft

    place = fetched(source) if is_hub(source) else Path(source)
    if is_peft(place):
        from bessemer.generate.adapters import import_adapters
        from bessemer.training.setup.initial_weights import find_start, tree_in

        named = base or PeftFolder(place).find_base("Name the base yourself: --base PATH")
        start, notes = find_start(named, root, "--base")
        print_notes(notes)
        _, lines = import_adapters(place, Path(out), start, tree_in(start), byte_progress, context)
    elif base is not None:
        raise InputError(f"--base is for adapters, and {source} has no adapter_config.json: leave it out.")
    else:
        _, lines = import_folder(place, Path(out), byte_progress, context)
    for line in lines:
        click.echo(line)
    click.echo(f"imported   {out}; next: bessemer sample {shlex.quote(out)} --prompt 'Once'")
