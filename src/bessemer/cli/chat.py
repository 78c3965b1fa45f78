"""`bessemer chat`: talk to a run's model."""

from __future__ import annotations

import click

from bessemer.cli.options import STEP


@click.command("chat")
@click.argument("run")
@click.option("--step", type=STEP, help="Checkpoint to use, or stage-N; default: the newest valid one.")
@click.option("--system", help="A message to the model before the conversation.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Of one answer."
)
@click.option(
    "--temperature", type=float, default=0.8, show_default=True, help="0 takes the most likely token."
)
@click.option("--top-k", type=int, default=0, help="Draw from the K most likely tokens only.")
@click.option(
    "--top-p", type=float, default=1.0, help="Draw from the most likely tokens that reach probability P."
)
@click.option("--seed", type=int, help="The same seed gives the same answers; default: a new one.")
@click.option(
    "--template",
    type=click.Choice(["auto", "chat", "plain"]),
    default="auto",
    show_default=True,
    help="chat: the tokens of turns; plain: a transcript, for a model trained on documents.",
)
@click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
def command(
    run: str,
    step: int | str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    template: str,
    root: str,
) -> None:
    """Talk to a run's model. /help lists the commands; Ctrl-D leaves.

    \b
    Examples:
      bessemer chat runs/mine
      bessemer chat mine --step 512 --temperature 0
      echo "Why is the sky blue?" | bessemer chat mine --seed 7
    """
    import secrets
    import sys

    from bessemer.generate import Engine, SamplingOptions, load_model
    from bessemer.job import find_run
    from bessemer.serve.chat import Chat, Repl, read_line
    from bessemer.serve.conversation import PREPARING, remark, template_of
    from bessemer.training.setup.compiled import keep_compiled_programs

    chosen = secrets.randbits(32) if seed is None else seed
    sampling = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=chosen)
    found = find_run(run, root)
    keep_compiled_programs(None)
    loaded = load_model(found, step)
    form = template_of(loaded, template)
    for note in (*loaded.notes, remark(form, template)):
        if note:
            click.echo(f"note: {note}", err=True)
    click.echo(f"{found.name}, step {loaded.step}, seed {chosen}. /help lists the commands.", err=True)
    engine = Engine.of(loaded, slots=1, reuse=True)
    chat = Chat(engine, form, sampling, chosen, max_tokens, system)
    if (
        sys.stdin.isatty()
    ):  # somebody will wait for the answer; a pipe asks for one thing, which compiles as it comes
        click.echo(PREPARING, err=True)
        chat.warm_up()
    Repl(chat, read_line, lambda text: click.echo(text, err=True)).run()
