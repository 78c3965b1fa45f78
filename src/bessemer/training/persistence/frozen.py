"""Parameters that are not trained: written once to RUN/reference/frozen, not in each checkpoint.

A checkpoint then holds what is trained (adapters, or the parameters that training.freeze leaves); with the frozen part
it is the whole model. The frozen part is on disk before the first checkpoint is.
"""

from __future__ import annotations

import hashlib
from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.manifest import COMMIT
from bessemer.errors import StorageError
from bessemer.generate.load import frozen_store
from bessemer.storage.files import storage
from bessemer.training.context import RunContext
from bessemer.training.setup.model import ModelParts


def open_frozen(context: RunContext) -> Checkpoints:
    return frozen_store(context.directory, context.topology.is_process_zero)


def save_frozen(context: RunContext, frozen: Any) -> None:
    """Before the first step: write the frozen parameters if they are not there. Every process calls it."""
    if frozen is None:
        return
    manager = open_frozen(context)
    with storage("cannot save the frozen weights"):
        manager.root.parent.mkdir(exist_ok=True)
    manager.save(0, {"params": frozen}, meta={"kind": "frozen"}, wait=True)
    manager.close()


def restore_frozen(context: RunContext, abstract: Any) -> Any:
    """Return the frozen parameters, in the shapes of `abstract`; None if every parameter is trained."""
    if abstract is None:
        return None
    manager = open_frozen(context)
    if problems := manager.verify(0):
        raise StorageError(
            f"the frozen weights {manager.path(0)} are damaged: {'; '.join(problems[:3])}. They are written once; put "
            "them back from a copy, or start a new run with init=."
        )
    return manager.restore(0, {"params": abstract})["params"]


def frozen_identity(context: RunContext) -> str | None:
    """Return the hash of the frozen weights' manifest, for meta.json; None if there are none."""
    manifest = open_frozen(context).path(0) / COMMIT
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None


def describe(parts: ModelParts) -> str | None:
    """Return `12,288 of 1,048,576 parameters (1.2%): …`; None if every parameter is trained."""
    if parts.split.everything:
        return None
    trained, total = parts.split.count(parts.boxed)
    what = f"{len(parts.split.frozen) + len(parts.split.adapted)} tensors frozen"
    if parts.split.adapted:
        what = f"adapters of rank {parts.split.lora.rank} on {len(parts.split.adapted)} matrices, {what}"
    return f"{trained:,} of {total:,} parameters ({trained / total:.2%}): {what}"
