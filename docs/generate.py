"""Write the reference from the code: `make reference`. A test compares what is there with what this would write.

docs/reference/*.md are the settings, the command line, Python, the metrics, the errors and the run directory;
src/bessemer/cli/settings.json is what shell completion knows of the settings.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml

import bessemer
from bessemer import errors, registry
from bessemer.cli import COMMANDS, cli
from bessemer.config import declared, dotted
from bessemer.config.declare import Setting
from bessemer.config.values import describe, plain
from bessemer.console import show
from bessemer.job.directory import RunDirectory
from bessemer.job.runs import BESIDE
from bessemer.training.setup.schema import schema_of

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
SETTINGS = ROOT / "src" / "bessemer" / "cli" / "settings.json"
METRICS = ROOT / "docs" / "metrics.yaml"
NOTE = "<!-- Written by `make reference` from the code. Do not edit. -->"


def files() -> dict[Path, str]:
    """Return path → contents of every generated file."""
    found = declarations()
    return {
        PAGES / "settings.md": settings_page(found),
        PAGES / "command-line.md": command_line_page(),
        PAGES / "python.md": python_page(),
        PAGES / "metrics.md": metrics_page(),
        PAGES / "exit-codes.md": exit_codes_page(),
        PAGES / "run-directory.md": run_directory_page(),
        SETTINGS: one_per_line(for_completion(found)),
    }


# --- settings ---
class Declaration(NamedTuple):
    """A setting as one class declares it; `needs`: selector → names that select the class, {} if every run has it."""

    setting: Setting
    needs: dict[str, list[str]]


def declarations() -> dict[str, list[Declaration]]:
    """Return dotted key → its declarations by the classes of the package, in alphabetical order."""
    usual = schema_of({}).settings.values()
    reached = {(one.owner, one.key): Declaration(one, {}) for one in usual}
    for selector, entries in registry.SELECTORS.items():
        for entry in entries:
            for one in (one for cls in registry.settings_classes(entry) for one in declared(cls).values()):
                needs = reached.setdefault((one.owner, one.key), Declaration(one, {})).needs
                needs.setdefault(dotted(selector), []).append(entry.name)
    of_every_run = {one.owner for one in usual}
    found: dict[str, list[Declaration]] = {}
    for (owner, key), one in reached.items():
        for selector, entries in registry.SELECTORS.items():
            names = list(dict.fromkeys(one.needs.pop(dotted(selector), ())))
            common = owner in of_every_run and selector in ("job", "callbacks")
            if names and names != entries.names() and not common:
                one.needs[dotted(selector)] = names
        found.setdefault(dotted(key), []).append(one)
    for declared_by in found.values():
        declared_by.sort(key=lambda one: (one.setting.owner_name, str(one.needs)))  # variants share a name
    return dict(sorted(found.items()))


def settings_page(found: Mapping[str, list[Declaration]]) -> str:
    """One table per section; a setting that several classes declare differently has a row for each."""
    sections: dict[str, list[str]] = {}
    for key in found:
        sections.setdefault(key.partition(".")[0] if "." in key else "", []).append(key)
    text = [
        "# Settings",
        NOTE,
        f"Every setting of the package: {len(found)} in {len(sections) - 1} sections. Write them as "
        "`section.key=value` on the command line, or nested in a YAML recipe.",
        "```bash\nbessemer config quickstart                      # values and origins of one recipe\n"
        "bessemer config pretrain --schema               # JSON Schema, for editors\n```",
        "The last column names the module that declares the setting and, for settings of a part, the words that select "
        "the part. [Configuration](../configuration.md) explains recipes and overrides.",
    ]
    for section in sorted(sections):
        rows = [settings_row(key, one) for key in sections[section] for one in found[key]]
        text += [f"## {section or 'Top level'}", table(("setting", "type and range", "default", "meaning", "in"), rows)]
    return page(text)


def settings_row(key: str, one: Declaration) -> tuple[str, ...]:
    setting = one.setting
    kind = describe(setting.type)
    if setting.choices is not None:
        kind = ("list of " if kind.startswith("list of") else "") + ", ".join(f"`{word}`" for word in setting.choices)
        kind += " or null" if type(None) in getattr(setting.type, "__args__", ()) else ""
    if not setting.range.is_free:
        kind += f", {setting.range.describe()}"
    default = "required" if setting.required else code(show(plain(setting.default)) or "empty")
    place = f"`{setting.owner.__module__.removeprefix('bessemer.')}`"
    words = [f"`{selector}={'|'.join(shortened(names))}`" for selector, names in one.needs.items()]
    return (f"`{key}`", kind, default, setting.help, ": ".join([place, *([", ".join(words)] if words else [])]))


def shortened(names: list[str]) -> list[str]:
    """Leave out reward models: each family has one, with the same settings."""
    return [name for name in names if name.removesuffix("-reward") not in names or not name.endswith("-reward")]


def for_completion(found: Mapping[str, list[Declaration]]) -> dict[str, dict[str, Any]]:
    """Return dotted key → what `bessemer.cli.completion.Known` holds."""
    known = {}
    for key, declared_by in found.items():
        one = min(declared_by, key=lambda each: len(each.needs)).setting  # of every run, if there is one
        types = describe(one.type)
        table_of = next((names for selector, names in registry.SELECTORS.items() if dotted(selector) == key), None)
        values = [str(choice) for each in declared_by for choice in each.setting.choices or ()]
        if table_of is not None:
            values = table_of.names()
        elif key == "training.dataset":
            values = registry.datasets.names()
        elif key == "grpo.rewards":
            values = registry.rewards.names()
        elif key == "grpo.environment":
            values = registry.environments.names()
        elif key == "eval.evaluations":
            values = registry.evaluations.names()
        elif "true or false" in types:
            values = ["true", "false"]
        known[key] = {
            "help": one.help,
            "values": list(dict.fromkeys(values)),
            "text": one.choices is None and bool(re.search("text|path|Spec|Sampling", types)),
            "many": "list" in types,
        }
    return known


def one_per_line(values: Mapping[str, Any]) -> str:
    """Return a JSON object with a line per key, so that branches that add settings merge."""
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


# --- the command line ---
def command_line_page() -> str:
    """The help of every command, as `--help` prints it at 100 columns."""
    text = [
        "# Command line",
        NOTE,
        "Look up a command and its options; every command prints the same with `--help`:",
        "```bash\nbessemer --help\nbessemer train --help\n```",
        "Settings are words `section.key=value` ([all of them](settings.md)); options start with dashes. "
        "[Exit codes](exit-codes.md) tell scripts how a command ended.",
        table(
            ("command", "what it does"), [(f"[`{name}`](#bessemer-{name})", about) for name, about in COMMANDS.items()]
        ),
    ]
    for names, command in commands(cli, ["bessemer"]):
        context = click.Context(command, info_name=" ".join(names), max_content_width=100, terminal_width=100)
        context.help_option_names = ["-h", "--help"]
        usage = command.get_help(context)
        text += [f"## {' '.join(names)}", f"```text\n{usage}\n```"]
    return page(text)


def commands(group: click.Group, names: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None, name
        yield [*names, name], command
        if isinstance(command, click.Group):
            yield from commands(command, [*names, name])


# --- Python ---
NAMES = {
    "Train and read runs": ("train", "resume", "Run"),
    "Trainers": (
        "BaseTrainer",
        "BaseTrainerConfig",
        "GRPOTrainer",
        "GRPOTrainerConfig",
        "KLDivergenceTrainer",
        "KLDivergenceTrainerConfig",
        "KLConfig",
        "TrainState",
        "KLDivergenceTrainState",
    ),
    "Parts of a run": ("LanguageModel", "Callback", "Evaluator", "Tokenizer", "Sampling", "DatasetStyle"),
    "Jobs": ("ExecutionSpec", "BasicJob", "CheckpointedJob", "RestoreableJob"),
    "Settings": ("field", "configure", "configuration"),
}


def python_page() -> str:
    """The public names with their signatures and docstrings, and the registries."""
    missing = {*bessemer.__all__, "__version__"} ^ {"__version__", *(name for row in NAMES.values() for name in row)}
    assert not missing, f"NAMES and bessemer.__all__ differ: {missing}"
    text = [
        "# Python",
        NOTE,
        "Train, resume, sample and evaluate from Python, or override one method of a trainer:",
        '```python\nimport bessemer as bm\n\nrun = bm.train("quickstart", **{"training.steps": 100})\n'
        'print(run.sample("def main(", max_tokens=20))\nprint(run.evaluate(["bpb"]))\n```',
        "These names stay as they are in a MINOR release ([compatibility](../compatibility.md)); import them from "
        "`bessemer`. [Extending](../extending.md) has a runnable example of each part, and the "
        "[error classes](exit-codes.md) are in `bessemer.errors`.",
    ]
    for title, names in NAMES.items():
        text += [f"## {title}", *(part for name in names for part in described(name))]
    text += [
        "## Registries",
        "In `bessemer.registry`. `register` is a decorator: "
        '`@bessemer.registry.rewards.register("shorter")`; `plugins=[my_parts.py]` imports the file that uses it.',
        table(
            ("registry", "its names"),
            [
                (f"`{name}`", ", ".join(map(code, one.names())))
                for name, one in vars(registry).items()
                if isinstance(one, registry.Registry)
            ],
        ),
    ]
    return page(text)


def described(name: str) -> Iterator[str]:
    """Yield the heading, the signature, the docstring, and for a class a table of the members it adds.

    What the trainers of objectives add to BaseTrainer is internal.
    """
    value = getattr(bessemer, name)
    yield f"### {name}"
    if not (inspect.isclass(value) and issubclass(value, Enum)):
        yield f"```python\n{'class ' if inspect.isclass(value) else ''}{name}{arguments(value)}\n```"
    yield documentation(value)
    if not inspect.isclass(value):
        return
    if issubclass(value, Enum):
        yield "Values: " + ", ".join(code(str(one.value)) for one in value) + "."
    rows = [
        (
            code(member + ("" if isinstance(one, property | cached_property) else arguments(getattr(value, member)))),
            about,
        )
        for member, one in sorted(vars(value).items(), key=lambda item: item[0])
        if not member.startswith("_") and (about := about_member(value, member, one))
    ]
    if rows and not (value is not bessemer.BaseTrainer and issubclass(value, bessemer.BaseTrainer)):
        yield table(("member", "what it is or does"), rows)


def about_member(owner: type, name: str, value: object) -> str | None:
    """Return the docstring of a method or property that a class adds; None if a class above documents it."""
    above = [cls for cls in owner.__mro__[1:] if cls.__module__.startswith("bessemer") and name in vars(cls)]
    if not (callable(value) or isinstance(value, property | cached_property | classmethod | staticmethod)):
        return None
    if any(cls.__name__ in bessemer.__all__ for cls in above) or inspect.isclass(value):
        return None
    return documentation(getattr(value, "__func__", value))


def documentation(value: object) -> str:
    """Return the docstring; what it says of fields (`name: …` at the start of a line) as a list."""
    return re.sub(r"^(\w+): +(?=\S)", r"- `\1`: ", inspect.getdoc(value) or "", flags=re.M)


def arguments(value: Any) -> str:
    """Return the arguments without their types, those of a dataclass of settings as `…`."""
    if inspect.isclass(value) and is_dataclass(value) and declared(value):
        return "(…)"
    parameters = [
        one.replace(annotation=one.empty, default=one.empty if one.default is one.empty else Shown(one.default))
        for one in inspect.signature(value).parameters.values()
        if one.name not in ("self", "cls")
    ]
    return str(inspect.Signature(parameters))


class Shown(NamedTuple):
    """A default as the page shows it, the same on every machine."""

    value: object

    def __repr__(self) -> str:
        simple = self.value is None or isinstance(self.value, str | int | float | tuple)
        return repr(self.value) if simple else "…"


# --- metrics, exit codes, the run directory ---
def metrics_page() -> str:
    groups = yaml.safe_load(METRICS.read_text(encoding="utf-8"))
    text = [
        "# Metrics",
        NOTE,
        "Every report is one JSON object in `runs/NAME/metrics.jsonl`. Read the last row with",
        "```bash\nbessemer train quickstart --name first\ntail -n 1 runs/first/metrics.jsonl\n```",
        '`bessemer.Run("runs/first").metrics()` returns all rows. Names with `time/` and `mem/` are measurements of '
        "the machine; all others are bit-for-bit the same after a resume. A value that is not finite is `null`, and "
        "the row names it under `non_finite`. `NAME` stands for a name of your run, such as a reward or a task.",
    ]
    for title, rows in groups.items():
        text += [f"## {title}", table(("metric", "meaning"), [(f"`{name}`", about) for name, about in rows.items()])]
    return page(text)


def exit_codes_page() -> str:
    classes = [cls for cls in errors.BessemerError.__subclasses__() if cls.__module__ == errors.__name__]
    rows = [("0", "", "Done.")]
    rows.append(("1", "any other exception", "A bug. The traceback is in the run's `log.txt`, or on the screen."))
    rows += [(str(cls.exit_code), f"`{cls.__name__}`", first_line(cls)) for cls in classes]
    rows += [
        ("130", "", "Interrupted (Ctrl-C) where there is no run to save yet."),
        ("128 + N", "", "Ended by signal N before the run directory was created, for example while data is prepared."),
    ]
    text = [
        "# Errors and exit codes",
        NOTE,
        "Find out how a command ended, from its exit code or from the exception in Python. A job file starts the same "
        "command again on 75.",
        "```bash\nbessemer train quickstart training.time_limit=1s --name first    # exit code 75\n"
        "bessemer resume first training.time_limit=1h\n```",
        table(("code", "Python", "meaning"), rows),
        "## Reading an error",
        "An error goes to stderr as one paragraph that says what happened, where, and what to do. Nothing is written "
        "before a bad setting or file is reported:",
        "```text\n$ bessemer train quickstart training.step=100\n"
        "error: unknown setting 'training.step'; did you mean 'training.steps'?\n```",
        "Python code gets the same text as an exception of `bessemer.errors`, all of them subclasses of "
        "`BessemerError`:",
        "```python\nimport bessemer as bm\nfrom bessemer.errors import BessemerError\n\ntry:\n"
        '    bm.train("pretrain", **{"training.step": 100})\nexcept BessemerError as error:\n'
        "    print(error.exit_code, error)  # 2 unknown setting 'training.step'; did you mean 'training.steps'?\n```",
        "Full sampling queues raise `bessemer.generate.QueueFull`; `bessemer serve` answers them with 429. "
        "[Troubleshooting](../troubleshooting.md) has the usual causes and remedies, "
        "[reliability](../reliability.md) every fault with its outcome and its test.",
    ]
    return page(text)


def run_directory_page() -> str:
    inside = {value.name: value.about for value in vars(RunDirectory).values() if hasattr(value, "about")}
    folders = {"eval", "checkpoints", "reference", "plots", "model"}

    def rows(names: Mapping[str, str]) -> list[tuple[str, str]]:
        return [(f"`{name}{'/' * (name in folders)}`", about) for name, about in names.items()]

    text = [
        "# The run directory",
        NOTE,
        "A run is one directory, `runs/NAME`. Copy, move or archive it as a whole.",
        "```bash\nbessemer train quickstart --name first\nbessemer doctor first          # checks them all\n```",
        table(("path", "contents"), rows(inside)),
        "Some settings and commands write more:",
        table(("path", "contents"), rows(BESIDE)),
        "A checkpoint is complete once its file `COMMIT` exists ([checkpoints](../checkpoints.md)). Files are written "
        "under a temporary name and renamed, so that a reader never sees half of one.",
    ]
    return page(text)


# --- Markdown ---
def page(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def code(text: str) -> str:
    return f"`{text}`"


def first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def stale() -> list[str]:
    """Return the generated files that are not what the code says."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in files().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"run `make reference`: {', '.join(found)}" if (found := stale()) else 0)
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
