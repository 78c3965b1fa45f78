"""Rows made of pieces of documents: PACKED and PADDED (pieces that do not see each other's targets) and
CROPPED."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.data.packing import Plan
from bessemer.data.rows import (
    Batch,
    base_stats,
    fingerprint_of,
    finish,
    padding,
    ragged,
    supervised,
    text_fields,
)
from bessemer.data.store import Store


class PieceRows:
    """Each piece of n pairs at `start` is inputs start … start+n−1 and targets start+1 … start+n.

    The last token of a piece is a target only; that is the overlap by one token with the piece after it.
    """

    def __init__(self, store: Store, block_size: int, plan: Plan, name: str, stats: dict[str, Any]) -> None:
        self.store, self.block_size, self.plan = store, block_size, plan
        self.fields = text_fields(block_size)
        self.tokens, self.mask = store.tokens, store.mask
        self.fingerprint = fingerprint_of(store, name, block_size)
        used = int(plan.lengths.sum(dtype=np.int64))
        targets = (
            used if self.mask is None else int(supervised(self.mask, plan.starts + 1, plan.lengths).sum())
        )
        self.stats = {
            **base_stats(store, len(plan), targets),
            **padding(len(plan) * block_size, used),
            **stats,
        }

    def __len__(self) -> int:
        return len(self.plan)

    def get(self, indices: np.ndarray) -> Batch:
        self.store.require(*extent(self.plan, indices))
        shape = (len(indices), self.block_size)
        used, source, segment, position = spread(self.plan, indices)
        targets = self.tokens[source + 1].astype(np.int32)
        if self.mask is not None:
            targets[self.mask[source + 1] == 0] = -1
        target_ids = lay_out(targets, used, shape, -1)
        return {
            "input_ids": lay_out(
                self.tokens[source].astype(np.int32), used, shape, self.store.info["pad_id"]
            ),
            "target_ids": target_ids,
            "positions": lay_out(position.astype(np.int32), used, shape, 0),
            "segment_ids": lay_out(segment, used, shape, 0),
            "loss_mask": (target_ids >= 0).astype(np.float32),
        }


class CroppedRows:
    """Full rows of block_size + 1 tokens; as in nanochat the next document's bos is a target too."""

    def __init__(self, store: Store, block_size: int, plan: Plan) -> None:
        self.store, self.block_size, self.plan = store, block_size, plan
        self.fields = text_fields(block_size)
        self.tokens, self.mask = store.tokens, store.mask
        self.fingerprint = fingerprint_of(store, "CROPPED", block_size)
        total = len(self.tokens)
        kept = int(plan.lengths.sum(dtype=np.int64))
        targets = len(plan) * block_size
        if self.mask is not None:
            inside = supervised(self.mask, plan.starts + 1, plan.lengths - 1).sum()
            targets = int(inside + self.mask[plan.starts[_later(plan)]].sum(dtype=np.int64))
        self.stats = {
            **base_stats(store, len(plan), targets),
            "padding_share": 0.0,
            "cropped_share": 1 - kept / total,
            "cropped_tokens": total - kept,
        }

    def __len__(self) -> int:
        return len(self.plan)

    def get(self, indices: np.ndarray) -> Batch:
        self.store.require(*extent(self.plan, indices))
        shape = (len(indices), self.block_size + 1)
        _, source, segment, _ = spread(self.plan, indices)
        trained = None if self.mask is None else self.mask[source].reshape(shape)[:, 1:] > 0
        full = np.full(len(indices), self.block_size)
        segments = segment.reshape(shape)[:, :-1].copy()
        return finish(self.tokens[source].reshape(shape), full, segments, trained, self.store.info["pad_id"])


def extent(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each piece of the rows begins in the store, and where it ends with the token after its last."""
    indices = np.asarray(indices, np.int64)
    row, number = ragged(plan.first[indices + 1] - plan.first[indices])
    piece = plan.first[indices][row] + number
    return plan.starts[piece], plan.starts[piece] + plan.lengths[piece] + 1


def spread(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(n,) tokens in each row; and for every token of the rows, in order: its place in the store, its
    segment, its position in the piece."""
    indices = np.asarray(indices, np.int64)
    first = plan.first[indices]
    counts = plan.first[indices + 1] - first
    row, number = ragged(counts)  # one entry a piece
    piece = first[row] + number
    lengths = plan.lengths[piece].astype(np.int64)
    before = np.cumsum(lengths) - lengths  # tokens of all pieces before, over the batch
    used = np.bincount(row, weights=lengths, minlength=len(indices)).astype(np.int64)
    position = np.arange(int(used.sum())) - np.repeat(before, lengths)
    source = np.repeat(plan.starts[piece], lengths) + position
    return used, source, np.repeat((number + 1).astype(np.int32), lengths), position


def lay_out(values: np.ndarray, used: np.ndarray, shape: tuple[int, int], fill: int) -> np.ndarray:
    """Values of the rows one after the other → (n, T), each row filled from the left."""
    if len(values) == shape[0] * shape[1]:
        return values.reshape(shape)
    out = np.full(shape, fill, values.dtype)
    out[np.arange(shape[1]) < used[:, None]] = values
    return out


def _later(plan: Plan) -> np.ndarray:
    """Pieces that are not the first of their row: their first token is a target."""
    later = np.ones(len(plan.starts), bool)
    later[plan.first[:-1]] = False
    return later
