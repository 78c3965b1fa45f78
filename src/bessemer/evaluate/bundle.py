"""Tasks from files: bundles (a directory with a list of tasks), and single task files (JSON lines, plain or gzip).

The list of a bundle is tasks.json, core.yaml, core.json, or the only YAML file. Each task has a label, a kind, a
few-shot count, a delimiter and a file, under the names of either layout (see NAMES). Baselines are fractions in the
list (random_baseline), or percentages in a CSV with the columns `Eval Task` and `Random baseline`. Files are in the
directory or its eval_data. A task file has a header as its first line:

    {"task": "capitals", "kind": "multiple_choice", "fewshot": 2, "delimiter": " ", "random_baseline": 0.25}
    {"query": "The capital of France is", "choices": ["Rome", "Paris", "Oslo", "Bonn"], "gold": 1}
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.config.bounded import check_yaml, parse_json, read_text
from bessemer.data.sources.files import file_of
from bessemer.data.sources.readers import Raw, read_file_rows
from bessemer.errors import InputError
from bessemer.evaluate.tasks import Task, run_task
from bessemer.generate import LoadedModel

LISTS = ("tasks.json", "core.yaml", "core.yml", "core.json")
NAMES = {
    "name": ("label", "task"),
    "kind": ("icl_task_type", "kind"),
    "fewshot": ("num_fewshot", "fewshot"),
    "delimiter": ("continuation_delimiter", "delimiter"),
    "file": ("dataset_uri", "file"),
}
SUFFIXES = (".jsonl", ".jsonl.gz")
LONGEST_NAME = 1000
HEADER = {
    "task": str,
    "kind": str,
    "fewshot": int,
    "delimiter": str,
    "separator": str,
    "random_baseline": (int, float),
    "max_tokens": int,
}
RENAMED = {"task": "name", "random_baseline": "baseline"}


@dataclass(frozen=True)
class Listed:
    """A task of the list; `path` is None if its file is missing."""

    name: str
    kind: str
    fewshot: int
    delimiter: str
    baseline: float
    separator: str
    path: Path | None

    def read(self) -> Task:
        """Return the task with its examples."""
        options = {name: value for name, value in vars(self).items() if name != "path"}
        assert self.path is not None
        return Task(examples=read_rows(self.path), where=str(self.path), **options)


def read_bundle(directory: str | Path) -> list[Listed]:
    """Return all tasks of the list, in its order, including those without a file."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"there is no bundle of tasks at '{directory}': it is not a directory.")
    where = _list_of(directory)
    described = _parse(where)
    tasks = described.get("icl_tasks", described.get("tasks"))
    if not isinstance(tasks, list) or not tasks:
        raise InputError(f"{where} has no list 'icl_tasks' or 'tasks'.")
    baselines = _baselines(directory)
    separator = str(described.get("fewshot_separator", "\n\n"))
    listed = [_listed(entry, where, baselines, separator) for entry in tasks]
    if all(task.path is None for task in listed):
        raise InputError(f"{where} lists {len(listed)} tasks, but the file of none of them is in {directory}.")
    return listed


def _list_of(directory: Path) -> Path:
    candidates = [directory / name for name in LISTS if (directory / name).is_file()]
    candidates += sorted([*directory.glob("*.yaml"), *directory.glob("*.yml")])
    if not candidates:
        raise InputError(f"'{directory}' has no list of tasks: one of {', '.join(LISTS)}.")
    return candidates[0]


def _parse(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = read_text(path)
        if path.suffix != ".json":
            check_yaml(text)
        found = parse_json(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read as a list of tasks ({error}).") from error
    if isinstance(found, list):
        return {"tasks": found}
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a list of tasks.")
    return found


def _listed(entry: Any, where: Path, baselines: Mapping[str, float], separator: str) -> Listed:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: a task is {entry!r:.200}, not a mapping.")
    values = {ours: next((entry[name] for name in names if name in entry), None) for ours, names in NAMES.items()}
    name = str(values["name"] or "")
    if not name or not values["kind"]:
        raise InputError(f"{where}: a task has no label or no kind: {entry!r:.200}.")
    fewshot = values["fewshot"]
    fewshot = fewshot[0] if isinstance(fewshot, list) and fewshot else fewshot or 0
    baseline = entry.get("random_baseline", baselines.get(name))
    if baseline is None:
        raise InputError(
            f"{where}: nothing says how often guessing is right in '{name}'. Give its random_baseline as a fraction, "
            "or a CSV beside the list with the columns 'Eval Task' and 'Random baseline' (percent)."
        )
    try:
        count, chance = int(fewshot), float(baseline)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: the few-shot count or baseline of '{name}' is not a number.") from error
    delimiter = " " if values["delimiter"] is None else str(values["delimiter"])
    file = values["file"]
    if file is not None and (not isinstance(file, str) or len(file) > LONGEST_NAME):
        raise InputError(f"{where}: the file of '{name}' is {file!r:.200}, not a name.")
    path = _find(where.parent, file)
    return Listed(name, str(values["kind"]), count, delimiter, chance, separator, path)


def _find(directory: Path, named: str | None) -> Path | None:
    if not named:
        return None
    for place in (directory / named, directory / "eval_data" / named, directory / Path(named).name):
        for path in (place, place.with_name(place.name + ".gz")):
            if path.is_file() and path.resolve().is_relative_to(directory.resolve()):
                return path
    return None


def _baselines(directory: Path) -> dict[str, float]:
    """Return task -> fraction, from every CSV with the two columns."""
    found: dict[str, float] = {}
    for path in sorted(directory.glob("*.csv")):
        try:
            for row in csv.DictReader(io.StringIO(read_text(path).removeprefix("\ufeff"), newline="")):
                if row.get("Eval Task") and row.get("Random baseline"):
                    found[row["Eval Task"].strip()] = float(row["Random baseline"]) / 100
        except (OSError, ValueError, csv.Error) as error:
            raise InputError(f"{path}: {error}.") from error
    return found


def is_task_file(name: str) -> bool:
    return name.endswith(SUFFIXES)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return one object per line; raise InputError, with the line, for anything else that is not empty."""
    rows = []
    for row in read_file_rows(file_of(Path(path))):
        if not isinstance(row, Raw):
            raise InputError(f"{row}.")
        if not isinstance(row.value, dict):
            raise InputError(f"{row.where()} is not a JSON object.")
        rows.append(row.value)
    return rows


def read_task(path: str | Path) -> Task:
    """Return the task of a file with a header; its name is by default that of the file."""
    path = Path(path)
    rows = read_rows(path)
    if not rows or "kind" not in rows[0]:
        raise InputError(
            f"{path} does not begin with a header, so it does not say how its examples are asked. Put one in its "
            'first line: {"task": "NAME", "kind": "multiple_choice"}.'
        )
    header = rows[0]
    for name, value in header.items():
        if name not in HEADER:
            raise InputError(f"{path}: unknown name '{name}' in the header. Known: {', '.join(HEADER)}.")
        if not isinstance(value, HEADER[name]):  # type: ignore[arg-type]
            raise InputError(f"{path}: '{name}' in the header is {value!r}.")
    options: dict[str, Any] = {"name": path.name.removesuffix(".gz").removesuffix(".jsonl")}
    options |= {RENAMED.get(name, name): value for name, value in header.items()}
    return Task(examples=rows[1:], where=str(path), **options)


def evaluate_task(
    loaded: LoadedModel, task: Task, *, limit: int | None = None, batch_size: int | None = None
) -> dict[str, Any]:
    """Run one task as an evaluation of its own."""
    found = run_task(loaded, task, limit=limit, batch_size=batch_size)
    return {"metric": "accuracy", "value": found["accuracy"], "kind": task.kind, **found}
