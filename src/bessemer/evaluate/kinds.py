"""How an example is asked and judged, by the likelihood of text. One class a kind.

A kind gives the texts of an example, turns their tokens into rows with a scored end, and judges the scores. Texts are
encoded by the caller, many examples at once: with few-shot examples that is most of the work on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from bessemer.data import Tokenizer
from bessemer.evaluate.conversation import prompt_ids
from bessemer.evaluate.scoring import Row, Score

Example = Mapping[str, Any]
TIE = 1e-5
"""Mean losses closer than this many nats are equal: rounding, which depends on the batch, must not decide."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Kind(Protocol):
    """`columns` are what an example must have; `options` names the column of what is chosen among."""

    columns: ClassVar[tuple[str, ...]]
    options: ClassVar[str | None]

    def solved(self, example: Example, delimiter: str) -> str:
        """The example with its answer, as it precedes a question."""
        ...

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        """What is to be encoded, after the solved examples `shots`."""
        ...

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        """ids: of each text."""
        ...

    def right(self, example: Example, scores: Sequence[Score]) -> bool: ...


class MultipleChoice:
    """query, choices, gold: the choice with the lowest mean loss after what all of them share."""

    columns: ClassVar[tuple[str, ...]] = ("query", "choices", "gold")
    options: ClassVar[str | None] = "choices"

    def solved(self, example: Example, delimiter: str) -> str:
        return f"{example['query']}{delimiter}{example['choices'][example['gold']]}"

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        return [f"{shots}{example['query']}{delimiter}{choice}" for choice in example["choices"]]

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        ids = [[*tokenizer.beginning, *one] for one in ids]
        start = min(shared(ids), min(map(len, ids)) - 1)  # every choice has a token of its own
        return [Row(one, max(1, start)) for one in ids]

    def right(self, example: Example, scores: Sequence[Score]) -> bool:
        return lowest(scores) == example["gold"]


class Schema:
    """context_options, continuation, gold: the context after which the shared end has the lowest mean loss."""

    columns: ClassVar[tuple[str, ...]] = ("context_options", "continuation", "gold")
    options: ClassVar[str | None] = "context_options"

    def solved(self, example: Example, delimiter: str) -> str:
        return f"{example['context_options'][example['gold']]}{delimiter}{example['continuation']}"

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        end = f"{delimiter}{example['continuation']}"
        return [f"{shots}{context}{end}" for context in example["context_options"]]

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        ids = [[*tokenizer.beginning, *one] for one in ids]
        suffix = max(1, min(shared([one[::-1] for one in ids]), min(map(len, ids)) - 1))
        return [Row(one, len(one) - suffix) for one in ids]

    def right(self, example: Example, scores: Sequence[Score]) -> bool:
        return lowest(scores) == example["gold"]


class Continuation:
    """context, continuation: right when greedy decoding gives every token of the continuation."""

    columns: ClassVar[tuple[str, ...]] = ("context", "continuation")
    options: ClassVar[str | None] = None

    def solved(self, example: Example, delimiter: str) -> str:
        return f"{example['context'].strip()}{delimiter}{example['continuation']}"

    def texts(self, example: Example, shots: str, delimiter: str) -> list[str]:
        # without the space at its end: that belongs to the first token of the continuation
        prompt = f"{shots}{example['context'].strip()}{delimiter}".rstrip()
        return [prompt, shots + self.solved(example, delimiter)]

    def rows(self, ids: Sequence[list[int]], example: Example, tokenizer: Tokenizer) -> list[Row]:
        before, whole = ([*tokenizer.beginning, *one] for one in ids)
        return [Row(whole, max(1, min(shared([before, whole]), len(whole) - 1)))]

    def right(self, example: Example, scores: Sequence[Score]) -> bool:
        return scores[0].greedy and scores[0].whole


class Letter:
    """query, choices, gold: the choices are lettered, and the likeliest letter opens the assistant's answer."""

    columns: ClassVar[tuple[str, ...]] = ("query", "choices", "gold")
    options: ClassVar[str | None] = "choices"

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

    def right(self, example: Example, scores: Sequence[Score]) -> bool:
        return lowest(scores) == example["gold"]


KINDS: dict[str, Kind] = {
    "multiple_choice": MultipleChoice(),
    "schema": Schema(),
    "language_modeling": Continuation(),
    "letter": Letter(),
}


def shared(sequences: Sequence[Sequence[int]]) -> int:
    """How many first tokens all have in common."""
    count = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def lowest(scores: Sequence[Score]) -> int:
    """The first of those within TIE of the lowest mean loss."""
    best = min(score.mean for score in scores)
    return next(place for place, score in enumerate(scores) if score.mean <= best + TIE)
