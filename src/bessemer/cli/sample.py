"""`bessemer sample`: text from a run."""

from __future__ import annotations

import dataclasses
import json

import click

from bessemer.cli.options import STEP


@click.command("sample")
@click.argument("run")
@click.option("--prompt", required=True, help="Beginning of the text.")
@click.option("--step", type=STEP, help="Checkpoint to use, or stage-N; default: the newest valid one.")
@click.option("--max-tokens", type=int, default=100, show_default=True, help="New tokens at most.")
@click.option(
    "--temperature", type=float, default=0.8, show_default=True, help="0 takes the most likely token."
)
@click.option("--top-k", type=int, default=0, help="Draw from the K most likely tokens only.")
@click.option(
    "--top-p", type=float, default=1.0, help="Draw from the most likely tokens that reach probability P."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(
    run: str,
    prompt: str,
    step: int | str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    as_json: bool,
    root: str,
) -> None:
    """Continue a text with a run's model.

    The text ends where the model ends the document, after --max-tokens, or when prompt and continuation
    fill the model's context.

    \b
    Examples:
      bessemer sample runs/mine --prompt "def main("
      bessemer sample mine --prompt "Once" --temperature 0 --max-tokens 40
      bessemer sample mine --prompt "Once" --step 512 --top-k 50 --seed 7 --json
    """
    from bessemer.generate import SamplingOptions, load_model, sample
    from bessemer.job import find_run
    from bessemer.training.setup.compiled import keep_compiled_programs

    sampling = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    found = find_run(run, root)
    keep_compiled_programs(None)
    loaded = load_model(found, step)
    completions, notices = sample(loaded, [prompt], max_tokens=max_tokens, sampling=sampling)
    for note in (*loaded.notes, *notices):
        click.echo(f"note: {note}", err=True)
    if as_json:
        document = {
            "run": str(found.path),
            "step": loaded.step,
            "sampling": dataclasses.asdict(sampling),
            **dataclasses.asdict(completions[0]),
            "notices": [*loaded.notes, *notices],
        }
        click.echo(json.dumps(document))
    else:
        show(completions[0].prompt, completions[0].text, _end(completions[0].finish, max_tokens), loaded.step)


def show(prompt: str, text: str, end: str, step: int) -> None:
    """Prompt and continuation under headings of their own, so that they differ without colour too."""
    click.echo(click.style(f"--- prompt (step {step})", dim=True))
    click.echo(prompt)
    click.echo(click.style("--- continuation", dim=True))
    click.echo(click.style(text, bold=True))
    click.echo(click.style(f"--- {end}", dim=True))


def _end(finish: str, max_tokens: int) -> str:
    return {
        "stop": "end of document",
        "length": f"stopped after {max_tokens} tokens (--max-tokens)",
        "context": "stopped: the model's context is full",
    }[finish]
