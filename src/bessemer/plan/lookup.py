"""Lookup rows before there is data: an even share for every token, noted as assumed."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.models.allocation import Allocation, compute_lzw_allocation
from bessemer.training.lookup_parts import fix_settings, note
from bessemer.training.model_parts import with_model
from bessemer.training.trainer import BaseTrainer


def assume_allocation(trainer: BaseTrainer) -> None:
    """A training run shares rows out by its data; sizes and counts do not depend on how, only on how many."""
    model: Any = trainer.model
    if not getattr(model, "lookup_after_layers", ()) or model.allocation is not None:
        return
    shape = model.shape.lookup
    k = compute_lzw_allocation([], model.vocab_size, shape.rows, model.lookup_k_max)
    tokenizer = trainer.tokenizer.hash if trainer.tokenizer else None
    allocation = Allocation.of(k, np.ones(model.vocab_size, np.int64), tokenizer)
    fix_settings(trainer, model)
    trainer.model_parts = with_model(
        trainer, model.clone(allocation=allocation, lookup_rows=allocation.rows, lookup_d_up=shape.d_up)
    )
    note(trainer, allocation, "an even share, assumed: training uses LZW over its tokens")
