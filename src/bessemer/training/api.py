"""The Python front door: `bm.train`, `bm.resume` and the `Run` they return."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.evaluate import Evaluator
from bessemer.generate import LoadedModel, SamplingOptions, load_model, sample
from bessemer.job import RunDirectory, find_run
from bessemer.report.metrics import MetricsFile
from bessemer.training import launch
from bessemer.user_code import refuse_while_importing

PARTS = ("model", "model_state", "dataset_train", "dataset_eval", "data_collator", "tokenizer", "callbacks")


class Run:
    """A run on disk, by its path or its name under `runs`: what it measured, and the model it made."""

    def __init__(self, run: RunDirectory | str | Path, *, runs: str | Path = "runs"):
        self.directory = run if isinstance(run, RunDirectory) else find_run(run, runs)

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self.directory.path

    @property
    def status(self) -> dict[str, Any]:
        """status.json: state, step, exit code, message."""
        return self.directory.read_status()

    def metrics(self) -> list[dict[str, Any]]:
        """Return all rows of metrics.jsonl, in order."""
        return list(MetricsFile(self.directory.metrics).rows())

    def load(self, step: int | str | None = None, *, base: str | Path | None = None) -> LoadedModel:
        """Return the model of a checkpoint (default: the newest valid one): `.model`, `.params`, `.tokenizer`.

        base: where the base of a run with adapters lies, in place of where the run says.
        """
        return load_model(self.directory, step, base=base)

    def sample(self, prompt: str, *, max_tokens: int = 100, step: int | str | None = None, **options: Any) -> str:
        """Return the model's continuation of `prompt`. Options: temperature (0 = greedy), top_k, top_p, min_p, seed."""
        loaded = self.load(step)
        completions, notices = sample(loaded, [prompt], max_tokens=max_tokens, sampling=SamplingOptions(**options))
        for notice in [*loaded.notes, *notices]:
            print(notice, file=sys.stderr)
        return completions[0].text

    def evaluate(
        self, tasks: Sequence[str] = ("bpb",), *, step: int | str | None = None, **options: Any
    ) -> dict[str, dict[str, Any]]:
        """Return task → result of the named evaluations, also written to RUN/eval. Options: limit, batch_size."""
        return Evaluator.from_run(self.directory, step, tasks=tasks, **options).run()

    def __repr__(self) -> str:
        return f"Run('{self.path}', {self.status.get('state', 'unknown')} at step {self.status.get('step')})"


def take_parts(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the parts out of the keywords; what is left are settings. `callbacks` as names is a setting."""
    given = settings.get("callbacks")
    names = [given] if isinstance(given, str) else list(given or ())
    by_name = all(isinstance(name, str) for name in names)
    return {key: settings.pop(key) for key in PARTS if key in settings and not (key == "callbacks" and by_name)}


def train(
    recipe: str | Path = "quickstart", *, name: str | None = None, runs: str | Path = "runs", **settings: Any
) -> Run:
    """Train and return the finished run. Settings are dotted keys: train("quickstart", **{"training.steps": 100}).

    Parts can be given directly: model, model_state, dataset_train, dataset_eval, data_collator, tokenizer, callbacks.
    """
    parts = take_parts(settings)
    trainer = launch.build_trainer(recipe, settings, name=name, root=runs, **parts)
    trainer.run()
    return Run(trainer.run_directory)


def resume(
    run: str | Path,
    *,
    runs: str | Path = "runs",
    step: int | None = None,
    trust: bool = False,
    change: bool = False,
    base: str | None = None,
    **settings: Any,
) -> Run:
    """Continue a stopped run to its end; a finished one is returned as it is. Parts as for `train`.

    change: settings may make it another run from here on, such as a longer one; that is recorded as a branch point.
    """
    refuse_while_importing()
    parts = take_parts(settings)
    if (
        step is not None
        or not launch.is_finished(run, runs, trust=trust)
        or launch.changes_finished(run, settings, root=runs, trust=trust, change=change)
    ):
        launch.reopen(run, settings, root=runs, step=step, trust=trust, change=change, base=base, **parts).run()
    return Run(find_run(run, runs, trust=trust))
