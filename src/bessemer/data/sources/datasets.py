"""The datasets that come with Bessemer, and the rule for what is held out of any dataset.

Two corpora are part of every Python, so a first run needs no download. The synthetic task sets are small enough for a
tiny model to learn on a CPU in minutes.

A registered dataset may bring a held-out part of its own. Otherwise an example is held out if the hash of its content,
as a share of 2^64, is below `data.val_fraction`, whatever the order and number of files.
"""

from __future__ import annotations

import ast
import hashlib
import os
import random
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bessemer.data.sources.files import Files, file_of
from bessemer.errors import InputError
from bessemer.registry import datasets


def own_held_out(name: str) -> Any:
    """Return the held-out part that a registered dataset brings (its trait `held_out`); None if there is none."""
    held_out = datasets.entry(name).traits.get("held_out") if name in datasets else None
    return None if held_out is None else held_out()


def hashed_below(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Return whether each hash, (n,) uint64, is below `fraction` of 2^64: (n,) bool."""
    return hashes < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


# Tests are a third of the library and mostly tables of numbers; the rest is not the library's own.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}


@datasets.register("python-stdlib")
def python_stdlib() -> Files:
    """About 12 MB of Python, the same for one Python version; ordered by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in LEFT_OUT and not name.startswith("config-")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(found) < 100:
        raise InputError(
            f"dataset 'python-stdlib' needs the standard library's source files, but '{root}' holds "
            f"{len(found)} of them: this Python keeps its library zipped or stripped. Use another Python, or "
            f"name a text file: training.dataset=my.txt."
        )
    ordered = sorted(found, key=lambda path: path.relative_to(root).as_posix())
    return Files(tuple(file_of(path, "txt") for path in ordered), label="python-stdlib")


@datasets.register("python-reference")
def python_reference() -> list[dict[str, str]]:
    """The language reference behind `help()`: about 80 topics, 450 KB of English. What to train on after code."""
    path = Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")
    try:
        (assigned,) = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Assign))
        topics = ast.literal_eval(assigned.value)
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(
            f"dataset 'python-reference' needs the topics of `help()`, but '{path}' cannot be read ({error}): this "
            f"Python comes without them. Use another Python, or name a text file: training.dataset=my.txt."
        ) from error
    return [{"text": topics[name]} for name in sorted(topics)]


# Synthetic task sets. The hash of a question decides which part a row belongs to, never the draw: rows of the training
# part and of the held-out part differ whatever seed and count they are made with.

Row = dict[str, Any]
Rng = random.Random

SPLITS = ("train", "val")
COUNTS = {"train": 8192, "val": 256}
SEED = 1337
HELD_OUT = 10  # one question in so many is held out
PATIENCE = 2000  # draws without a new question, after which a set counts as exhausted
MENTAL = 0.75  # share of sums answered without the calculator
LAZY = (0.6, 0.5, 0.5)  # share of first, second and third guesses made without a thought
CARELESS = 2 / 3  # share of answers with a slip, of each of two kinds: 1 in 9 has neither

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ITEMS = ("key", "map", "hat", "cup", "pen", "box", "bell", "rope", "lamp", "coin", "book", "comb")
KINDS = ("old", "new", "red", "blue", "big", "good", "odd", "fine", "dark", "tall")
PLACES = ("shelf", "table", "stool", "bed", "floor", "desk", "chair", "stairs", "roof", "wall", "bench", "cart")


class TaskSet(NamedTuple):
    """`draw` makes one row; its question decides the part it belongs to."""

    about: str
    draw: Callable[[Rng], Row]


def chat(question: str, answer: str) -> Row:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "answer": answer}


def word(rng: Rng) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 5)))


def reverse(rng: Rng) -> Row:
    text = word(rng)
    return chat(f"Reverse {text}", text[::-1])


def careless(rng: Rng) -> Row:
    """Return a reversal with frequent slips: the first two letters swapped, the last one dropped. A model that imitates
    it is right by chance, equally at every length; a reward can tell the answers apart."""
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


def tools(rng: Rng) -> Row:
    """Sums, mostly answered without the calculator and wrong, and half of the calls have a slip: one in eight is right.
    Who imitates it can call the tool and repeat its result; a reward tells it to."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    row = chat(f"Add {a} and {b}", str(a + b))
    if rng.random() < MENTAL:
        said: Any = str(a + b + rng.choice((-1, 1)) * rng.randint(1, 9))
    else:
        slip = int(str(b)[::-1]) if rng.random() < 0.5 else b
        parts = (("python", f"{a}+{slip}"), ("python_output", str(a + slip)), ("text", str(a + slip)))
        said = [{"type": kind, "text": text} for kind, text in parts]
    row["messages"][-1]["content"] = said
    return row


def guess(rng: Rng) -> Row:
    """Games of higher and lower: seven numbers, three guesses. A guess is mostly the lowest number, sometimes the
    middle of what is left, which alone always finds the secret."""
    low = 10 * rng.randint(1, 9) + rng.randint(0, 3)  # all seven have the same first digit
    high = low + 6
    secret, least, most = rng.randint(low, high), low, high
    turns = [{"role": "user", "content": f"Guess {low} to {high}"}]
    for number in range(3):
        said = low if rng.random() < LAZY[number] else (least + most) // 2
        turns.append({"role": "assistant", "content": str(said)})
        if said == secret or number == 2:
            break
        turns.append({"role": "user", "content": "higher" if said < secret else "lower"})
        if said < secret:
            least = max(least, said + 1)
        else:
            most = min(most, said - 1)
    return {"messages": turns, "low": low, "high": high, "secret": secret, "game": rng.getrandbits(32)}


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
    "toy-guess": TaskSet("games of higher and lower, mostly played badly", guess),
    "toy-preference": TaskSet("two true answers; the one in the asked-for style is chosen", preference),
    "toy-reverse": TaskSet("strings of 3 to 5 letters backwards, as conversations", reverse),
    "toy-sort": TaskSet("the letters of a string in order, as conversations", sort),
    "toy-tools": TaskSet("sums with a calculator; one answer in eight is right", tools),
    "toy-text": TaskSet("the same things said in plain text, to pretrain on", prose),
}


def question_of(row: Row) -> str:
    """Return what is asked in a row: the same question is the same example, whatever the answer."""
    if "messages" in row:
        return f"{row['messages'][0]['content']}{row.get('secret', '')}"
    return str(row.get("prompt") or row["text"])


def example_of(row: Row) -> str:
    """What is different in different rows of a set: the question, and which game it is."""
    return f"{question_of(row)}{row.get('game', '')}"


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
        raise InputError(f"the number of rows of {name} must be at least 1; got {wanted}.")
    rng = random.Random(f"{name} {split} {seed}")
    found: dict[str, Row] = {}
    vain = 0
    while len(found) < wanted and vain < PATIENCE:
        row = draw_part(TASKS[name].draw, rng, split)
        vain = vain + 1 if example_of(row) in found else 0
        found.setdefault(example_of(row), row)
    if len(found) == wanted or count is None:  # unasked, all that a small set has will do
        return list(found.values())
    raise InputError(f"{name} has no {wanted} different rows in its {split} part; about {len(found)} were found.")


for _name in TASKS:
    datasets.register(_name, held_out=partial(task_rows, _name, "val"))(partial(task_rows, _name))
