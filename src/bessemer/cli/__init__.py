"""The command line: one file per command, imported when it is called, so that `bessemer --help` is instant."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import keyword
import os
import sys
import time
import traceback
from typing import Any

import click
from click.shell_completion import CompletionItem

from bessemer import __version__
from bessemer.cli.options import keep_memory, outlive_readers, skip_cuda_checks
from bessemer.errors import BessemerError, InputError, Stopped, did_you_mean, printable, runnable

BEGAN = time.monotonic()
"""When the program started, for the time to the first step."""

COMMANDS = {
    "train": "Train a model; with no arguments, the quickstart.",
    "resume": "Continue a stopped or killed run, bit for bit.",
    "runs": "List runs with their state.",
    "doctor": "Check a run and say what can be resumed.",
    "rm": "Delete a run.",
    "report": "Rewrite a run's report: tables and curves.",
    "compare": "Compare runs: results, settings that differ, curves.",
    "sample": "Continue a prompt with a trained model.",
    "chat": "Chat with a trained model.",
    "serve": "Serve a trained model over an OpenAI-compatible API.",
    "dash": "Watch runs in a browser: live curves, comparison, chat, stop and resume.",
    "eval": "Evaluate a trained model.",
    "import": "Import a Hugging Face model as a run.",
    "export": "Export a trained model for other programs.",
    "recipes": "List the shipped recipes.",
    "plan": "Show what a recipe will take: sizes, schedules, memory, time.",
    "launch": "Train with one process per GPU, or write a job file for SLURM or Kubernetes.",
    "config": "Show the resolved settings of a recipe, each with its origin.",
    "tokenizer": "Train a tokenizer.",
    "data": "Prepare text for training, and inspect prepared data.",
    "completion": "Print the completion script of bash, zsh or fish.",
}


class LazyGroup(click.Group):
    """Each command is a module `bessemer.cli.NAME` (`import_` for import) with a click command called `command`."""

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
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from bessemer.config import is_shipped_recipe

            hint = did_you_mean(args[0], list(COMMANDS))
            if is_shipped_recipe(args[0]):
                hint = f" It is a recipe: bessemer train {args[0]}."
            raise InputError(f"unknown command '{args[0]}'.{hint} `bessemer --help` lists them.")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands without importing them."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=about) for name, about in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bessemer")
def cli() -> None:
    """Train language models, from raw text to a model you can chat with, on a CPU, a GPU or many hosts.

    \b
    Start here (no GPU, no download, a few minutes):
      bessemer train
    Then:
      bessemer train training.dataset=my.txt            on your own text
      bessemer dash                                     all runs in a browser
      bessemer plan pretrain model.depth=12             what a larger model needs
      bessemer resume runs/NAME
    """


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line. An expected error is one paragraph on stderr and the exit code of its class."""
    if arguments is None:
        if "_BESSEMER_COMPLETE" in os.environ:  # a shell asks for completions; click answers in `cli.main`
            from bessemer.cli.completion import answer_the_shell

            answer_the_shell()
        skip_cuda_checks()
        atexit.register(_skip_finalization)  # first, hence run last: jax and trackers have ended their own work
        if sys.argv[1:2] in (["train"], ["resume"]):
            keep_memory()
            outlive_readers()
        elif sys.argv[1:3] == ["launch", "local"]:
            outlive_readers()
    try:
        code = cli.main(arguments, prog_name="bessemer", standalone_mode=False)
        _exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        _exit(130)
    except click.ClickException as error:
        error.show()
        _exit(2)
    except BessemerError as error:
        text = f"error: {error}" if error.exit_code != 75 else str(error)
        print(runnable(printable(text)), file=sys.stderr)
        _leave(error.exit_code)
    except BrokenPipeError:
        # nobody reads our output any more (`bessemer runs | head`), which is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(0)
    except Exception as error:  # noqa: BLE001 -- a bug, reported in one paragraph
        _report_bug(error)
        _leave(1)


def _report_bug(error: Exception) -> None:
    """Print a bug, of Bessemer or of code that the user named. Its traceback is in the run's log if there is one, else
    on the screen."""
    log = getattr(error, "logged_in", None)
    if log is None:
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    from bessemer.user_code import line_of

    where = f" The traceback is in {log}." if log else ""
    line, raised_there = line_of(error)
    what = f"{type(error).__name__}: {error}.{where}"
    if line is None:
        text = f"error: a bug in bessemer: {what} Please report it."
    elif raised_there:
        text = f"error: in {line}: {what}"
    else:
        text = f"error: called by {line}: {what} If your code is right, this is a bug in bessemer: please report it."
    print(printable(text), file=sys.stderr)


def _leave(code: int) -> None:
    """Exit. In a multi-process run exit at once, as jax's exit barrier waits minutes for a dead peer.

    At an agreed stop all peers are alive, and a regular exit keeps process 0 from cutting them off.
    """
    jax = sys.modules.get("jax")
    if code != Stopped.exit_code and jax is not None and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _exit(code)


_exit_code: int | None = None


def _exit(code: int) -> None:
    global _exit_code
    _exit_code = code
    sys.exit(code)


def _skip_finalization() -> None:
    """End the process once all other exit functions have run, before the interpreter is taken apart.

    Before Python 3.14 a daemon thread that returns from native code during finalization is ended by unwinding through
    C++ frames, which aborts the process: a finished run of two processes ended with -11.
    """
    if _exit_code is not None and "jax" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_exit_code)
