"""The Evaluator: a job that runs registered evaluations on a model and writes RUN/eval/TASK_stepN.json."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import jax

from bessemer import console
from bessemer.errors import InputError, did_you_mean
from bessemer.evaluate.tasks import SUFFIXES, evaluate_task, is_task_file, read_task
from bessemer.generate import LoadedModel, load_model
from bessemer.job import BasicJob, ExecutionSpec, RunDirectory
from bessemer.registry import evaluations
from bessemer.storage.files import atomic_write, storage
from bessemer.topology import Topology
from bessemer.user_code import is_known, load_attribute
from bessemer.user_code import label as code_label

M = TypeVar("M")


class LiveModel(Protocol):
    """A model that can be evaluated while it trains: a trainer."""

    spec: ExecutionSpec

    def loaded(self, fetch: Callable[[Any], Any], programs: dict[str, Any]) -> LoadedModel: ...


class Evaluator(BasicJob, Generic[M]):
    """Runs `tasks` on a loaded model, each with `limit` and `batch_size`; `say` receives a line per result.

    `Evaluator[MyModel]` names the model it is for. A subclass with its own measurements overrides `run`, and the
    trainer's `evaluator` method returns it.
    """

    def __init__(
        self,
        spec: ExecutionSpec,
        loaded: LoadedModel,
        tasks: Sequence[str] = ("bpb",),
        *,
        limit: int | None = None,
        batch_size: int | None = None,
        say: Callable[[str], None] | None = None,
    ):
        super().__init__(spec)
        self.loaded = loaded
        self.tasks = check_tasks(tasks) if tasks else []
        self.limit, self.batch_size = limit, batch_size
        self.say = say or (lambda text: None)
        self.results: dict[str, dict[str, Any]] = {}

    @classmethod
    def from_run(
        cls,
        run: RunDirectory,
        step: int | str | None = None,
        *,
        topology: Topology | None = None,
        base: str | None = None,
        **options: Any,
    ) -> Self:
        """Evaluate a checkpoint on disk: the newest valid one, or `step`. Tasks are checked before it is read.

        base: where the base of a run with adapters lies, in place of where the run says.
        """
        options["tasks"] = check_tasks(options.get("tasks", ("bpb",)))
        spec = ExecutionSpec(run.name, root=run.path.parent, topology=topology)
        return cls(spec, load_model(run, step, topology=topology, base=base), **options)

    @classmethod
    def from_trainer(
        cls,
        live: LiveModel,
        *,
        fetch: Callable[[Any], Any] = jax.device_get,
        programs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Evaluate the parameters of a live trainer as they are now, without a copy.

        `programs` is a dictionary that keeps what is compiled; pass the same one each time.
        """
        return cls(live.spec, live.loaded(fetch, {} if programs is None else programs), **options)

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.tasks)

    def run(self) -> dict[str, dict[str, Any]]:
        """Return label -> result; write each to a file. `core:DIR` has the label core, a task file its name."""
        for task in self.tasks:
            begun = time.monotonic()
            chosen = choose(task)
            label = task if chosen.label in self.results else chosen.label
            with console.task_name(label):
                found = chosen.run(self.loaded, limit=self.limit, batch_size=self.batch_size)
            result = {"task": label, "step": self.loaded.step, **found, "seconds": time.monotonic() - begun}
            self.results[label] = result
            self._write(result)
            self.say(f"{label}: {result['metric']} {result['value']:.4f}")
        return self.results

    def _write(self, result: dict[str, Any]) -> None:
        if self.spec.topology is not None and not self.spec.topology.is_process_zero:
            return
        directory = self.spec.run_directory.eval
        with storage("cannot create the directory for results"):
            directory.mkdir(exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{result['task']}_step{result['step']}.json")
        atomic_write(directory / name, json.dumps(result, indent=1) + "\n")


# --- names of evaluations: registered (`bpb`), with data (`core:DIR`), a task file (`my.jsonl`), or code
# (`file.py:function`), which is loaded only if the user typed it or job/trust.py admitted the run ---

LISTS = "harness:"


class Chosen(NamedTuple):
    """`run(loaded, limit=, batch_size=)` returns plain values with `metric` and `value`."""

    label: str
    run: Callable[..., dict[str, Any]]


def split_tasks(text: str) -> list[str]:
    """Split at commas; names after `harness:` that are not ours are its tasks: harness:piqa,copa,bpb."""
    words: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        ours = is_file(word) or ".py:" in word or word.partition(":")[0] in evaluations
        if words and words[-1].startswith(LISTS) and not ours:
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


def check_tasks(tasks: Sequence[str]) -> list[str]:
    """Return the names without repetition; raise InputError, with the known names, for an unknown one."""
    names = [name.strip() for name in tasks if name.strip()]
    if not names:
        raise InputError(f"no task is named. Known: {known()}.")
    for name in names:
        if is_file(name):
            if not Path(name).is_file():
                raise InputError(f"there is no task file '{name}'.")
            continue
        if names_code(name) and is_known(name.rpartition(":")[0]):
            _own_evaluation(name)
            continue
        word, colon, source = name.partition(":")
        if word not in evaluations:
            hint = did_you_mean(word, evaluations.names())
            raise InputError(f"unknown evaluation '{name}'.{hint} Known: {known()}.")
        if colon and (not source or "source" not in inspect.signature(evaluations.get(word)).parameters):
            reason = "takes nothing" if source else "has nothing"
            raise InputError(f"'{name}': {word} {reason} after the colon.")
    return list(dict.fromkeys(names))


def is_file(name: str) -> bool:
    """Return whether it is a task file, such as pets.jsonl; gsm8k:test.jsonl is an evaluation with its data."""
    return is_task_file(name) and name.partition(":")[0] not in evaluations


def names_code(name: str) -> bool:
    """Return whether it is a function, such as my_eval.py:score; gsm8k:test.jsonl is an evaluation with its data."""
    return ":" in name and not is_file(name) and name.partition(":")[0] not in evaluations


def _own_evaluation(name: str) -> Callable[..., dict[str, Any]]:
    """Return the user's function; raise InputError if it cannot be called as an evaluation."""
    function = load_attribute(name, evaluations.kind)
    try:
        inspect.signature(function).bind(None, limit=None, batch_size=None)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"'{name}' is not an evaluation, which is a function (loaded, *, limit=None, batch_size=None): {error}. "
            f"Known: {known()}."
        ) from error
    return function


def known() -> str:
    return f"{', '.join(evaluations.names())}, task files ({' or '.join(SUFFIXES)}), and file.py:function"


def choose(name: str) -> Chosen:
    """Return the evaluation of a checked name. With the trait `by_source`, its data is part of the label."""
    if is_file(name):
        task = read_task(name)
        return Chosen(task.name, partial(evaluate_task, task=task))
    if names_code(name):
        return Chosen(code_label(name), _own_evaluation(name))
    word, colon, source = name.partition(":")
    entry = evaluations.entry(word)
    label = name if entry.traits.get("by_source") else word
    return Chosen(label, partial(entry.value, source=source) if colon else entry.value)
