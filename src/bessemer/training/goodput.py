"""Goodput: the share of wall time, over all starts of a run, that went into steps which are in its result.

    goodput = Σ time of kept steps, less waiting for data  /  Σ time of all starts, each to its last sign of life

What lowers it: start-up, compilation, validation, saving, and steps that were done again because a process died before
the next checkpoint. Time in a queue, when there was no process, does not count. The numerator is in the loop state, so
that a restart forgets the steps it forgets; the denominator is in status.json, which a kill leaves behind.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


def begin(trainer: BaseTrainer) -> dict[str, Any]:
    """Fields of status.json: how often the run was started, when it was now, and the seconds of the starts before."""
    status = trainer.run_directory.read_status() if trainer.continues else {}
    last = max(0.0, status.get("heartbeat", 0.0) - status["began"]) if "began" in status else 0.0
    trainer.wall_before = status.get("wall_before", 0.0) + last
    return {
        "starts": status.get("starts", 0) + 1,
        "began": time.time() - trainer.startup.age,
        "wall_before": trainer.wall_before,
    }


def wall_seconds(trainer: BaseTrainer) -> float:
    """Of all starts so far."""
    return trainer.wall_before + trainer.startup.age
