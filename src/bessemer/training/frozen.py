"""Parameters that are not trained, on the disk: written once to RUN/reference/frozen, not into each checkpoint.

A checkpoint then holds what is trained (adapters, or the parameters that training.freeze leaves), and with the frozen
part it is the whole model. It is on the disk before the first checkpoint is.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.manifest import COMMIT
from bessemer.errors import StorageError
from bessemer.generate.load import frozen_store
from bessemer.job.files import storage

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


def store(trainer: BaseTrainer) -> Checkpoints:
    return frozen_store(trainer.run_directory, trainer.is_process_zero)


def ensure(trainer: BaseTrainer) -> None:
    """Before the first step: what is frozen is written, if it is not there. Every process calls it."""
    if trainer.state.frozen is None:
        return
    manager = store(trainer)
    with storage("cannot keep the frozen weights"):
        manager.root.parent.mkdir(exist_ok=True)
    manager.save(0, {"params": trainer.state.frozen}, meta={"kind": "frozen"}, wait=True)
    manager.close()


def restore(trainer: BaseTrainer) -> Any:
    """The frozen parameters from the disk; None for a run that trains everything."""
    abstract = trainer.functions.abstract_state.frozen
    if abstract is None:
        return None
    manager = store(trainer)
    if problems := manager.verify(0):
        raise StorageError(
            f"the frozen weights {manager.path(0)} are damaged: {'; '.join(problems[:3])}. They are written once; put "
            "them back from a copy, or start a new run with init=."
        )
    return manager.restore(0, {"params": abstract})["params"]


def identity(trainer: BaseTrainer) -> str | None:
    """For meta.json: the hash of the manifest of the frozen weights; None where everything is trained."""
    if trainer.functions.abstract_state.frozen is None:
        return None
    manifest = store(trainer).path(0) / COMMIT
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
