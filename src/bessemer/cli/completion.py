"""What shell completion offers, and `bessemer completion`: the script that makes a shell complete it.

Completed are commands, options, recipes, settings and their values, and names of runs. The settings are those of
`settings.json`, which `make reference` writes from their declarations. Nothing here imports jax.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any, ClassVar, NamedTuple

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

from bessemer.config import recipe_names
from bessemer.errors import BessemerError

# --- candidates ---


Items = list[CompletionItem]

FILES, NOTHING = "file", "none"
"""Types of an item that the scripts below know besides "plain"."""

RUNS_OR_RECIPES = ("init", "distill.teacher")
"""Settings whose value is a run, a model folder or recipe:NAME."""


class Known(NamedTuple):
    """A setting as completion sees it. `values`: its choices, if it has any; `text`: any text, such as a file."""

    help: str
    values: list[str]
    text: bool
    many: bool


@functools.cache
def known_settings() -> dict[str, Known]:
    """Return dotted name → setting, of every part of the package."""
    text = resources.files("bessemer.cli").joinpath("settings.json").read_text(encoding="utf-8")
    return {name: Known(**facts) for name, facts in json.loads(text).items()}


def complete_words(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions of a word of `[RECIPE] [key=value ...]`: recipes, sections, settings, values."""
    return [*_recipes(incomplete), *complete_settings(context, parameter, incomplete)]


def complete_settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions of `section.key=value`; without a dot, of the sections."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return _values(key, value, _root(context))
    settings = known_settings()
    found = [_item(f"{name}=", one.help) for name, one in settings.items() if name.startswith(key)]
    if "." in key:
        return found
    sections: dict[str, list[str]] = {}
    for name in settings:
        section, dot, rest = name.partition(".")
        if dot and section.startswith(key):
            sections.setdefault(section, []).append(rest)
    top = [item for item in found if "." not in item.value]
    return [*top, *(_item(f"{name}.", _summary(names)) for name, names in sections.items())]


def complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions of a run: its name below --runs, or its path; else files."""
    root = _root(context)
    names = [*_runs(root, ""), *_runs(root, f"{root.rstrip('/')}/" if "/" in incomplete else "")]
    found = [_item(name, "") for name in dict.fromkeys(names) if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type=FILES)]


def _recipes(incomplete: str) -> Iterator[CompletionItem]:
    if "=" in incomplete:
        return
    yield from (_item(name, "recipe") for name in recipe_names() if name.startswith(incomplete))
    if "/" in incomplete or incomplete.startswith("."):
        yield CompletionItem(incomplete, type=FILES)


def _values(key: str, value: str, root: str) -> Items:
    setting = known_settings().get(key)
    if setting is None:
        return [CompletionItem("", type=NOTHING)]
    choices: Iterable[str] = setting.values
    if key in RUNS_OR_RECIPES:
        choices = [*_runs(root, f"{root.rstrip('/')}/"), *(f"recipe:{name}" for name in recipe_names())]
    head = ""
    if setting.many and "[" in value:  # callbacks=[goal,early → the last one
        last = max(value.rfind("["), value.rfind(",")) + 1
        head, value = value[:last], value[last:]
    found = [_item(f"{key}={head}{choice}", setting.help) for choice in choices if choice.startswith(value)]
    if found:
        return found
    return [CompletionItem(f"{key}={value}", type=FILES if setting.text else NOTHING)]


def _root(context: click.Context) -> str:
    return str(context.params.get("root") or "runs")


def _runs(root: str, prefix: str) -> list[str]:
    """Return the names of the runs below `root`, each after `prefix`; [] if they cannot be listed."""
    from bessemer.job.directory import check_run_name
    from bessemer.job.runs import list_runs

    def nameable(name: str) -> bool:
        try:
            return bool(check_run_name(name))
        except BessemerError:
            return False

    try:
        return [f"{prefix}{name}" for name in list_runs(root) if nameable(name)]
    except (BessemerError, OSError, ValueError):
        return []


def _item(value: str, help: str) -> CompletionItem:
    return CompletionItem(value, help=re.sub(r"\s+", " ", help) or None)


def _summary(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", … ({len(names)})" if len(names) > 4 else "")


# --- the script ---


VARIABLE = "_BESSEMER_COMPLETE"
"""The environment variable with which the scripts ask this program for completions; click reads it."""

# The scripts send the line up to the cursor, since bash splits words at = and :, and get lines of type, value and help,
# separated by tabs. `file`: complete file names; `none`: nothing fits, and file names do not either.

BASH = r"""# Completion of bessemer for bash. Source this file, for example in ~/.bashrc.
_bessemer_completion() {
    local type value help answer open=""
    COMPREPLY=()
    answer=$(COMPLETED_LINE="${COMP_LINE:0:COMP_POINT}" COMPLETED_BREAKS="$COMP_WORDBREAKS" \
        _BESSEMER_COMPLETE=bash_complete "$1" 2>/dev/null)
    while IFS=$'\t' read -r type value help; do
        case $type in
            plain)
                COMPREPLY+=("$value")
                [[ $value == *[=.] ]] && open=yes
                ;;
            none) compopt +o default ;;
        esac
    done <<<"$answer"
    [[ -z $open ]] || compopt -o nospace
}
complete -o default -o nosort -F _bessemer_completion bessemer
"""

ZSH = r"""#compdef bessemer
# Completion of bessemer for zsh: a file named _bessemer in a directory of $fpath, or source it after compinit.
_bessemer() {
    local -a lines closed open
    local line type value help files=1
    lines=("${(@f)$(COMPLETED_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" \
        _BESSEMER_COMPLETE=zsh_complete "${words[1]}" 2>/dev/null)}")
    for line in $lines; do
        IFS=$'\t' read -r type value help <<<"$line"
        case $type in
            plain)
                files=0
                help=${value//:/\\:}${help:+:$help}
                if [[ $value == *[=.] ]]; then open+=("$help"); else closed+=("$help"); fi
                ;;
            none) files=0 ;;
        esac
    done
    (( $#open )) && _describe -V bessemer open -S ''
    (( $#closed )) && _describe -V bessemer closed
    if (( files )); then
        compset -P '*='
        _files
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _bessemer "$@"; else compdef _bessemer bessemer; fi
"""

FISH = r"""# Completion of bessemer for fish: ~/.config/fish/completions/bessemer.fish
function __bessemer_completion
    set -l program (commandline -opc)[1]
    set -l files 1
    for line in (COMPLETED_LINE=(commandline -cp) _BESSEMER_COMPLETE=fish_complete $program 2>/dev/null)
        set -l parts (string split \t -- $line)
        switch $parts[1]
            case plain
                set files 0
                printf '%s\t%s\n' $parts[2] $parts[3]
            case none
                set files 0
        end
    end
    if test $files -eq 1
        set -l word (commandline -ct)
        set -l key (string match -r '^[^=]*=' -- $word)
        for path in (__fish_complete_path (string replace -r '^[^=]*=' '' -- $word))
            printf '%s%s\n' "$key" $path
        end
    end
end
complete --command bessemer --no-files --arguments '(__bessemer_completion)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


class Completion(ShellComplete):
    """Reads the line that a script sends and answers with one line per candidate."""

    source_template = ""

    def source(self) -> str:
        return SCRIPTS[self.name]

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMPLETED_LINE", "")
        words = split_arg_string(line)[1:]
        return (words[:-1], words[-1]) if words and not line[-1].isspace() else (words, "")

    def complete(self) -> str:
        words, incomplete = self.get_completion_args()
        cut = self.before(incomplete)
        return "\n".join(
            self.format_completion(item)
            for item in self.get_completions(words, incomplete)
            if item.type != "plain" or item.value.startswith(cut)
        )

    def before(self, incomplete: str) -> str:
        """Return the part of the word that the shell does not replace, and so expects no candidate to begin with."""
        return ""

    def format_completion(self, item: CompletionItem) -> str:
        value = str(item.value).removeprefix(self.before(self.get_completion_args()[1]))
        return "\t".join((item.type, value, item.help or ""))


class BashCompletion(Completion):
    name: ClassVar[str] = "bash"

    def before(self, incomplete: str) -> str:
        """Bash replaces what follows the last of the characters at which it splits words, among them = and :."""
        breaks = "".join(letter for letter in "=:" if letter in os.environ.get("COMPLETED_BREAKS", ""))
        found = re.match(rf".*[{breaks}]", incomplete) if breaks else None
        return found[0] if found else ""


class ZshCompletion(Completion):
    name: ClassVar[str] = "zsh"


class FishCompletion(Completion):
    name: ClassVar[str] = "fish"


def answer_the_shell() -> None:
    """Let click answer with these classes when a script asks."""
    for cls in (BashCompletion, ZshCompletion, FishCompletion):
        add_completion_class(cls)


@click.command("completion")
@click.argument("shell", type=click.Choice(list(SCRIPTS)))
def command(shell: str) -> Any:
    """Print the script that makes SHELL complete commands, options, recipes, settings, their values, and runs.

    \b
    Install it, once:
      bessemer completion bash > ~/.bessemer.bash && echo 'source ~/.bessemer.bash' >> ~/.bashrc
      bessemer completion zsh > ~/.zfunc/_bessemer      # with `fpath+=~/.zfunc` before compinit in ~/.zshrc
      bessemer completion fish > ~/.config/fish/completions/bessemer.fish
    Then open a new shell and try:
      bessemer train quickstart optimization.name=<TAB>
    """
    click.echo(SCRIPTS[shell], nl=False)
