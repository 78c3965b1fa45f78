"""Frozen reference weights: what a policy is held against. Taken from the live parameters at one step, kept on the
devices as `state.reference`, and written once to RUN/reference/step_N, not into each checkpoint.

    reference in force at step s  =  the newest taken at a step ≤ s

so a restart at any step finds the one that was in force. It is on the disk before the first step that uses it. What is
taken where a stage begins comes after that step's checkpoint, whose state was still trained against the one before.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from bessemer.checkpoint import Checkpoints, retention
from bessemer.checkpoint.manifest import COMMIT
from bessemer.config import configure
from bessemer.errors import StorageError
from bessemer.job.files import storage
from bessemer.registry import objectives
from bessemer.training import reference_logps, stages, teacher

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

KEPT = 1 << 30  # references are deleted by `_prune` alone


def wanted(trainer: BaseTrainer) -> bool:
    """Whether the objective asks for reference weights: its trait `reference`, True or a function of its settings."""
    entry = objectives.entry(trainer.settings.objective)
    trait = entry.traits.get("reference", False)
    return bool(trait(configure(entry.settings[0])) if callable(trait) else trait)


def store(trainer: BaseTrainer) -> Checkpoints:
    return Checkpoints(
        trainer.run_directory.path / "reference", keep_last=KEPT, process_zero=trainer.is_process_zero
    )


def ensure(trainer: BaseTrainer) -> None:
    """Before the first step: a state that should have a reference and has none takes it now."""
    if trainer.functions.abstract_state.reference is not None and trainer.state.reference is None:
        take(trainer)
    reference_logps.ensure(trainer)
    teacher.record(trainer)


def take(trainer: BaseTrainer) -> None:
    """The trained parameters as they are (or the teacher's) become the reference, here and on the disk. Every process
    calls it."""
    if trainer.teacher is not None:
        reference, files = teacher.read_params(trainer, trainer.teacher), teacher.files_of(trainer.teacher)
    else:
        placed = jax.tree.map(lambda leaf: leaf.sharding, trainer.functions.abstract_state.reference)
        copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=placed)
        reference, files = copy(trainer.state.params), {}  # the frozen ones are what they were
    # Orbax counts its barriers by process, not by store: of two saves at once, one process's could meet the other's
    trainer.checkpoint_manager.wait()
    manager = store(trainer)
    manager.save(trainer.step, {"params": reference}, files=files, meta={"kind": "reference"}, wait=True)
    _prune(trainer, manager)
    manager.close()
    trainer.state = trainer.state.replace(reference=reference)


def restore(trainer: BaseTrainer, step: int) -> Any:
    """The reference in force at `step`, from the disk; None for a run that has none."""
    abstract = trainer.functions.abstract_state.reference
    if abstract is None:
        return None
    manager = store(trainer)
    known = in_force(trainer, manager, step)
    if not known:
        return None  # stopped before the first one was taken: `ensure` will
    if problems := manager.verify(known[-1]):
        raise StorageError(
            f"the reference weights {manager.path(known[-1])} are damaged: {'; '.join(problems[:3])}. They are written "
            "once; put them back from a copy, or start a new run with init=."
        )
    return manager.restore(known[-1], {"params": abstract})["params"]


def in_force(trainer: BaseTrainer, manager: Checkpoints, step: int) -> list[int]:
    """Steps of the references that a state saved at `step` may have known; the last is the one it had."""
    last = step - 1 if any(stage.end == step for stage in stages.followed(trainer)) else step
    return [taken for taken in manager.committed() if taken <= last]


def drop_after(trainer: BaseTrainer, step: int) -> None:
    """The run goes on from `step`: references taken later belong to another future of it."""
    manager = store(trainer)
    if any(taken > step for taken in manager.committed()):
        manager.set_aside_after(step)


def identity(trainer: BaseTrainer, step: int) -> dict[str, Any] | None:
    """Which reference is in force at `step`, for meta.json: its step, and the hash of its manifest; or which cached
    log-probabilities."""
    if trainer.functions.abstract_state.reference is None:
        return reference_logps.identity(trainer)
    manager = store(trainer)
    known = in_force(trainer, manager, step)
    if not known:
        return None
    manifest = (manager.path(known[-1]) / COMMIT).read_bytes()
    return {"step": known[-1], "sha256": hashlib.sha256(manifest).hexdigest()}


def _prune(trainer: BaseTrainer, manager: Checkpoints) -> None:
    """Delete references that no checkpoint which is kept would go back to."""
    oldest = min(trainer.checkpoint_manager.committed(), default=0)
    needless = [taken for taken in manager.committed() if taken <= oldest][:-1]
    if trainer.is_process_zero:
        with storage("cannot delete an old reference"):
            for taken in needless:
                retention.delete(manager.root, taken)
