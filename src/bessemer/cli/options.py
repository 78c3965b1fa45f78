"""What commands share: options, answers to flags of other programs, and how the process itself is set up."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from bessemer.cli.completion import complete_run, complete_settings, complete_words
from bessemer.config import Schema, is_shipped_recipe, slashed
from bessemer.config.aliases import VALUE, Answer, answer, choices, together
from bessemer.errors import InputError

if TYPE_CHECKING:
    from bessemer.generate import LoadedModel
    from bessemer.job import RunDirectory

Decorator = Callable[[Any], Any]


class Step(click.ParamType):
    """A checkpoint: its step (512), or the stage it ended (stage-1)."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int | str:
        if isinstance(value, int) or re.fullmatch(r"stage-\d+", value):
            return value
        if not re.fullmatch(r"\d+", value):
            self.fail(f"'{value}' is neither a step nor the end of a stage such as stage-1.", param, context)
        return int(value)


def several(*options: Decorator) -> Decorator:
    """Return the options as one decorator; --help lists them in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def takes_drafts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Pass `drafts`, a Speculation or None for plain decoding, in place of --speculate, --draft and --ngram."""

    @functools.wraps(command)
    def with_drafts(*args: Any, speculate: str, draft: int, ngram: int, **options: Any) -> Any:
        from bessemer.generate import Speculation

        source = click.get_current_context().get_parameter_source
        for name in ("draft", "ngram"):
            if speculate == "none" and source(name) is ParameterSource.COMMANDLINE:
                raise InputError(f"--{name} is for drafts, and there are none: add --speculate ngram, or leave it out.")
        return command(*args, drafts=Speculation.of(speculate, draft, ngram), **options)

    return with_drafts


RUNS = click.option("--runs", "root", default="runs", show_default=True, help="Directory that holds the runs.")
STEP = click.option("--step", type=Step(), help="Checkpoint to use, or stage-N; default: the newest valid one.")
BASE = click.option("--base", metavar="PATH", help="Base model of the adapters, in place of the path in the run.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
RUN = click.argument("run", shell_complete=complete_run)
WORDS = click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE] [key=value ...]", shell_complete=complete_words
)
SETTINGS = click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[key=value ...]", shell_complete=complete_settings
)
FORWARD = {"ignore_unknown_options": True, "allow_extra_args": True}  # flags of other programs reach `refuse_flags`
SAMPLING = several(
    click.option("--temperature", type=float, default=0.8, show_default=True, help="0 takes the most likely token."),
    click.option("--top-k", type=int, default=0, help="Sample from the K most likely tokens only."),
    click.option(
        "--top-p", type=float, default=1.0, help="Sample from the most likely tokens that reach probability P."
    ),
)
DECODING = several(
    click.option(
        "--speculate",
        type=click.Choice(["none", "ngram"]),
        default="none",
        show_default=True,
        help="ngram: drafts from the text itself, several tokens checked per pass; the text stays the same.",
    ),
    click.option("--draft", type=click.IntRange(1, 64), default=4, show_default=True, help="Tokens of a draft."),
    click.option(
        "--ngram",
        type=click.IntRange(1, 16),
        default=3,
        show_default=True,
        help="A draft follows the latest place with the most last tokens in common, at most N.",
    ),
    click.option(
        "--weights",
        type=click.Choice(["auto", "fp8", "int8"]),
        default="auto",
        show_default=True,
        help="Matrices in 8 bits: half the memory of bf16, slightly other text.",
    ),
    takes_drafts,
)
TEMPLATE = click.option(
    "--template",
    type=click.Choice(["auto", "chat", "plain"]),
    default="auto",
    show_default=True,
    help="chat: the tokens of turns; plain: a transcript, for a model trained on documents.",
)
TEXT_KEY = click.option(
    "--text-key", metavar="COLUMN", help="Column with the text; default: text, else conversations (docs/chat-data.md)."
)


def say(text: str) -> None:
    """Print a line on stderr."""
    click.echo(text, err=True)


def print_notes(notes: Iterable[str | None]) -> None:
    """Print notes on stderr, without those that are None."""
    for note in notes:
        if note:
            say(f"note: {note}")


def open_model(
    run: RunDirectory, step: int | str | None, base: str | None = None, weights: str = "auto"
) -> LoadedModel:
    """Load the model of a run, keeping compiled programs on disk, and print its notes. weights: of `DECODING`."""
    from bessemer.generate import load_model
    from bessemer.training.setup.compiled import keep_compiled_programs

    keep_compiled_programs(None)
    loaded = load_model(run, step, base=base, weights=weights)
    print_notes(loaded.notes)
    return loaded


# Flags of other programs


def refuse_flags(words: Sequence[str], schema: Callable[[list[str]], Schema] | None = None) -> None:
    """Raise InputError if there are flags in `words`, naming for each the setting to write instead where there is one,
    and what is wrong with the other settings.

    `schema` returns the settings of the run that the other words describe; without it the answers cannot depend on the
    selected optimizer or objective.
    """
    flags, plain = _parted(words)
    if not flags:
        return
    given = [(name, text) for name, equals, text in (word.partition("=") for word in plain) if equals]
    run = None
    if schema is not None:
        known = {name for name, _ in given}
        chosen = [f"{key}={text}" for key, text in choices([*flags, *given]).items() if key not in known]
        for selecting in (chosen, []):  # without what the flags select, if together they make no sense
            with contextlib.suppress(InputError):  # another word is wrong too: reported once the flags are gone
                run = run or schema([*plain, *selecting])
    found = [(name, _answer(name, value, run)) for name, value in flags]
    problems = [_sentence(name, answered, len(flags) > 1) for name, answered in found]
    answers = [answered for _, answered in found]
    if run is not None:
        for name, text in given:
            if run.covering(slashed(name)) is None:
                problem = run.unknown(slashed(name), text)
                problems.append(f"{problem[:1].upper()}{problem[1:]}" + ("" if problem.endswith("?") else "."))
                answers.append(run.answer(name, text))
    if written := together([answered for answered in answers if answered]):
        problems.append(f"Together: {written}")
    begin = "These are not Bessemer flags. " if len(flags) > 1 else ""
    raise InputError(begin + " ".join(problems))


def _parted(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags, each with its value, and the other words."""
    flags, plain, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals and rest and _is_value(rest[0]):
            value = rest.pop(0)
        flags.append((name, value or VALUE))
    return flags, plain


def _answer(name: str, value: str, run: Schema | None) -> Answer | None:
    key = name.lstrip("-").replace("-", "_")
    if run is not None and key in run:
        return Answer((f"{key}={value}",))
    return answer(name, value) if run is None else run.answer(name, value)


def _sentence(name: str, answered: Answer | None, among_others: bool) -> str:
    if among_others:
        return f"{name}: {answered or 'unknown'}."
    if answered is None:
        return f"unknown flag '{name}'. Settings are written key=value, without dashes; see --help."
    if answered.words[:1] and answered.words[0].partition("=")[0] == name.lstrip("-").replace("-", "_"):
        return f"'{name}' is a setting, and settings have no dashes: {answered}."
    return f"'{name}' is not a Bessemer flag: {answered}."


def _is_value(word: str) -> bool:
    """Return whether a word after a flag is its value, as in `--depth 12 quickstart`."""
    if word.startswith("-"):
        return word[1:2].isdigit()
    return "=" not in word and not is_shipped_recipe(word) and not word.endswith((".yaml", ".yml"))


# The process: memory allocation and closed output streams

# XLA allocates and frees its temporary buffers every step. glibc maps and unmaps them each time, and the page faults
# took a fifth of the quickstart's time (13.3k → 16.2k tokens/s on two cores). glibc reads these settings at start only.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


def keep_memory() -> None:
    """Restart this process with `MALLOC` set, unless it is, there is an accelerator, or the C library is not glibc."""
    if any(name in os.environ for name in MALLOC) or not sys.platform.startswith("linux"):
        return
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or any(glob.glob(path) for path in ACCELERATORS):
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **MALLOC})


NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last one in WSL


def skip_cuda_checks() -> None:
    """Keep JAX silent about missing CUDA libraries where there is no NVIDIA GPU: the extra `gpu-plan` installs its
    plugin without them, and every start would print a traceback."""
    if not any(os.path.exists(path) for path in NVIDIA):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)


def outlive_readers() -> None:
    """Let the run continue when a pipe or the terminal is closed: log.txt has every line. A None stream stays None."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, Lasting(stream))


class Lasting:
    """A text stream that is discarded once nobody reads it."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # buffered text goes there too
            os.close(nowhere)
            if self is not sys.stderr:
                with contextlib.suppress(OSError):
                    print(
                        "note: the output was closed; the run continues, and its log.txt has every line",
                        file=sys.stderr,
                    )
