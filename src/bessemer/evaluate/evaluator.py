"""The Evaluator: a job that judges a model by registered evaluations; it writes RUN/eval/TASK_stepN.json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from bessemer.errors import InputError, nearest
from bessemer.generate import LoadedModel, load_model
from bessemer.job import BasicJob, ExecutionSpec, RunDirectory, atomic_write
from bessemer.job.files import storage
from bessemer.registry import evaluations
from bessemer.topology import Topology


class Evaluator(BasicJob):
    """Runs `tasks` over a loaded model. `limit` and `batch_size` go to each task, results to `say`."""

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
        self.tasks = check_tasks(tasks)
        self.limit = limit
        self.batch_size = batch_size
        self.say = say or (lambda text: None)
        self.results: dict[str, dict[str, Any]] = {}

    @classmethod
    def from_run(
        cls, run: RunDirectory, step: int | None = None, *, topology: Topology | None = None, **options: Any
    ) -> Self:
        """Of a checkpoint on disk: the newest valid one, or `step`. Tasks are checked before it is read."""
        options["tasks"] = check_tasks(options.get("tasks", ("bpb",)))
        spec = ExecutionSpec(run.name, root=run.path.parent, topology=topology)
        return cls(spec, load_model(run, step, topology=topology), **options)

    @classmethod
    def from_trainer(cls, trainer: Any, **options: Any) -> Self:
        """Of a live trainer: its parameters as they are now, not copied."""
        loaded = LoadedModel(
            trainer.model,
            trainer.state.params,
            trainer.tokenizer,
            trainer.step,
            trainer.config.tree(),
            trainer.run_directory,
            trainer.topology,
        )
        return cls(trainer.spec, loaded, **options)

    @property
    def done(self) -> bool:
        return all(task in self.results for task in self.tasks)

    def run(self) -> dict[str, dict[str, Any]]:
        """Task → result, each also in a file of its own."""
        for task in self.tasks:
            begun = time.monotonic()
            found = evaluations.get(task)(self.loaded, limit=self.limit, batch_size=self.batch_size)
            result = {"task": task, "step": self.loaded.step, **found, "seconds": time.monotonic() - begun}
            self.results[task] = result
            self._write(result)
            self.say(f"{task}: {result['metric']} {result['value']:.4f}")
        return self.results

    def _write(self, result: dict[str, Any]) -> None:
        if self.spec.topology is not None and not self.spec.topology.is_process_zero:
            return
        directory = self.spec.run_directory.eval
        with storage("cannot create the directory for results"):
            directory.mkdir(exist_ok=True)
        name = f"{result['task']}_step{result['step']}.json"
        atomic_write(directory / name, json.dumps(result, indent=1) + "\n")


def check_tasks(tasks: Sequence[str]) -> list[str]:
    """The names without repetition. Only registered ones, never code; an unknown one lists them."""
    names = [name.strip() for name in tasks if name.strip()]
    if not names:
        raise InputError(f"no task is named. Known: {', '.join(evaluations.names())}.")
    for name in names:
        if name not in evaluations:
            close = nearest(name, evaluations.names())
            hint = f" Did you mean '{close}'?" if close else ""
            raise InputError(f"unknown evaluation '{name}'.{hint} Known: {', '.join(evaluations.names())}.")
    return list(dict.fromkeys(names))
