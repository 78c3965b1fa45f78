"""Environments for tests, loaded by their path in worker processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bessemer.rl.environments.base import Completion, Environment


class Relay(Environment):
    """Answers `turns` times with something that depends on what was said, and rewards vowels. `log`: a file that gets
    a line per call."""

    def __init__(self, turns: int = 3, log: str = ""):
        self.turns, self.log, self.seen = turns, log, 0
        self.seed = 0

    def note(self, **facts: Any) -> None:
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"seed": self.seed, **facts}) + "\n")

    def reset(self, row: Any, seed: int) -> str:
        print("what an environment prints is no answer")
        self.seed = seed
        self.note(row=row["number"])
        return f"cats {row['number']}"

    def step(self, completion: Completion) -> tuple[str | None, float, bool]:
        self.seen += 1
        self.note(text=completion.text, finish=completion.finish)
        reward = sum(letter in "aeiou " for letter in completion.text) / 4
        return f"<|bos|>{len(completion.text)}", reward, self.seen == self.turns


class Faulty(Relay):
    """The second step of rows below `bad` goes wrong; `times`: a folder that counts how often, to fail at first."""

    def __init__(self, how: str, bad: int = 20, times: str = "", at_most: int = 10**9):
        super().__init__()
        self.how, self.bad, self.times, self.at_most = how, bad, times, at_most
        self.row = 0

    def reset(self, row: Any, seed: int) -> str:
        self.row = row["number"]
        return super().reset(row, seed)

    def step(self, completion: Completion) -> Any:
        found = super().step(completion)
        if self.row >= self.bad or self.seen != 2:
            return found
        if self.times:
            file = Path(self.times) / f"{self.row}-{self.seed}"
            file.open("a").write("x")
            if len(file.read_text()) > self.at_most:
                return found
        if self.how == "raise":
            raise KeyError("door")
        if self.how == "hang":
            time.sleep(10_000)
        if self.how == "die":
            os._exit(9)
        if self.how == "counts":
            self.counts = {"errors": 1}  # the name of something that is counted of every environment
            return found
        return {
            "nan": ("x", float("nan"), False),
            "text": ("x", "much", False),
            "short": ("x", 1.0),
            "blank": (None, 1.0, False),
            "object": (object(), 1.0, False),
        }[self.how]


class Moody(Relay):
    """Is not the same when it is replayed."""

    def step(self, completion: Completion) -> Any:
        _, reward, done = super().step(completion)
        if self.seen == 2:
            raise ValueError("mood")
        return f"{time.time_ns()}", reward, done


def hold(after: int) -> None:
    """Wait for a kill, from the call number `after` on, if HOLD_CALL names a folder; otherwise do nothing."""
    folder = os.environ.get("HOLD_CALL")
    if not folder:
        return
    if len(list(Path(folder).glob("call-*"))) >= after:
        (Path(folder) / "pid").write_text(str(os.getpid()))
        (Path(folder) / "here").touch()
        time.sleep(10_000)
    (Path(folder) / f"call-{time.time_ns()}-{os.getpid()}").touch()


class Held(Relay):
    """Waits in a step of the second rollout, if it is told to."""

    def step(self, completion: Completion) -> Any:
        hold(after=70)
        return super().step(completion)


def held_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Waits in the second rollout, if it is told to."""
    hold(after=1)
    return [len(text) / 9 for text in completions]


def held_ahead(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Waits in the third rollout, if it is told to."""
    hold(after=2)
    return [len(text) / 9 for text in completions]


def held_in_a_round(prompts: Any, completions: Any, number: Any, **columns: Any) -> list[float]:
    """Flat for odd rows. Waits in the second call for fewer completions than a rollout of 16 has, if it is told to."""
    if len(completions) < 16:
        hold(after=1)
    return [0.0 if n % 2 else sum(map(ord, text)) % 97 / 97 for n, text in zip(number, completions, strict=True)]
