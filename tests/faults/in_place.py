"""Faults at an exact step, in this process: quicker than a process each, and compared among themselves, because the
eight virtual devices of the tests give other bits than the one of a real process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tests.faults.harness import words

from bessemer.errors import BessemerError
from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback
from bessemer.training.trainer import BaseTrainer

SHORT = {"training.steps": 12, "logging.validation_interval": 6}


def one_device(settings: Any) -> Any:
    return make_topology(settings, devices=jax.devices()[:1])


class At(Callback):
    """Does `action` once, after step `step` and before its checkpoint."""

    def __init__(self, step: int, action: Callable[[], object]):
        self.step, self.action = step, action

    def on_batch_end(self, loop: Any) -> None:
        if loop.step == self.step:
            self.action()


def build(settings: dict[str, object], run: Path, *callbacks: Callback, **more: object) -> BaseTrainer:
    """A new run of twelve steps; `more` are settings with an underscore for the dot (`logging_keep_last=2`)."""
    overrides = words({**settings, **SHORT, **{key.replace("_", ".", 1): more[key] for key in more}})
    return launch.build_trainer("quickstart", overrides, name=run.name, root=run.parent, callbacks=callbacks)


def ends(trainer: BaseTrainer) -> tuple[int, str]:
    """Run; the exit code and the message the command line would give. A bug (exit 1) raises."""
    try:
        trainer.run()
    except BessemerError as error:
        return error.exit_code, str(error)
    return 0, ""


def poison(trainer: BaseTrainer, steps: set[int]) -> None:
    """Not-a-numbers in the loss mask of the batches at these steps (counted from 0), as the loader hands them out."""
    plan = trainer.data.plan
    clean = plan.batch

    def batch(step: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        found = dict(clean(step, rows))
        if step in steps:
            found["loss_mask"] = np.full_like(found["loss_mask"], np.nan)
        return found

    object.__setattr__(plan, "batch", batch)
