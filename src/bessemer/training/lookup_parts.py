"""The lookup rows of a run: shared out once, at its first start, then carried by its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.data.loader import Mixture
from bessemer.data.sample import sample_tokens
from bessemer.errors import InputError, StorageError
from bessemer.models.allocation import FILE, Allocation, compute_lzw_allocation
from bessemer.models.segment_attention import choose_path
from bessemer.training.model_parts import with_model

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

SECTION = "architecture/lookup"


def allocate(trainer: BaseTrainer, mixture: Mixture) -> None:
    """Give a model with lookup layers its allocation: of the run's own checkpoints, of `init`, or a new one."""
    model: Any = trainer.model
    if not getattr(model, "lookup_after_layers", ()):
        return
    allocation, origin = model.allocation, "the model's own allocation"
    if allocation is None:
        allocation, origin = saved_allocation(trainer) or (None, "")
    if allocation is None:
        allocation, origin = new_allocation(trainer, mixture)
    allocation.check(model, trainer.tokenizer.hash if trainer.tokenizer else None, origin)
    fix_settings(trainer, model)
    shape = model.shape.lookup
    trainer.model_parts = with_model(
        trainer, model.clone(allocation=allocation, lookup_rows=allocation.rows, lookup_d_up=shape.d_up)
    )
    note(trainer, allocation, origin)


def saved_allocation(trainer: BaseTrainer) -> tuple[Allocation, str] | None:
    """What this run, or the one it starts from, has saved; a resumed run never shares out anew."""
    manager = trainer.checkpoint_manager
    places = [manager.path(step) for step in reversed(manager.committed())]
    if not places and trainer.settings.init is not None:
        start = Path(trainer.settings.init)
        places = [start] if (start / FILE).is_file() else []
    problem: StorageError | None = None
    for place in places:
        try:
            return Allocation.read(place), str(place)
        except StorageError as error:  # a damaged checkpoint: the one before holds the same
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def new_allocation(trainer: BaseTrainer, mixture: Mixture) -> tuple[Allocation, str]:
    """LZW over a sample of the first stage's rows; a pure function of data and seed."""
    model: Any = trainer.model
    rows, size = model.shape.lookup.rows, model.vocab_size
    sample = sample_tokens(mixture, model.lookup_sample, trainer.settings.seed)
    largest = max((int(sequence.max()) for sequence in sample if len(sequence)), default=0)
    if largest >= size:
        raise InputError(f"the data holds token {largest}, outside the model's vocabulary of {size}.")
    k = compute_lzw_allocation(sample, size, rows, model.lookup_k_max)
    frequency = np.bincount(np.concatenate([np.empty(0, np.int64), *sample]), minlength=size)
    tokenizer = trainer.tokenizer.hash if trainer.tokenizer else None
    return Allocation.of(k, frequency, tokenizer), f"LZW over {int(frequency.sum()):,} training tokens"


def fix_settings(trainer: BaseTrainer, model: Any) -> None:
    """Numbers that were left to be derived are written to config.yaml: what is saved does not depend on a rule."""
    shape = model.shape.lookup
    chosen = {
        "rows": (shape.rows, "max(vocabulary, parameters // 1000), up to 64s"),
        "d_up": (shape.d_up, "4 × width"),
        "sample_tokens": (model.lookup_sample, "5 × (rows − vocabulary)"),
    }
    for name, (value, why) in chosen.items():
        key = f"{SECTION}/{name}"
        if key in trainer.config and trainer.config[key] == 0:
            trainer.config.set(key, value, why)


def note(trainer: BaseTrainer, allocation: Allocation, origin: str) -> None:
    """Shown at the start and kept in derived.json."""
    model: Any = trainer.model
    layers, plain = list(model.lookup_after_layers), allocation.rows / allocation.vocab_size
    trainer.note_derived("lookup layers", layers, f"after these blocks, of 0 to {model.depth - 1}")
    rule = trainer.config.provenance.get(f"{SECTION}/rows", "").removeprefix("chosen: ") or "of the model"
    trainer.note_derived("lookup rows", allocation.rows, f"{rule}; shared out by {origin}")
    trainer.note_derived("lookup k_max", model.lookup_k_max, f"the largest k is {allocation.longest}")
    trainer.note_derived("lookup mean k", round(plain, 3), "rows / vocabulary")
    trainer.note_derived(
        "lookup mean k, weighted", round(allocation.mean_k, 3), "by token frequency: what a token costs"
    )


def note_path(trainer: BaseTrainer, per_device: int) -> None:
    """Which way the lookup attention is computed in training."""
    model: Any = trainer.model
    allocation = getattr(model, "allocation", None)
    if allocation is None:
        return
    tokens = per_device * trainer.settings.block_size // trainer.topology.mesh.shape.get("context", 1)
    path = choose_path(model.lookup_path, tokens, allocation.longest)
    size = f"{tokens:,} tokens a device × up to {allocation.longest} rows"
    trainer.note_derived(
        "lookup path", path, size if model.lookup_path == "auto" else "architecture.lookup.path"
    )
