"""The files that the golden runs train on: written from a seed, the same bytes everywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = "the a red blue green fox dog cat runs jumps sleeps over under near river hill tree quickly and then"

STOP = '''\
"""Sends this process a signal after a step, once the newest due checkpoint is on disk."""

import os
import signal
import time
from pathlib import Path

import bessemer as bm


class Stop(bm.Callback):
    def on_batch_end(self, loop):
        if loop.step == int(os.environ.get("GOLDEN_STEP", -1)):
            for _ in range(60_000):
                if Path(os.environ["GOLDEN_CHECKPOINT"]).exists():
                    break
                time.sleep(0.01)
            os.kill(os.getpid(), getattr(signal, os.environ["GOLDEN_SIGNAL"]))
'''

ENVIRONMENT = '''\
"""A function to call, and a game with Gymnasium's interface."""


def add(a: int, b: int) -> int:
    return a + b


TOOLS = [add]


class Corridor:
    def reset(self, seed=None):
        self.place = seed % 3
        return self.place, {}

    def step(self, action):
        self.place += 2 * action - 1
        return self.place, self.place / 3, self.place == 3, False, {}
'''


def sentence(rng: random.Random, least: int = 10, most: int = 30) -> str:
    return " ".join(rng.choice(WORDS.split()) for _ in range(rng.randint(least, most))) + "."


def write_data(folder: Path) -> None:
    """Write every file that a case names: text, conversations, pairs, prompts, completions, user code."""
    rng = random.Random(0)
    write_lines(folder / "corpus.jsonl", ({"text": sentence(rng)} for _ in range(60)))
    (folder / "notes.txt").write_text("\n\n".join(sentence(rng, 20, 60) for _ in range(30)) + "\n")
    write_lines(folder / "chats.jsonl", (chat(rng) for _ in range(40)))
    write_lines(folder / "pairs.jsonl", (pair(rng) for _ in range(40)))
    write_lines(folder / "prompts.jsonl", ({"prompt": f"count {n}", "answer": str(n)} for n in range(40)))
    write_lines(folder / "completions.jsonl", (group(rng, n) for n in range(16)))
    (folder / "stop.py").write_text(STOP)
    (folder / "own_env.py").write_text(ENVIRONMENT)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat(rng: random.Random) -> dict[str, Any]:
    turns = [("user", sentence(rng, 2, 5)), ("assistant", sentence(rng, 1, 4))]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def pair(rng: random.Random) -> dict[str, Any]:
    return {"prompt": sentence(rng, 1, 3), "chosen": sentence(rng, 1, 3), "rejected": sentence(rng, 1, 3)}


def group(rng: random.Random, number: int) -> dict[str, Any]:
    """Four answers to one prompt; one log-probability per byte and one for the end (a tokenizer of bytes)."""
    texts = [rng.choice(WORDS.split()) for _ in range(4)]
    logprobs = [[-rng.uniform(1, 6) for _ in range(len(text) + 1)] for text in texts]
    rewards = [1.0, 0.0, 0.5, float(number % 3)]
    return {"prompt": f"say {number}", "completions": texts, "rewards": rewards, "logprobs": logprobs}
