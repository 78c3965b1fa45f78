"""A trainer whose batches are the windows of its store in order, as parity.py and the stored curves have them.

arena.py --stream passes it to `bessemer train` as plugins=[…/stream_order.py] job=stream-order. Step s trains on
windows s·B … (s+1)·B - 1 of the stream, modulo the number of whole ones; validation is the first
`training.validation_steps` windows of the held-out stream, modulo theirs. Everything else is the usual trainer's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import bessemer as bm
from bessemer.data import Batch, DataPlan, Rows
from bessemer.data.rows.rows import PmdRows
from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.registry import jobs
from bessemer.storage.checksums import json_digest
from bessemer.training.setup.data import DataParts
from bessemer.training.validation import ValidationSet


def whole_windows(rows: Rows) -> int:
    """Return how many windows have a target at every position; the last row of a stream may be padded."""
    if not isinstance(rows, PmdRows):
        raise InputError("job=stream-order reads the windows of one stream: give training.dataset=STORE:PMD.")
    return (len(rows.tokens) - 1) // rows.block_size


class InOrder:
    """The batches of a `DataPlan` of one source, its rows taken in order."""

    def __init__(self, plan: DataPlan, held_out: int) -> None:
        if len(plan.sources) != 1 or len(plan.boundaries):
            raise InputError("job=stream-order trains on one store in one stage; give a single training.dataset.")
        self.plan, self.sources, self.stats = plan, plan.sources, plan.stats
        self.fields, self.validation = plan.fields, plan.validation
        self.whole = whole_windows(plan.sources[0])
        if self.validation is not None:
            index = np.arange(held_out) % whole_windows(self.validation.rows[0])
            self.validation.source, self.validation.index = np.zeros(held_out, np.int64), index

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        size = self.plan.batch_size
        index = np.arange(step * size, (step + 1) * size)[rows or slice(None)] % self.whole
        return self.sources[0].get(index)

    def epoch(self, step: int) -> float:
        return step * self.plan.batch_size / self.whole

    @property
    def fingerprint(self) -> str:
        return json_digest([self.sources[0].fingerprint, "in order", self.plan.batch_size])


@jobs.register("stream-order")
class StreamOrderTrainer(bm.BaseTrainer[bm.BaseTrainerConfig, GPT]):
    def configure_dataloaders(self) -> DataParts:
        built: Any = super().configure_dataloaders()
        plan = InOrder(built.plan, self.settings.validation_steps)
        held_out = None if plan.validation is None else ValidationSet(plan.validation, self.tokenizer)
        return replace(built, plan=plan, validation=held_out)
