"""Validation: the same held-out sequences each time, whatever the batch, mesh or process count."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.data import Tokenizer, Validation
from bessemer.data.rows.rows import fields_of
from bessemer.errors import InputError
from bessemer.evaluate.bpb import standard_error
from bessemer.training.feed import device_batch, fetch

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
    if sums["weight"] == 0:
        raise InputError(NO_TARGETS)
    loss = sums["loss"] / sums["weight"]
    row: dict[str, Any] = {"val_loss": loss}
    state = trainer.loop_state
    state.take_validation(loss, trainer.step)
    if sums.get("bytes"):
        bits = sums["nats"] / (math.log(2) * sums["bytes"])
        state.take_bits(bits)
        row |= {"val_bpb": bits, "min_val_bpb": state.min_val_bpb}
        if (error := standard_error(sums)) is not None:
            row["val_bpb_se"] = error
    further = {f"val_{name}": value / sums["weight"] for name, value in sums.items() if name not in KNOWN}
    return row | further


NO_TARGETS = (
    "no held-out row has a target: every token is masked, so there is no validation loss. In chats only the "
    "assistant's tokens are targets, and what lies beyond architecture.block_size is cut: give held-out data with "
    "answers that fit, or set training.validation=false."
)


def check_targets(trainer: BaseTrainer) -> None:
    """Raise InputError if the held-out set, or the next training batch, has nothing to be judged or learned by.

    Reads as far as the first target, so usually one row.
    """
    held_out = trainer.data.validation
    if held_out is not None:
        size = validation_size(trainer)
        batches = (trainer.batch("validation", step=n) for n in range(held_out.rows.batches(size)))
        if not any(map(has_target, batches)):
            raise InputError(NO_TARGETS)
    if not trainer.rolls_out and not has_target(trainer.batch("train", step=0)):
        raise InputError(
            f"the first batch ({trainer.data.batch_size} rows) has no target: every token is masked, so there is "
            "nothing to learn from it. In chats only the assistant's tokens are targets, and what lies beyond "
            "architecture.block_size is cut: check loss_mask and target_ids of the rows, or raise the block size or "
            "training.batch_size."
        )


def has_target(batch: Mapping[str, np.ndarray]) -> bool:
    """Whether a row of host arrays weighs anything in a loss; True for rows of another kind.

    NaN is a weight here: it is a defect that the step itself finds and names.
    """
    if "pair_ids" in batch:
        return bool((batch["pair_ids"] >= 0).any())
    if "target_ids" not in batch:
        return True
    targets = np.asarray(batch["target_ids"]) >= 0
    return bool((targets & (np.asarray(batch["loss_mask"]) != 0) if "loss_mask" in batch else targets).any())


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
