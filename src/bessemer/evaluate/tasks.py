"""Tasks: examples of one kind, how they are asked and how they are judged. The batch size does not affect the score.

Examples are shuffled with Random(1337), then capped by the limit. Few-shot examples are drawn from the others with
Random(1234 + index of the question).

    centered = (accuracy − baseline) / (1 − baseline)      0 = guessing, 1 = all right
"""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bessemer import console
from bessemer.data import Tokenizer
from bessemer.errors import InputError
from bessemer.evaluate.generative import GENERATIVE, answer_all, prompt_ids
from bessemer.evaluate.scoring import Row, Score, score
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
