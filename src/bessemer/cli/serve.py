"""`bessemer serve`: a run's model behind an OpenAI-compatible server."""

from __future__ import annotations

import os
from typing import Any

import click

from bessemer.cli.options import BASE, RUNS, STEP, TEMPLATE, open_model, print_notes, say


@click.command("serve")
@click.argument("run")
@STEP
@click.option("--host", default="127.0.0.1", show_default=True, help="Any other address needs a token.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 picks a free one.")
@click.option("--token-file", help="File with the token clients must send; default: $BESSEMER_API_TOKEN, if set.")
@click.option("--slots", type=int, default=16, show_default=True, help="Answers generated at once.")
@click.option("--queue", type=int, default=256, show_default=True, help="Answers that may wait; more get status 429.")
@click.option("--timeout", type=float, default=300, show_default=True, help="Seconds a request may take.")
@TEMPLATE
@BASE
@RUNS
def command(
    run: str, step: int | str | None, token_file: str | None, template: str, base: str | None, root: str, **options: Any
) -> None:
    """Serve a run's model to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    Ctrl-C or SIGTERM stops it; answers still generating have ten seconds to finish.

    \b
    Examples:
      bessemer serve runs/mine
      bessemer serve mine --step 512 --port 8001 --slots 64
      BESSEMER_API_TOKEN=… bessemer serve mine --host 0.0.0.0
    """
    from bessemer.generate import LoadedModel
    from bessemer.job import find_run
    from bessemer.serve.app import ServerOptions, serve
    from bessemer.serve.conversation import remark, template_of
    from bessemer.serve.net import TOKEN_VARIABLE, read_token

    token = read_token(token_file, os.environ.get(TOKEN_VARIABLE))
    server = ServerOptions(token=token, template=template, **options)
    found = find_run(run, root)

    def load() -> LoadedModel:
        loaded = open_model(found, step, base)
        print_notes([remark(template_of(loaded, template), template)])
        return loaded

    serve(load, server, say)
