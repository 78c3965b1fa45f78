"""The command line: one file a command, loaded when it is called, so that `bessemer --help` is instant."""

from __future__ import annotations

import importlib
import keyword
import os
import sys
import time
import traceback
from typing import Any

import click

from bessemer import __version__
from bessemer.cli.options import keep_memory, outlive_readers
from bessemer.errors import BessemerError, InputError, Stopped, nearest, printable, runnable

BEGAN = time.monotonic()
"""When the program began, for the time to the first step; only the interpreter's own start comes before."""

COMMANDS = {
    "train": "Train a model; with no arguments, the quickstart.",
    "resume": "Continue a stopped or killed run, exactly.",
    "runs": "List runs with their state.",
    "doctor": "Check a run and say what can be resumed.",
    "rm": "Delete a run.",
    "report": "Write a run's report again: tables and curves.",
    "compare": "Put runs side by side: results, settings that differ, curves.",
    "sample": "Let a trained model continue a prompt.",
    "chat": "Talk to a trained model.",
    "serve": "Serve a trained model to OpenAI's clients.",
    "dash": "Watch runs in a browser: live curves, overlays, chat, stop and resume.",
    "eval": "Measure a trained model.",
    "import": "Make a run of a Hugging Face model.",
    "export": "Write a trained model for other programs.",
    "recipes": "List the shipped recipes.",
    "plan": "Say what a recipe will take: sizes, schedules, memory, time.",
    "launch": "Write the job file of a recipe for SLURM or Kubernetes.",
    "config": "Show the resolved settings of a recipe, each with its origin.",
    "tokenizer": "Train a tokenizer.",
    "data": "Prepare text for training, and look at what was prepared.",
}


class LazyGroup(click.Group):
    """Commands are modules `bessemer.cli.NAME` (`import_` for import) with a click command called `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = f"{name}_" if keyword.iskeyword(name) else name
        return importlib.import_module(f"bessemer.cli.{module}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = nearest(args[0], list(COMMANDS))
            hint = f" Did you mean '{close}'?" if close else ""
            raise InputError(f"unknown command '{args[0]}'.{hint} `bessemer --help` lists them.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bessemer")
def cli() -> None:
    """Train language models: from raw text to a model you can talk to, on a CPU, a GPU or many hosts.

    \b
    Start here (no GPU, no download, a few minutes):
      bessemer train
    Then:
      bessemer train training.dataset=my.txt            on your own text
      bessemer dash                                     all runs in a browser
      bessemer plan pretrain model.depth=12             what a larger model takes
      bessemer resume runs/NAME
    """


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: errors become one plain paragraph on stderr and the exit code of their kind."""
    if arguments is None and sys.argv[1:2] in (["train"], ["resume"]):
        keep_memory()
        outlive_readers()
    try:
        code = cli.main(arguments, prog_name="bessemer", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except BessemerError as error:
        text = f"error: {error}" if error.exit_code != 75 else str(error)
        print(runnable(printable(text)), file=sys.stderr)
        _leave(error.exit_code)
    except BrokenPipeError:
        # the reader of our output has gone (`bessemer runs | head`): nothing is wrong with us
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 -- the last line of defence: a bug, said in one paragraph
        _report_bug(error)
        _leave(1)


def _report_bug(error: Exception) -> None:
    """The traceback goes to the run's log where there is one, else to the screen."""
    log = getattr(error, "logged_in", None)
    if log is None:
        traceback.print_exception(error)
    where = f" The traceback is in {log}." if log else ""
    print(
        f"error: a bug in bessemer: {type(error).__name__}: {error}.{where} Please report it.",
        file=sys.stderr,
    )


def _leave(code: int) -> None:
    """Exit; in a multi-process run at once, as jax's exit barrier waits for a dead peer for minutes.

    At an agreed stop all peers are alive, and leaving in order keeps process 0 from cutting them off.
    """
    jax = sys.modules.get("jax")
    if code != Stopped.exit_code and jax is not None and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
