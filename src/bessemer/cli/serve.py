"""`bessemer serve`: a run's model behind an OpenAI-compatible server."""

from __future__ import annotations

import os

import click

from bessemer.cli.options import STEP


@click.command("serve")
@click.argument("run")
@click.option("--step", type=STEP, help="Checkpoint to use, or stage-N; default: the newest valid one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Any other needs a token.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 takes any that is free.")
@click.option(
    "--token-file", help="File with the token clients must send; default: that of BESSEMER_API_TOKEN, if set."
)
@click.option("--slots", type=int, default=16, show_default=True, help="Answers written at once.")
@click.option("--queue", type=int, default=256, show_default=True, help="Answers that may wait; beyond: 429.")
@click.option("--timeout", type=float, default=300, show_default=True, help="Seconds a request may take.")
@click.option(
    "--template",
    type=click.Choice(["auto", "chat", "plain"]),
    default="auto",
    show_default=True,
    help="How conversations are put to the model; see `bessemer chat --help`.",
)
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(
    run: str,
    step: int | str | None,
    host: str,
    port: int,
    token_file: str | None,
    slots: int,
    queue: int,
    timeout: float,
    template: str,
    root: str,
) -> None:
    """Serve a run's model to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    Ctrl-C or SIGTERM stops it; answers that are being written have ten seconds to finish.

    \b
    Examples:
      bessemer serve runs/mine
      bessemer serve mine --step 512 --port 8001 --slots 64
      BESSEMER_API_TOKEN=… bessemer serve mine --host 0.0.0.0
    """
    from bessemer.generate import LoadedModel, load_model
    from bessemer.job import find_run
    from bessemer.serve.conversation import remark, template_of
    from bessemer.serve.net import TOKEN_VARIABLE, read_token
    from bessemer.serve.server import ServerOptions, serve
    from bessemer.training.setup.compiled import keep_compiled_programs

    token = read_token(token_file, os.environ.get(TOKEN_VARIABLE))
    options = ServerOptions(host, port, token, slots, queue, timeout, template)
    found = find_run(run, root)

    def load() -> LoadedModel:
        keep_compiled_programs(None)
        loaded = load_model(found, step)
        for note in (*loaded.notes, remark(template_of(loaded, template), template)):
            if note:
                click.echo(f"note: {note}", err=True)
        return loaded

    serve(load, options, lambda text: click.echo(text, err=True))
