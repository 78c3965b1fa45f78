"""Small bundles of tasks, written as files: what a user's directory looks like."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

WORDS = ["cats", "dogs", "rain", "grey", "walking", "were", "the", "and", "in", "seven", "The"]


def choices_task(count: int = 12, choices: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Random words and a random right one: nothing to know, so a model can only guess."""
    rng = random.Random(seed)

    def text(length: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(length))

    return [
        {"query": text(2), "choices": [text(rng.randint(1, 3)) for _ in range(choices)], "gold": rng.randrange(choices)}
        for _ in range(count)
    ]


SCHEMA = [
    {"context_options": ["The cats", "The dogs were"], "continuation": "in the rain.", "gold": 0},
    {"context_options": ["Seven", "Grey"], "continuation": "cats were walking.", "gold": 1},
]
EXACT = [{"context": f"The {n} grey cats and ", "continuation": f"{n + 1} dogs"} for n in range(4)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def json_bundle(directory: Path) -> Path:
    """tasks.json with files plain and gzip; one task has none."""
    write_rows(directory / "pick.jsonl.gz", choices_task())
    write_rows(directory / "schema.jsonl", SCHEMA)
    write_rows(directory / "exact.jsonl.gz", EXACT)
    tasks = [
        ("pick", "multiple_choice", 2, "\nAnswer: ", 1 / 3, "pick.jsonl.gz"),
        ("who", "schema", 0, " ", 0.5, "schema.jsonl"),
        ("next", "language_modeling", 1, " ", 0.0, "exact.jsonl.gz"),
        ("lost", "language_modeling", 0, " ", 0.0, None),
    ]
    keys = ("task", "kind", "fewshot", "delimiter", "random_baseline", "file")
    listed = [dict(zip(keys, task, strict=True)) for task in tasks]
    (directory / "tasks.json").write_text(json.dumps({"fewshot_separator": "\n\n", "tasks": listed}))
    return directory


def public_bundle(directory: Path) -> Path:
    """The same in the public layout: core.yaml, a CSV of baselines in percent, files under eval_data."""
    write_rows(directory / "eval_data/knowledge/pick.jsonl", choices_task())
    write_rows(directory / "eval_data/knowledge/schema.jsonl", SCHEMA)
    write_rows(directory / "eval_data/exact.jsonl", EXACT)
    (directory / "core.yaml").write_text(
        """\
icl_tasks:
- label: pick
  dataset_uri: knowledge/pick.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
- label: who
  dataset_uri: knowledge/schema.jsonl
  num_fewshot: [0]
  icl_task_type: schema
- label: next
  dataset_uri: exact.jsonl
  num_fewshot: [1]
  icl_task_type: language_modeling
- label: lost
  dataset_uri: lost.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
"""
    )
    with (directory / "eval_meta_data.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Eval Task", "Task Category", "Random baseline"])
        rows.writerows([["pick", "x", 100 / 3], ["who", "x", 50], ["next", "x", 0], ["lost", "x", 0.0]])
    return directory
