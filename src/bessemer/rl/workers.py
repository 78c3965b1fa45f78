"""Worker processes in which environments run, with a time-out per call; failures are counted, and repeated by replay.

Each episode belongs to one worker, which makes one call at a time. A call that takes too long gets its worker killed.
A failed call is repeated in a new instance: the episode is reset with the same row and seed and given the same
completions, and must answer as it did before. So are the other episodes of a worker that was lost.

`python -m bessemer.rl.workers` is the worker: it plays episodes; one JSON line in, one JSON line out per call. A plain
child process never inherits JAX's threads, and can be killed when a call hangs. It ends when the pipe from its parent
closes, also in the middle of a call. What an environment prints goes to standard error, and what it reads from standard
input is empty: `input()` raises EOFError rather than take a call, or wait for a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from bessemer.data.tokenize.chat import ToolCall
from bessemer.errors import BessemerError, InputError
from bessemer.job.process import module_command, module_environment
from bessemer.registry import environments, import_plugin
from bessemer.rl.environments.base import Completion, Environment, EnvironmentSpec
from bessemer.user_code import line_of

# --- in the process of the run ---


START_SECONDS = 300.0  # importing user code may take long
READ = 1 << 16

Call = dict[str, Any]
Reply = dict[str, Any]
FORGET: Call = {"call": "close"}
START: Call = {"call": "start"}


class CallFailed(Exception):
    """A call that gave no result."""


class CallTimeout(CallFailed):
    """A call that took too long."""


@dataclass
class Played:
    """An episode as its worker must know it: the calls that were answered, and what was answered."""

    calls: list[Call] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of a call: its reply, or `failure`; and how often it was tried in vain."""

    reply: Reply | None = None
    failure: str = ""
    timeouts: int = 0
    errors: int = 0
    retries: int = 0

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value}


def check_made(spec: EnvironmentSpec, plugins: list[str]) -> str:
    """Make one environment in a worker process and return its name; raise InputError with what its constructor raised,
    and where."""
    worker = Worker({"name": spec.name, "options": spec.options, "plugins": plugins}, START_SECONDS, 0)
    try:
        worker.submit(0, START).result()
        return spec.name
    except CallFailed as error:
        raise InputError(f"the environment '{spec.name}' cannot be made: {error}.") from None
    finally:
        worker.close()


class Workers:
    """`count` processes that play the episodes of one environment."""

    def __init__(self, spec: EnvironmentSpec, plugins: list[str], count: int, timeout: float, retries: int):
        settings = {"name": spec.name, "options": spec.options, "plugins": plugins}
        self._workers = [Worker(settings, timeout, retries) for _ in range(count)]

    def submit(self, episode: int, call: Call) -> Future[Outcome]:
        """Queue a call of an episode; its calls are made in their order."""
        return self._workers[episode % len(self._workers)].submit(episode, call)

    def forget(self) -> None:
        """Drop all episodes."""
        for worker in self._workers:
            worker.forget()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class Worker:
    """One process, and the thread that hands it calls."""

    def __init__(self, settings: Mapping[str, Any], timeout: float, retries: int):
        self.settings, self.timeout, self.retries = settings, timeout, retries
        self._process: subprocess.Popen[bytes] | None = None
        self._held = b""  # of a reply that is not whole yet
        self._live: set[int] = set()  # episodes that the process knows
        self._played: dict[int, Played] = {}
        self._closing = False
        self._queue: queue.SimpleQueue[tuple[int, Call, Future[Outcome]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def submit(self, episode: int, call: Call) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._queue.put((episode, call, future))
        return future

    def forget(self) -> None:
        """Drop all episodes, after the calls that wait."""
        self.submit(0, FORGET)

    def close(self) -> None:
        """End the process and the thread; calls that wait are dropped."""
        self._closing = True
        self._queue.put(None)
        process = self._process
        if process is not None:
            process.kill()  # the thread sees it
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            episode, call, future = item
            try:
                future.set_result(self._answered(episode, call))
            except BaseException as error:  # noqa: BLE001 -- whoever waits gets it
                future.set_exception(error)
        self._kill()

    def _answered(self, episode: int, call: Call) -> Outcome:
        if call is FORGET:
            return self._forget()
        if call is START:
            self._start()
            return Outcome(reply={})
        outcome, played = Outcome(failure="the run has ended"), self._played.setdefault(episode, Played())
        for attempt in range(self.retries + 1):
            if self._closing:
                break
            if attempt:
                outcome.retries += 1
            try:
                if self._process is None:
                    self._start()
                if episode not in self._live and played.calls:
                    outcome.retries += not attempt  # a worker was lost by another episode
                    self._replay(episode, played)
                reply = self._call(episode, call)
            except CallTimeout as error:
                outcome.timeouts += 1
                outcome.failure = str(error)
            except CallFailed as error:
                outcome.errors += 1
                outcome.failure = str(error)
            else:
                played.calls.append(call)
                played.replies.append(reply)
                outcome.reply, outcome.failure = reply, ""
                return outcome
            self._live.discard(episode)
        return outcome

    def _forget(self) -> Outcome:
        if self._process is not None:
            with contextlib.suppress(CallFailed):
                self._send({"call": "close"})
        self._live.clear()
        self._played.clear()
        return Outcome(reply={})

    def _replay(self, episode: int, played: Played) -> None:
        for call, before in zip(played.calls, played.replies, strict=True):
            if self._call(episode, call) != before:
                raise CallFailed(
                    "it answered differently when its episode was replayed: it must depend on its seed only"
                )

    def _call(self, episode: int, call: Call) -> Reply:
        self._send({**call, "episode": episode})
        reply = self._receive(self.timeout, f"{call['call']} took longer than {self.timeout:g} s")
        if "error" in reply:
            raise CallFailed(f"{call['call']}: {reply['error']}")
        self._live.add(episode)
        return reply

    # --- the process ---

    def _start(self) -> None:
        self._held, self._live = b"", set()
        self._process = subprocess.Popen(
            module_command("bessemer.rl.workers"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=module_environment(JAX_PLATFORMS="cpu", TOKENIZERS_PARALLELISM="false"),  # the chips are the trainer's
        )
        self._send(self.settings)
        reply = self._receive(START_SECONDS, f"it was not ready within {START_SECONDS:g} s")
        if "error" in reply:
            self._kill()
            raise InputError(f"the environment '{self.settings['name']}' cannot be made: {reply['error']}")

    def _send(self, message: Mapping[str, Any]) -> None:
        process = self._process
        if process is None:
            raise CallFailed("its worker process has ended")
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):
            raise self._lost() from None

    def _receive(self, timeout: float, late: str) -> Reply:
        process, end = self._process, time.monotonic() + timeout
        assert process is not None and process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._held:
                if not selector.select(max(0.0, end - time.monotonic())):
                    self._kill()
                    raise CallTimeout(late)
                data = os.read(process.stdout.fileno(), READ)
                if not data:
                    raise self._lost()
                self._held += data
        line, _, self._held = self._held.partition(b"\n")
        reply: Reply = json.loads(line)
        return reply

    def _lost(self) -> CallFailed:
        process = self._process
        code = None if process is None else process.wait()
        self._kill()
        return CallFailed(f"its worker process ended with code {code}")

    def _kill(self) -> None:
        process, self._process = self._process, None
        self._live.clear()
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what was not sent is lost with the process
                    pipe.close()


# --- in the worker process ---


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
