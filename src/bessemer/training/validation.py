"""Validation: the same held-out sequences each time, whatever the batch, mesh or process count."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from bessemer.data import Tokenizer, Validation
from bessemer.data.rows.rows import fields_of
from bessemer.errors import InputError
from bessemer.evaluate.bpb import standard_error
from bessemer.training.feed import device_batch, fetch
from bessemer.training.state import LoopState

KNOWN = ("loss", "weight", "nats", "bytes", "rows", "nats_nats", "nats_bytes", "bytes_bytes")
"""Sums of every validation; what else an objective returns becomes a metric of its own."""

ReadBatch = Callable[..., Mapping[str, Any]]
"""`BaseTrainer.batch`."""


class ValidationSet:
    """The data's fixed held-out rows, each target with its length in bytes."""

    def __init__(self, rows: Validation, tokenizer: Tokenizer | None):
        self.rows = rows
        self.count = len(rows)
        self.tokenizer = tokenizer

    def read(self, number: int, batch_size: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """Return the rows of batch `number` of a pass; rows beyond the set are blank, without targets."""
        batch = dict(self.rows.batch(number, batch_size, rows))
        if self.tokenizer is not None:
            batch["target_bytes"] = self.tokenizer.target_bytes(batch["input_ids"], batch["target_ids"])
        return batch

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Size and fingerprint of the set: runs with the same fingerprint are evaluated on the same targets."""
        digest = hashlib.sha256((self.tokenizer.hash if self.tokenizer is not None else "").encode())
        size, documents = 0, 0
        for number in range(self.rows.batches(READ_ROWS)):
            batch = self.read(number, READ_ROWS)
            for name in sorted(name for name in batch if name in JUDGED):
                digest.update(np.ascontiguousarray(batch[name]).tobytes())
            if self.tokenizer is not None and {"target_ids", "loss_mask"} <= batch.keys():
                counts = (batch["target_ids"] >= 0) & (batch["loss_mask"] > 0)
                size += int(batch["target_bytes"][counts].sum())
                documents += _documents(batch["input_ids"] == self.tokenizer.bos_id, counts)
        found = {"fingerprint": digest.hexdigest(), "sequences": self.count}
        return found | ({"documents": documents, "bytes": size} if size else {})


def _documents(begins: np.ndarray, counts: np.ndarray) -> int:
    """Return how many documents that begin in a row have a target there. begins, counts: (B, T) bool."""
    number = np.cumsum(begins, axis=1) + np.arange(len(begins))[:, None] * (begins.shape[1] + 1)
    return len(np.intersect1d(number[begins], number[counts]))


READ_ROWS = 256
JUDGED = ("input_ids", "target_ids", "loss_mask", "segment_ids", "pair_ids")
"""Fields that define the targets; others, such as log-probabilities of a reference, depend on the run."""


def validation_row(sums: Mapping[str, float], loop_state: LoopState, step: int) -> dict[str, Any]:
    """Return {"val_loss", "val_bpb", "val_bpb_se", "min_val_bpb", …}, and record the best in the loop state."""
    if sums["weight"] == 0:
        raise InputError(NO_TARGETS)
    loss = sums["loss"] / sums["weight"]
    row: dict[str, Any] = {"val_loss": loss}
    loop_state.take_validation(loss, step)
    if sums.get("bytes"):
        bits = sums["nats"] / (math.log(2) * sums["bytes"])
        loop_state.take_bits(bits)
        row |= {"val_bpb": bits, "min_val_bpb": loop_state.min_val_bpb}
        if (error := standard_error(sums)) is not None:
            row["val_bpb_se"] = error
    further = {f"val_{name}": value / sums["weight"] for name, value in sums.items() if name not in KNOWN}
    return row | further


NO_TARGETS = (
    "no held-out row has a target: every token is masked, so there is no validation loss. In chats only the "
    "assistant's tokens are targets, and what lies beyond architecture.block_size is cut: give held-out data with "
    "answers that fit, or set training.validation=false."
)


def check_held_out(batch: ReadBatch, held_out: ValidationSet, batch_size: int) -> None:
    """Raise InputError if no held-out row has a target. Reads up to the first target, so usually one batch."""
    if not any(has_target(batch("validation", step=n)) for n in range(held_out.rows.batches(batch_size))):
        raise InputError(NO_TARGETS)


def check_first_batch(batch: Mapping[str, Any]) -> None:
    """Raise InputError if the first training batch has no target."""
    if not has_target(batch):
        raise InputError(
            f"the first batch ({len(next(iter(batch.values())))} rows) has no target: every token is masked, so there "
            "is nothing to learn from it. In chats only the assistant's tokens are targets, and what lies beyond "
            "architecture.block_size is cut: check loss_mask and target_ids of the rows, or raise the block size or "
            "training.batch_size."
        )


def has_target(batch: Mapping[str, np.ndarray]) -> bool:
    """Return whether any row of host arrays has weight in a loss; True for rows of another kind.

    NaN is a weight here: it is a defect that the step itself finds and names.
    """
    if "pair_ids" in batch:
        return bool((batch["pair_ids"] >= 0).any())
    if "target_ids" not in batch:
        return True
    targets = np.asarray(batch["target_ids"]) >= 0
    return bool((targets & (np.asarray(batch["loss_mask"]) != 0) if "loss_mask" in batch else targets).any())


def added(parts: Sequence[Any]) -> dict[str, float]:
    """Read what calls of `val_step` returned, in one transfer, and sum by name in float64."""
    totals: dict[str, float] = {}
    for loss, weight, meta in fetch(parts):
        for name, value in {"loss": loss, "weight": weight, **meta}.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def validation_batches(
    batch: ReadBatch, held_out: ValidationSet, micro: int, count: int, sharding: NamedSharding
) -> Iterator[dict[str, Any]]:
    """Yield device batches (count, micro, T) of one shape that cover the set, the last padded with blank rows."""
    fields = fields_of(batch("validation", step=0, rows=slice(0, 1)))
    for number in range(held_out.rows.batches(micro * count)):

        def read(first: int, end: int, number: int = number) -> Mapping[str, np.ndarray]:
            return batch("validation", step=number, rows=slice(first, end))

        yield device_batch(read, fields, micro, count, sharding)
