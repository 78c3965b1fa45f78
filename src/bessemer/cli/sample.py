"""`bessemer sample`: text from a run."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from bessemer.cli.options import BASE, DECODING, JSON, RUN, RUNS, SAMPLING, STEP, open_model, print_notes
from bessemer.errors import printable

if TYPE_CHECKING:
    from bessemer.generate import Speculation


@click.command("sample")
@RUN
@click.option("--prompt", required=True, help="Beginning of the text.")
@STEP
@click.option("--max-tokens", type=int, default=100, show_default=True, help="New tokens at most.")
@SAMPLING
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@DECODING
@JSON
@BASE
@RUNS
def command(
    run: str,
    prompt: str,
    step: int | str | None,
    max_tokens: int,
    seed: int,
    as_json: bool,
    base: str | None,
    root: str,
    drafts: Speculation | None,
    weights: str,
    **sampling: Any,
) -> None:
    """Continue a text with a run's model.

    The text ends where the model ends the document, after --max-tokens, or when prompt and continuation
    fill the model's context.

    \b
    Examples:
      bessemer sample runs/mine --prompt "def main("
      bessemer sample mine --prompt "Once" --temperature 0 --max-tokens 40
      bessemer sample mine --prompt "Once" --step 512 --top-k 50 --seed 7 --json
      bessemer sample mine --prompt "Once" --speculate ngram --weights fp8
    """
    from bessemer.generate import SamplingOptions, sample
    from bessemer.job import find_run

    options = SamplingOptions(seed=seed, **sampling)
    found = find_run(run, root)
    loaded = open_model(found, step, base, weights)
    (completion,), notices = sample(loaded, [prompt], max_tokens=max_tokens, sampling=options, speculate=drafts)
    print_notes(notices)
    if as_json:
        document = {
            "run": str(found.path),
            "step": loaded.step,
            "sampling": dataclasses.asdict(options),
            **dataclasses.asdict(completion),
            "notices": [*loaded.notes, *notices],
        }
        click.echo(json.dumps(document))
        return
    ends = {
        "stop": "end of document",
        "length": f"stopped after {max_tokens} tokens (--max-tokens)",
        "context": "stopped: the model's context is full",
    }
    click.echo(click.style(f"--- prompt (step {loaded.step})", dim=True))
    click.echo(printable(completion.prompt))
    click.echo(click.style("--- continuation", dim=True))
    click.echo(click.style(printable(completion.text), bold=True))
    saved = completion.speculation
    passes = "" if saved is None else f"; {saved['passes']} passes, {saved['tokens_per_pass']:.2f} tokens per pass"
    click.echo(click.style(f"--- {ends[completion.finish]}{passes}", dim=True))
