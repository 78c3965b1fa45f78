"""Validation: the same held-out sequences each time, whatever the batch, mesh or process count."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.data import Tokenizer, Validation
from bessemer.data.rows import fields_of
from bessemer.evaluate.bpb import standard_error
from bessemer.training.feed import device_batch
from bessemer.training.fetch import fetch

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


KNOWN = ("loss", "weight", "nats", "bytes", "rows", "nats_nats", "nats_bytes", "bytes_bytes")
"""Sums of every validation; what else an objective returns is shown under its own name."""


class ValidationSet:
    """The data's fixed held-out rows, each target with its length in bytes."""

    def __init__(self, rows: Validation, tokenizer: Tokenizer | None):
        self.rows = rows
        self.count = len(rows)
        self.tokenizer = tokenizer

    def read(self, number: int, batch_size: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """Rows of batch `number` of a pass; those beyond the set are blank: no target, so no weight."""
        batch = dict(self.rows.batch(number, batch_size, rows))
        if self.tokenizer is not None:
            batch["target_bytes"] = self.tokenizer.target_bytes(batch["input_ids"], batch["target_ids"])
        return batch

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Size and fingerprint of the set: two runs with the same fingerprint are judged on the same targets."""
        digest = hashlib.sha256((self.tokenizer.hash if self.tokenizer is not None else "").encode())
        size, documents = 0, 0
        for number in range(self.rows.batches(READ_ROWS)):
            batch = self.read(number, READ_ROWS)
            for name in sorted(name for name in batch if name in JUDGED):
                digest.update(np.ascontiguousarray(batch[name]).tobytes())
            if self.tokenizer is not None and {"target_ids", "loss_mask"} <= batch.keys():
                counts = (batch["target_ids"] >= 0) & (batch["loss_mask"] > 0)
                size += int(batch["target_bytes"][counts].sum())
                documents += int((batch["input_ids"] == self.tokenizer.bos_id)[counts].sum())
        found = {"fingerprint": digest.hexdigest(), "sequences": self.count}
        return found | ({"documents": documents, "bytes": size} if size else {})


READ_ROWS = 256
JUDGED = ("input_ids", "target_ids", "loss_mask", "segment_ids", "pair_ids")
"""Fields that say what is judged; log-probabilities of a reference, say, depend on the run."""


def validate(trainer: BaseTrainer) -> dict[str, Any]:
    """{"val_loss", "val_bpb", "val_bpb_se", "min_val_bpb"}; the best is kept in the loop state."""
    sums = validation_sums(trainer)
    loss = sums["loss"] / sums["weight"]
    row: dict[str, Any] = {"val_loss": loss}
    state = trainer.loop_state
    if state.best_val_loss is None or loss < state.best_val_loss:
        state.best_val_loss, state.best_step, state.stale_validations = loss, trainer.step, 0
    elif state.best_step != trainer.step:  # the same step again, after a restart, is not a worse one
        state.stale_validations += 1
    state.last_validation = trainer.step
    if sums.get("bytes"):
        bits = sums["nats"] / (math.log(2) * sums["bytes"])
        state.min_val_bpb = bits if state.min_val_bpb is None else min(bits, state.min_val_bpb)
        row |= {"val_bpb": bits, "min_val_bpb": state.min_val_bpb}
        if (error := standard_error(sums)) is not None:
            row["val_bpb_se"] = error
    further = {f"val_{name}": value / sums["weight"] for name, value in sums.items() if name not in KNOWN}
    return row | further


def validation_sums(trainer: BaseTrainer) -> dict[str, float]:
    """Run `val_step` over the whole set, then read once; sums are added in float64."""
    state, val_step = trainer.state, trainer.functions.val_step
    return added([val_step(state, batch) for batch in validation_batches(trainer)])


def added(parts: Sequence[Any]) -> dict[str, float]:
    """What calls of `val_step` returned, read at once and summed by name."""
    totals: dict[str, float] = {}
    for loss, weight, meta in fetch(parts):
        for name, value in {"loss": loss, "weight": weight, **meta}.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def validation_batches(trainer: BaseTrainer) -> Iterator[dict[str, Any]]:
    """Device batches of one shape that cover the set, the last one padded with blank rows."""
    held_out = trainer.data.validation
    assert held_out is not None
    micro, count = trainer.functions.micro, trainer.functions.validation_batches
    fields, sharding = validation_fields(trainer), trainer.topology.batch_sharding(1)
    for number in range(held_out.rows.batches(validation_size(trainer))):

        def read(first: int, end: int, number: int = number) -> Mapping[str, np.ndarray]:
            return trainer.batch("validation", step=number, rows=slice(first, end))

        yield device_batch(read, fields, micro, count, sharding)


def validation_size(trainer: BaseTrainer) -> int:
    """Rows in one call of `val_step`."""
    return trainer.functions.micro * trainer.functions.validation_batches


def validation_fields(trainer: BaseTrainer) -> dict[str, Any]:
    """Fields of a held-out row, as `trainer.batch` returns them."""
    return fields_of(trainer.batch("validation", step=0, rows=slice(0, 1)))
