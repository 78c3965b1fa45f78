"""`bessemer serve`: a run's model behind an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from bessemer.cli.options import BASE, DECODING, RUN, RUNS, STEP, TEMPLATE, open_model, print_notes, say
from bessemer.errors import InputError

if TYPE_CHECKING:
    from bessemer.generate import Speculation


@click.command("serve")
@RUN
@STEP
@click.option("--host", default="127.0.0.1", show_default=True, help="Any other address needs a token.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 picks a free one.")
@click.option("--token-file", help="File with the token clients must send; default: $BESSEMER_API_TOKEN, if set.")
@click.option("--slots", type=int, default=16, show_default=True, help="Answers generated at once.")
@click.option("--queue", type=int, default=256, show_default=True, help="Answers that may wait; more get status 429.")
@click.option(
    "--adapter",
    "adapters",
    metavar="NAME=RUN|PEFT_DIR",
    multiple=True,
    help="Further adapters over the same base, chosen by the request's model; may be given several times.",
)
@click.option("--timeout", type=float, default=300, show_default=True, help="Seconds a request may take.")
@DECODING
@TEMPLATE
@BASE
@RUNS
def command(
    run: str,
    step: int | str | None,
    token_file: str | None,
    template: str,
    adapters: tuple[str, ...],
    base: str | None,
    root: str,
    drafts: Speculation | None,
    weights: str,
    **options: Any,
) -> None:
    """Serve a run's model to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    Ctrl-C or SIGTERM stops it; answers still generating have ten seconds to finish.

    \b
    Examples:
      bessemer serve runs/mine
      bessemer serve mine --step 512 --port 8001 --slots 64
      bessemer serve base --adapter poems=runs/poems --adapter code=models/peft-code
      BESSEMER_API_TOKEN=… bessemer serve mine --host 0.0.0.0
    """
    from bessemer.generate import LoadedModel
    from bessemer.generate.adapters import Served, load_several
    from bessemer.job import find_run
    from bessemer.serve.app import ServerOptions, serve
    from bessemer.serve.chat import remark, template_of
    from bessemer.serve.net import TOKEN_VARIABLE, read_token
    from bessemer.training.setup.compiled import keep_compiled_programs

    token = read_token(token_file, os.environ.get(TOKEN_VARIABLE))
    server = ServerOptions(token=token, template=template, speculate=drafts, **options)
    found = find_run(run, root)

    named = named_adapters(adapters)

    def load() -> tuple[LoadedModel, list[Served]]:
        if named:
            keep_compiled_programs(None)
            loaded, served = load_several(found, named, step, base, root)
            print_notes(loaded.notes)
            loaded.quantize(weights)
        else:
            loaded, served = open_model(found, step, base, weights), []
        print_notes([remark(template_of(loaded, template), template)])
        return loaded, served

    serve(load, server, say)


def named_adapters(words: Sequence[str]) -> dict[str, str]:
    """Return name → source of --adapter NAME=SOURCE, given any number of times."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, source = word.partition("=")
        if not name or not equals or not source:
            raise InputError(f"--adapter {word}: write NAME=RUN, or NAME=FOLDER of adapters that PEFT saved.")
        if name in found:
            raise InputError(f"--adapter {word}: the name '{name}' is given twice.")
        found[name] = source
    return found
