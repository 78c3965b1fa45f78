"""`bessemer chat`: talk to a run's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bessemer.cli.options import BASE, DECODING, RUN, RUNS, SAMPLING, STEP, TEMPLATE, open_model, print_notes, say

if TYPE_CHECKING:
    from bessemer.generate import Speculation


@click.command("chat")
@RUN
@STEP
@click.option("--system", help="A system message before the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Length of one answer.")
@SAMPLING
@click.option("--seed", type=int, help="The same seed gives the same answers; default: a new one.")
@DECODING
@TEMPLATE
@BASE
@RUNS
def command(
    run: str,
    step: int | str | None,
    system: str | None,
    max_tokens: int,
    seed: int | None,
    base: str | None,
    root: str,
    drafts: Speculation | None,
    weights: str,
    **options: Any,
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

    from bessemer.generate import Engine, SamplingOptions
    from bessemer.job import find_run
    from bessemer.serve.chat import PREPARING, Chat, Repl, read_line, remark, template_of

    chosen = secrets.randbits(32) if seed is None else seed
    template = options.pop("template")
    sampling = SamplingOptions(seed=chosen, **options)
    found = find_run(run, root)
    loaded = open_model(found, step, base, weights)
    form = template_of(loaded, template)
    print_notes([remark(form, template)])
    say(f"{found.name}, step {loaded.step}, seed {chosen}. /help lists the commands.")
    engine = Engine.of(loaded, slots=1, reuse=True, speculate=drafts)
    chat = Chat(engine, form, sampling, chosen, max_tokens, system)
    if sys.stdin.isatty():  # compile before somebody waits for an answer; a pipe compiles only what it needs
        say(PREPARING)
        chat.warm_up()
    Repl(chat, read_line, say).run()
