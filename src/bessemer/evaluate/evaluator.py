"""The Evaluator: a job that judges a model by registered evaluations; it writes RUN/eval/TASK_stepN.json."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

import jax

from bessemer.evaluate import progress
from bessemer.evaluate.names import check_tasks, choose
from bessemer.generate import LoadedModel, load_model
from bessemer.job import BasicJob, ExecutionSpec, RunDirectory, atomic_write
from bessemer.job.files import storage
from bessemer.topology import Topology

M = TypeVar("M")


class Evaluator(BasicJob, Generic[M]):
    """Runs `tasks` over a loaded model. `limit` and `batch_size` go to each task, results to `say`.

    `Evaluator[MyModel]` names the model it is for. A subclass that measures something of its own overrides `run`, and
    the trainer's `evaluator` method returns it.
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
        self.limit = limit
        self.batch_size = batch_size
        self.say = say or (lambda text: None)
        self.results: dict[str, dict[str, Any]] = {}

    @classmethod
    def from_run(
        cls,
        run: RunDirectory,
        step: int | str | None = None,
        *,
        topology: Topology | None = None,
        **options: Any,
    ) -> Self:
        """Of a checkpoint on disk: the newest valid one, or `step`. Tasks are checked before it is read."""
        options["tasks"] = check_tasks(options.get("tasks", ("bpb",)))
        spec = ExecutionSpec(run.name, root=run.path.parent, topology=topology)
        return cls(spec, load_model(run, step, topology=topology), **options)

    @classmethod
    def from_trainer(
        cls,
        trainer: Any,
        *,
        fetch: Callable[[Any], Any] = jax.device_get,
        programs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Of a live trainer: its parameters as they are now, not copied.

        `programs` is a dictionary that keeps what is compiled; give the same one each time.
        """
        own = trainer.data.validation
        loaded = LoadedModel(
            trainer.model,
            trainer.full_params(),
            trainer.tokenizer,
            trainer.step,
            trainer.config.tree(),
            trainer.run_directory,
            trainer.topology,
            fetch=fetch,
            programs={} if programs is None else programs,
            held_out=None if trainer.dataset_train is None or own is None else own.rows.rows[0],
        )
        return cls(trainer.spec, loaded, **options)

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.tasks)

    def run(self) -> dict[str, dict[str, Any]]:
        """Label → result, each also in a file of its own. The label of `core:DIR` is core, of a task file its name."""
        for task in self.tasks:
            begun = time.monotonic()
            chosen = choose(task)
            label = task if chosen.label in self.results else chosen.label
            with progress.label(label):
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
