"""Synthetic task sets: small enough that a tiny model learns them on a CPU in minutes, and made here, without a file.

Which part a row belongs to is decided by the hash of its question, never by the draw: rows of the training part and of
the held-out part differ whatever seed and count they are made with.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from bessemer.errors import InputError
from bessemer.registry import datasets

Row = dict[str, Any]
Rng = random.Random

SPLITS = ("train", "val")
COUNTS = {"train": 8192, "val": 256}
SEED = 1337
HELD_OUT = 10  # one question in so many is held out
PATIENCE = 2000  # draws without a new question, after which a set counts as exhausted
CARELESS = 2 / 3  # share of answers with a slip, of each of two kinds: 1 in 9 has neither

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ITEMS = ("key", "map", "hat", "cup", "pen", "box", "bell", "rope", "lamp", "coin", "book", "comb")
KINDS = ("old", "new", "red", "blue", "big", "good", "odd", "fine", "dark", "tall")
PLACES = (
    "shelf",
    "table",
    "stool",
    "bed",
    "floor",
    "desk",
    "chair",
    "stairs",
    "roof",
    "wall",
    "bench",
    "cart",
)


class TaskSet(NamedTuple):
    """`draw` makes one row; its question decides the part it belongs to."""

    about: str
    draw: Callable[[Rng], Row]


def chat(question: str, answer: str) -> Row:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "answer": answer}


def word(rng: Rng, shortest: int = 3, longest: int = 5) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(shortest, longest)))


def reverse(rng: Rng) -> Row:
    text = word(rng)
    return chat(f"Reverse {text}", text[::-1])


def careless(rng: Rng) -> Row:
    """A reversal with slips that are commoner than none: the first two letters exchanged, the last one left out. Who
    imitates it is right by luck, at every length alike; a reward can tell the answers apart."""
    text = word(rng)
    answer = text[::-1]
    if rng.random() < CARELESS:
        answer = answer[1] + answer[0] + answer[2:]
    if rng.random() < CARELESS:
        answer = answer[:-1]
    return chat(f"Reverse {text}", answer)


def sort(rng: Rng) -> Row:
    text = word(rng)
    return chat(f"Sort {text}", "".join(sorted(text)))


def arithmetic(rng: Rng) -> Row:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return chat(f"Add {a} and {b}", str(a + b))


def preference(rng: Rng) -> Row:
    """Both answers are true; the one in the asked-for style is chosen. So the prompt decides, not the answer alone."""
    item, place = f"{rng.choice(KINDS)} {rng.choice(ITEMS)}", rng.choice(PLACES)
    polite = f"The {item} is on the {place}, dear friend."
    brief = f"On the {place}."
    style, chosen, rejected = rng.choice([("politely", polite, brief), ("briefly", brief, polite)])
    prompt = f"The {item} is on the {place}. Say {style} where it is."
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def prose(rng: Rng) -> Row:
    """What the other sets ask, as statements: text to pretrain on. Held-out questions stay out of it."""
    kind = rng.choice((reverse, sort, arithmetic, preference))
    row = draw_part(kind, rng, "train")
    if kind is preference:
        return {"text": f"{row['prompt'].partition('.')[0]}. {rng.choice((row['chosen'], row['rejected']))}"}
    return {"text": f"{question_of(row)} is {row['answer']}."}


TASKS: dict[str, TaskSet] = {
    "toy-arithmetic": TaskSet("sums of two numbers below 100, as conversations", arithmetic),
    "toy-careless": TaskSet("the questions of toy-reverse; one answer in nine is right", careless),
    "toy-preference": TaskSet("two true answers; the one in the asked-for style is chosen", preference),
    "toy-reverse": TaskSet("strings of 3 to 5 letters backwards, as conversations", reverse),
    "toy-sort": TaskSet("the letters of a string in order, as conversations", sort),
    "toy-text": TaskSet("the same things said in plain text, to pretrain on", prose),
}


def question_of(row: Row) -> str:
    """What is asked in a row: the same question is the same example, whatever the answer."""
    if "messages" in row:
        return str(row["messages"][0]["content"])
    return str(row.get("prompt") or row["text"])


def part_of(row: Row) -> str:
    digest = hashlib.sha256(question_of(row).encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def draw_part(draw: Callable[[Rng], Row], rng: Rng, split: str) -> Row:
    while part_of(row := draw(rng)) != split:
        pass
    return row


def task_rows(name: str, split: str = "train", count: int | None = None, seed: int = SEED) -> list[Row]:
    """`count` different rows of a part; the same for the same seed."""
    if name not in TASKS:
        raise InputError(f"unknown task set '{name}'. Known: {', '.join(TASKS)}.")
    if split not in SPLITS:
        raise InputError(f"unknown part '{split}' of {name}: it is train or val.")
    wanted = COUNTS[split] if count is None else count
    if wanted < 1:
        raise InputError(f"{wanted} rows of {name} were asked for; give at least 1.")
    rng = random.Random(f"{name} {split} {seed}")
    found: dict[str, Row] = {}
    vain = 0
    while len(found) < wanted and vain < PATIENCE:
        row = draw_part(TASKS[name].draw, rng, split)
        vain = vain + 1 if question_of(row) in found else 0
        found.setdefault(question_of(row), row)
    if len(found) == wanted or count is None:  # unasked, all that a small set has will do
        return list(found.values())
    raise InputError(
        f"{name} has no {wanted} different rows in its {split} part; about {len(found)} were found."
    )


for _name in TASKS:
    datasets.register(_name, held_out=partial(task_rows, _name, "val"))(partial(task_rows, _name))
