"""Tasks: examples of one kind, how they are asked and how they are judged. The batch size does not affect the score.

Examples are shuffled with Random(1337), then capped by the limit. Few-shot examples are drawn from the others with
Random(1234 + index of the question).

    centered = (accuracy − baseline) / (1 − baseline)      0 = guessing, 1 = all right

Tasks come from bundles (a directory with a list of tasks), and from single task files (JSON lines, plain or gzip). The
list of a bundle is tasks.json, core.yaml, core.json, or the only YAML file. Each task has a label, a kind, a few-shot
count, a delimiter and a file, under the names of either layout (see NAMES). Baselines are fractions in the list
(random_baseline), or percentages in a CSV with the columns `Eval Task` and `Random baseline`. Files are in the
directory or its eval_data. A task file has a header as its first line:

    {"task": "capitals", "kind": "multiple_choice", "fewshot": 2, "delimiter": " ", "random_baseline": 0.25}
    {"query": "The capital of France is", "choices": ["Rome", "Paris", "Oslo", "Bonn"], "gold": 1}
"""

from __future__ import annotations

import contextlib
import csv
import io
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bessemer import console
from bessemer.config.bounded import check_yaml, parse_json, read_text
from bessemer.data import Tokenizer
from bessemer.data.sources.files import file_of
from bessemer.data.sources.readers import Raw, read_file_rows
from bessemer.errors import InputError
from bessemer.evaluate.scoring import GENERATIVE, Row, Score, answer_all, prompt_ids, score
from bessemer.generate import LoadedModel

Example = Mapping[str, Any]
TIE = 1e-5  # mean losses closer than this are equal: rounding, which depends on the batch, must not decide
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHUFFLE_SEED, FEWSHOT_SEED = 1337, 1234
EXAMPLES_AT_ONCE = 1024  # whose tokens are held in memory at the same time


class Kind(ABC):
    """How an example is asked and judged by the likelihood of text: its texts, their rows, and a verdict.

    The caller encodes the texts of many examples at once, which with few-shot examples is most of the host's work.
    """

    columns: ClassVar[tuple[str, ...]]  # that an example must have
    options: ClassVar[str | None] = None  # the column of the alternatives

    @abstractmethod
    def solved(self, example: Example, delimiter: str) -> str:
        """Return the example with its answer, as a few-shot example."""

    @abstractmethod
    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        """Return the texts to encode, each after the few-shot examples `shots`."""

    @abstractmethod
    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        """Return the rows to score. ids: the tokens of each text."""

    def right(self, example: Example, scores: Sequence[Score]) -> bool:
        return lowest(scores) == example["gold"]


class MultipleChoice(Kind):
    """query, choices, gold: the choice with the lowest mean loss after the common beginning."""

    columns = ("query", "choices", "gold")
    options = "choices"

    def solved(self, example: Example, delimiter: str) -> str:
        return f"{example['query']}{delimiter}{example['choices'][example['gold']]}"

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        return [f"{shots}{example['query']}{delimiter}{choice}" for choice in example["choices"]]

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        ids = [[*tokenizer.beginning, *one] for one in ids]
        start = min(shared(ids), min(map(len, ids)) - 1)  # every choice has a token of its own
        return [Row(one, max(1, start)) for one in ids]


class Schema(Kind):
    """context_options, continuation, gold: the context after which the common end has the lowest mean loss."""

    columns = ("context_options", "continuation", "gold")
    options = "context_options"

    def solved(self, example: Example, delimiter: str) -> str:
        return f"{example['context_options'][example['gold']]}{delimiter}{example['continuation']}"

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        end = f"{delimiter}{example['continuation']}"
        return [f"{shots}{context}{end}" for context in example["context_options"]]

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        ids = [[*tokenizer.beginning, *one] for one in ids]
        suffix = max(1, min(shared([one[::-1] for one in ids]), min(map(len, ids)) - 1))
        return [Row(one, len(one) - suffix) for one in ids]


class Continuation(Kind):
    """context, continuation: right if greedy decoding gives every token of the continuation."""

    columns = ("context", "continuation")

    def solved(self, example: Example, delimiter: str) -> str:
        return f"{example['context'].strip()}{delimiter}{example['continuation']}"

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        # without the final space, which belongs to the first token of the continuation
        prompt = f"{shots}{example['context'].strip()}{delimiter}".rstrip()
        return [prompt, shots + self.solved(example, delimiter)]

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        before, whole = ([*tokenizer.beginning, *one] for one in ids)
        return [Row(whole, max(1, min(shared([before, whole]), len(whole) - 1)))]

    def right(self, example: Example, scores: Sequence[Score]) -> bool:
        return scores[0].greedy and scores[0].whole


class Letter(Kind):
    """query, choices, gold: the choices are lettered, and the assistant's answer begins with the most likely letter."""

    columns = ("query", "choices", "gold")
    options = "choices"

    def solved(self, example: Example, delimiter: str) -> str:
        return f"{self.question(example)}\n{LETTERS[example['gold']]}"

    def question(self, example: Example) -> str:
        choices = zip(LETTERS, example["choices"], strict=False)
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in choices)
        return f"{example['query']}\n{listed}\nAnswer with the letter only."

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        return [shots + self.question(example)]

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        prompt = prompt_ids(tokenizer, [{"role": "user", "content": tokenizer.decode(ids[0])}])
        letters = LETTERS[: len(example["choices"])]
        return [Row([*prompt, *tokenizer.encode(letter, after=prompt)], len(prompt)) for letter in letters]


KINDS: dict[str, Kind] = {
    "multiple_choice": MultipleChoice(),
    "schema": Schema(),
    "language_modeling": Continuation(),
    "letter": Letter(),
}


def shared(sequences: Sequence[Sequence[int]]) -> int:
    """Return the length of the common beginning."""
    count = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def lowest(scores: Sequence[Score]) -> int:
    """Return the first place within TIE of the lowest mean loss."""
    best = min(score.mean for score in scores)
    return next(place for place, score in enumerate(scores) if score.mean <= best + TIE)


@dataclass(frozen=True)
class Task:
    """`baseline` is the accuracy of guessing; errors name `where`."""

    name: str
    kind: str
    examples: Sequence[Example]
    fewshot: int = 0
    delimiter: str = " "
    baseline: float = 0.0
    separator: str = "\n\n"
    max_tokens: int = 256  # of a generated answer
    where: str = ""

    def __post_init__(self) -> None:
        where = self.where or self.name
        if self.kind not in kinds():
            raise InputError(f"{where}: unknown kind '{self.kind}'. Known: {', '.join(kinds())}.")
        if not 0 <= self.baseline < 1:
            raise InputError(f"{where}: the random baseline is {self.baseline}; it is at least 0, below 1.")
        if self.fewshot < 0:
            raise InputError(f"{where}: {self.fewshot} few-shot examples; give 0 or more.")
        if not self.examples:
            raise InputError(f"{where} holds no examples.")
        for number, example in enumerate(self.examples):
            problem = check_example(self.kind, example)
            if problem:
                raise InputError(f"{where}: example {number + 1} {problem}.")

    def chosen(self, limit: int | None = None) -> list[Example]:
        """Return the examples, shuffled and then capped."""
        if limit is not None and limit < 1:
            raise InputError(f"the limit must be at least 1 example; got {limit}.")
        examples = list(self.examples)
        random.Random(SHUFFLE_SEED).shuffle(examples)
        return examples[:limit]


def kinds() -> list[str]:
    return [*KINDS, GENERATIVE]


def check_example(kind: str, example: Any) -> str | None:
    """Return what is wrong with an example; None if nothing is."""
    if not isinstance(example, dict):
        return "is not a JSON object"
    if kind == GENERATIVE:
        missing = [name for name in ("question", "answer") if not isinstance(example.get(name), str)]
        return f"has no text '{missing[0]}'" if missing else None
    rules = KINDS[kind]
    for column in rules.columns:
        if column not in example:
            return f"has no '{column}' (it has {', '.join(map(str, example)) or 'nothing'})"
        if column not in ("gold", rules.options) and not isinstance(example[column], str):
            return f"'s {column} is not text"
    if rules.options is None:
        return None
    options, gold = example[rules.options], example["gold"]
    if not isinstance(options, list) or not options or not all(isinstance(o, str) for o in options):
        return f"'s {rules.options} is not a list of texts"
    if kind == "letter" and len(options) > len(LETTERS):
        return f"has {len(options)} choices, more than letters"
    if not isinstance(gold, int) or not 0 <= gold < len(options):
        return f"'s gold is {gold!r}, not one of its {len(options)} {rules.options}"
    return None


def shots_of(examples: Sequence[Example], index: int, count: int) -> list[Example]:
    """Return `count` of the other examples, or all of them if there are fewer."""
    others = [place for place in range(len(examples)) if place != index]
    drawn = random.Random(FEWSHOT_SEED + index).sample(others, min(count, len(others)))
    return [examples[place] for place in drawn]


def texts_of(task: Task, examples: Sequence[Example], index: int) -> list[str]:
    """Return the texts of one example: the few-shot examples, then the question with each answer."""
    kind = KINDS[task.kind]
    solved = [kind.solved(shot, task.delimiter) for shot in shots_of(examples, index, task.fewshot)]
    shots = "".join(text + task.separator for text in solved)
    return kind.texts(examples[index], shots, task.delimiter)


def rows_of(task: Task, examples: Sequence[Example], indices: Sequence[int], tokenizer: Tokenizer) -> list[list[Row]]:
    """Return the rows to score for each of the examples at `indices`."""
    texts = [texts_of(task, examples, index) for index in indices]
    ids = iter(tokenizer.encode_batch([text for own in texts for text in own]))
    return [
        KINDS[task.kind].rows([next(ids) for _ in own], examples[index], tokenizer)
        for index, own in zip(indices, texts, strict=True)
    ]


def run_task(
    loaded: LoadedModel, task: Task, *, limit: int | None = None, batch_size: int | None = None
) -> dict[str, Any]:
    """Return accuracy, centered accuracy, and how many examples were cut to the context."""
    if loaded.tokenizer is None:
        raise InputError("this model has no tokenizer, so it cannot read the examples of a task.")
    examples = task.chosen(limit)
    with console.task_name(task.name):
        if task.kind == GENERATIVE:
            right, cropped = answer_all(loaded, examples, task.max_tokens, batch_size)
        else:
            right, cropped = _judge_all(loaded, task, examples, batch_size)
    accuracy = sum(right) / len(right)
    result: dict[str, Any] = {
        "accuracy": accuracy,
        "centred": centred(accuracy, task.baseline),
        "baseline": task.baseline,
        "examples": len(right),
        "fewshot": task.fewshot,
        "cropped": cropped,
    }
    if 0 < len(examples) - 1 < task.fewshot:
        result["note"] = f"{len(examples)} examples leave {len(examples) - 1} few-shot examples"
    return result


def centred(accuracy: float, baseline: float) -> float:
    return (accuracy - baseline) / (1 - baseline)


def _judge_all(
    loaded: LoadedModel, task: Task, examples: Sequence[Example], batch_size: int | None
) -> tuple[list[bool], int]:
    """Return whether each example is right, and how many were cut to the context."""
    assert loaded.tokenizer is not None
    right: list[bool] = []
    cropped = 0
    for first in range(0, len(examples), EXAMPLES_AT_ONCE):
        indices = range(first, min(first + EXAMPLES_AT_ONCE, len(examples)))
        rows = rows_of(task, examples, indices, loaded.tokenizer)
        more = len(examples) > EXAMPLES_AT_ONCE
        with console.task_name(f"from example {first + 1}") if more else contextlib.nullcontext():
            scores = iter(score(loaded, [row for own in rows for row in own], batch_size))
        for index, own in zip(indices, rows, strict=True):
            found = [next(scores) for _ in own]
            right.append(KINDS[task.kind].right(examples[index], found))
            cropped += any(one.cropped for one in found)
    return right, cropped


# --- tasks from files ---


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
