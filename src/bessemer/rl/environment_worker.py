"""`python -m bessemer.rl.environment_worker`: plays episodes; one JSON line in, one JSON line out per call.

A plain child process never inherits JAX's threads, and can be killed when a call hangs. It ends when the pipe from its
parent closes, also in the middle of a call. What an environment prints goes to standard error, and what it reads from
standard input is empty: `input()` raises EOFError rather than take a call, or wait for a terminal.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from bessemer.data.tokenize.chat import ToolCall
from bessemer.errors import BessemerError
from bessemer.registry import environments, import_plugin
from bessemer.rl.environments.base import Completion, Environment
from bessemer.user_code import line_of

Message = dict[str, Any]
RESERVED = {"turns", "failures", "timeouts", "errors", "retries"}
"""What is counted of every environment."""


def serve(requests: Iterator[str], replies: Any) -> None:
    """Read the settings from the first line, then answer one call per line."""
    settings = json.loads(next(requests))

    def reply(message: Message) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        for plugin in settings["plugins"]:
            import_plugin(plugin)
        make = environments.get(settings["name"])
        make(**settings["options"])  # options that are wrong are an error at once
    except Exception as error:  # noqa: BLE001 -- any code of the user's
        reply({"error": _described(error)})
        return
    reply({"ready": True})
    playing: dict[int, Environment] = {}
    for line in requests:
        call = json.loads(line)
        if call["call"] == "close":
            playing.clear()
            continue
        number = call["episode"]
        try:
            if call["call"] == "reset":
                playing[number] = make(**settings["options"])
                result = reset(playing[number], call["row"], call["seed"])
            else:
                result = step(playing[number], call["completion"])
            reply(result)
        except Exception as error:  # noqa: BLE001 -- any code of the user's
            playing.pop(number, None)
            reply({"error": _described(error)})


def reset(environment: Environment, row: Mapping[str, Any], seed: int) -> Message:
    prompt = environment.reset(row, seed)
    return {"prompt": content(prompt, "reset returned"), "tools": [dict(tool) for tool in environment.tools]}


def step(environment: Environment, given: Mapping[str, Any]) -> Message:
    """Return a step's results; raise TypeError or ValueError unless they are what the protocol says."""
    calls = tuple(ToolCall(**call) for call in given["calls"])
    found = environment.step(Completion(given["text"], calls, given["finish"]))
    if not isinstance(found, tuple) or len(found) != 3:
        raise TypeError(f"step returned {found!r:.100}, not (observation, reward, done)")
    observation, reward, done = found
    if not isinstance(reward, Real):
        raise TypeError(f"the reward is {reward!r:.100}, not a number")
    if not -1e300 < float(reward) < 1e300:  # also false for NaN
        raise ValueError(f"the reward is {float(reward)}: it must be finite")
    if done not in (True, False):  # also numpy's
        raise TypeError(f"done is {done!r:.100}, not true or false")
    if observation is None and not done:
        raise TypeError("there is no observation, and the episode is not over")
    seen = None if observation is None or done else content(observation, "the observation is")
    return {"observation": seen, "reward": float(reward), "done": bool(done), "counts": counted(environment.counts)}


def counted(counts: Any) -> dict[str, int]:
    """Return what an environment has counted as JSON has it."""
    fits = isinstance(counts, Mapping) and all(
        isinstance(name, str) and isinstance(count, Integral) for name, count in counts.items()
    )
    if not fits or RESERVED & set(counts):
        raise TypeError(
            f"counts are {counts!r:.100}: names with whole numbers, and other names than {', '.join(sorted(RESERVED))}"
        )
    return {name: int(count) for name, count in counts.items()}


def content(value: Any, what: str) -> Any:
    """Return a text, messages or token ids as JSON has them."""
    if isinstance(value, str) and value:
        return value
    listed = list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else []
    if listed and all(isinstance(item, Mapping) for item in listed):
        return [dict(item) for item in listed]
    if listed and all(isinstance(item, Integral) and not isinstance(item, bool) for item in listed):
        return [int(item) for item in listed]
    raise TypeError(f"{what} {value!r:.100}: a text, a list of messages or a list of token ids, and not empty")


def _described(error: BaseException) -> str:
    """Return what happened, and where in the user's code."""
    text = str(error) if isinstance(error, BessemerError) else f"{type(error).__name__}: {error}"
    line, _ = line_of(error)
    return text if line is None else f"{text} ({line})"


def lines(file: Any) -> Iterator[str]:
    """Yield lines as they come; end this process when the file does."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in file:
            waiting.put(line)
        os._exit(0)  # the parent is gone, whatever an environment is doing now

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get()


def take_streams() -> tuple[Any, Any]:
    """Return the pipes from and to the parent; leave an empty standard input, and standard error as standard output."""
    calls, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)  # what an environment prints is not an answer
    return calls, answers


if __name__ == "__main__":
    calls, answers = take_streams()
    serve(lines(calls), answers)
