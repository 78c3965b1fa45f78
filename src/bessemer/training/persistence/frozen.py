"""Parameters that are not trained, on the disk: written once to RUN/reference/frozen, not into each checkpoint.

A checkpoint then holds what is trained (adapters, or the parameters that training.freeze leaves), and with the frozen
part it is the whole model. It is on the disk before the first checkpoint is.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint import store as retention
from bessemer.checkpoint.manifest import COMMIT
from bessemer.config import configure
from bessemer.errors import StorageError
from bessemer.generate.load import frozen_store
from bessemer.registry import objectives
from bessemer.storage.files import storage
from bessemer.training import stages
from bessemer.training.persistence import reference_logps, teacher

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


def store_frozen(trainer: BaseTrainer) -> Checkpoints:
    return frozen_store(trainer.run_directory, trainer.is_process_zero)


def ensure_frozen(trainer: BaseTrainer) -> None:
    """Before the first step: what is frozen is written, if it is not there. Every process calls it."""
    if trainer.state.frozen is None:
        return
    manager = store_frozen(trainer)
    with storage("cannot keep the frozen weights"):
        manager.root.parent.mkdir(exist_ok=True)
    manager.save(0, {"params": trainer.state.frozen}, meta={"kind": "frozen"}, wait=True)
    manager.close()


def restore_frozen(trainer: BaseTrainer) -> Any:
    """The frozen parameters from the disk; None for a run that trains everything."""
    abstract = trainer.functions.abstract_state.frozen
    if abstract is None:
        return None
    manager = store_frozen(trainer)
    if problems := manager.verify(0):
        raise StorageError(
            f"the frozen weights {manager.path(0)} are damaged: {'; '.join(problems[:3])}. They are written once; put "
            "them back from a copy, or start a new run with init=."
        )
    return manager.restore(0, {"params": abstract})["params"]


def frozen_identity(trainer: BaseTrainer) -> str | None:
    """For meta.json: the hash of the manifest of the frozen weights; None where everything is trained."""
    if trainer.functions.abstract_state.frozen is None:
        return None
    manifest = store_frozen(trainer).path(0) / COMMIT
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None


def describe(trainer: BaseTrainer) -> str | None:
    """`12,288 of 1,048,576 parameters (1.2%): …`; None where everything is trained."""
    parts = trainer.model_parts
    if parts.split.everything:
        return None
    trained, total = parts.split.count(parts.boxed)
    what = f"{len(parts.split.frozen) + len(parts.split.adapted)} tensors frozen"
    if parts.split.adapted:
        what = f"adapters of rank {parts.split.lora.rank} on {len(parts.split.adapted)} matrices, {what}"
    return f"{trained:,} of {total:,} parameters ({trained / total:.2%}): {what}"


# Frozen reference weights: what a policy is held against. Taken from the live parameters at one step, kept on
# the devices as `state.reference`, and written once to RUN/reference/step_N, not into each checkpoint.
#
#     reference in force at step s  =  the newest taken at a step ≤ s
#
# so a restart at any step finds the one that was in force. It is on the disk before the first step that uses
# it. What is taken where a stage begins comes after that step's checkpoint, whose state was still trained
# against the one before.


KEPT = 1 << 30  # references are deleted by `_prune` alone


def wanted(trainer: BaseTrainer) -> bool:
    """Whether the objective asks for reference weights: its trait `reference`, True or a function of its settings."""
    entry = objectives.entry(trainer.settings.objective)
    trait = entry.traits.get("reference", False)
    return bool(trait(configure(entry.settings[0])) if callable(trait) else trait)


def store_reference(trainer: BaseTrainer) -> Checkpoints:
    return Checkpoints(
        trainer.run_directory.path / "reference", keep_last=KEPT, process_zero=trainer.is_process_zero
    )


def ensure_reference(trainer: BaseTrainer) -> None:
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
    manager = store_reference(trainer)
    manager.save(trainer.step, {"params": reference}, files=files, meta={"kind": "reference"}, wait=True)
    _prune(trainer, manager)
    manager.close()
    trainer.state = trainer.state.replace(reference=reference)


def restore_reference(trainer: BaseTrainer, step: int) -> Any:
    """The reference in force at `step`, from the disk; None for a run that has none."""
    abstract = trainer.functions.abstract_state.reference
    if abstract is None:
        return None
    manager = store_reference(trainer)
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
    manager = store_reference(trainer)
    if any(taken > step for taken in manager.committed()):
        manager.set_aside_after(step)


def reference_identity(trainer: BaseTrainer, step: int) -> dict[str, Any] | None:
    """Which reference is in force at `step`, for meta.json: its step, and the hash of its manifest; or which cached
    log-probabilities."""
    if trainer.functions.abstract_state.reference is None:
        return reference_logps.identity(trainer)
    manager = store_reference(trainer)
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
