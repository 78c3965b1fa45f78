"""Which pieces of documents share a row: best fit for PACKED, nanochat's best fit with cropping for CROPPED.

A plan is three arrays: where each piece begins in the token stream, its length, and the first piece of each
row.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.data.rows.rows import (
    Batch,
    base_stats,
    fingerprint_of,
    finish,
    padding,
    ragged,
    supervised,
    text_fields,
)
from bessemer.data.rows.store import Store

BUFFER = 1000  # documents CROPPED chooses among


@dataclass(frozen=True)
class Plan:
    """pieces of row i: first[i] … first[i + 1] − 1."""

    starts: np.ndarray  # (pieces,) int64
    lengths: np.ndarray  # (pieces,) int32
    first: np.ndarray  # (rows + 1,) int64

    def __len__(self) -> int:
        return len(self.first) - 1


def pack(offsets: np.ndarray, block_size: int, mask: np.ndarray | None = None) -> Plan:
    """Best fit: each row takes the longest piece that fits, then the longest that fits what is left, and so
    on.

    A document of L tokens is L − 1 (input, target) pairs. More than a row of them is split: full rows, and a
    rest. Rows filled alike are dealt together: a filling is computed once and repeated while all its lengths
    last, so the work grows with the number of different lengths, not of documents. With a mask, pieces without a
    trained token are left out.
    """
    pairs = np.maximum(np.diff(offsets) - 1, 0)
    full, rest = np.divmod(pairs, block_size)
    owner = np.repeat(np.arange(len(pairs)), full)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    whole_starts = offsets[owner] + number * block_size
    documents = np.flatnonzero(rest)
    rest_starts, rests = (offsets[:-1] + full * block_size)[documents], rest[documents]
    if mask is not None:
        whole_starts = whole_starts[supervised(mask, whole_starts + 1, np.full(len(owner), block_size)) > 0]
        trained = supervised(mask, rest_starts + 1, rests) > 0
        rest_starts, rests = rest_starts[trained], rests[trained]
    order, widths = best_fit(rests, block_size)
    wholes = len(whole_starts)
    starts = np.concatenate([whole_starts, rest_starts[order]]).astype(np.int64)
    lengths = np.concatenate([np.full(wholes, block_size), rests[order]]).astype(np.int32)
    first = np.cumsum(np.concatenate([[0], np.ones(wholes, np.int64), widths]), dtype=np.int64)
    return Plan(starts, lengths, first)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in the order of their rows, and how many pieces each row has. All sizes are in [1, capacity]."""
    by_size = np.argsort(sizes, kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1).tolist()
    cursor = (np.cumsum(counts) - counts).tolist()  # next unused piece of each size, in by_size
    available = [size for size in range(1, capacity + 1) if counts[size]]
    orders: list[np.ndarray] = [np.empty(0, np.int64)]
    widths: list[np.ndarray] = [np.empty(0, np.int64)]
    while available:
        filling = _filling(available, counts, capacity)
        repeats = min(counts[size] // times for size, times in filling)
        columns = []
        for size, times in filling:
            taken = by_size[cursor[size] : cursor[size] + repeats * times]
            columns.append(taken.reshape(repeats, times))
            cursor[size] += repeats * times
            counts[size] -= repeats * times
            if not counts[size]:
                available.remove(size)
        block = np.concatenate(columns, axis=1)
        orders.append(block.ravel())
        widths.append(np.full(repeats, block.shape[1]))
    return np.concatenate(orders), np.concatenate(widths)


def _filling(available: list[int], counts: list[int], capacity: int) -> list[tuple[int, int]]:
    """(size, times) of one row: always the largest size that still fits."""
    filling = []
    left, limit = capacity, capacity
    while limit > 0:
        place = bisect_right(available, min(left, limit)) - 1
        if place < 0:
            break
        size = available[place]
        times = min(counts[size], left // size)
        filling.append((size, times))
        left -= times * size
        limit = size - 1
    return filling


def crop(offsets: np.ndarray, block_size: int, buffer: int = BUFFER) -> Plan:
    """nanochat's rule: rows of block_size + 1 tokens from a buffer of documents; the longest that fits, and
    when none does, the shortest, cropped to fill the row exactly. Every row is full; the rest of a cropped
    document is dropped.

    A document longer than a row is cropped when it is the shortest of the buffer, so the buffer cannot clog.
    """
    capacity = block_size + 1
    lengths = np.diff(offsets).tolist()
    held: list[
        tuple[int, int]
    ] = []  # (length, −document), sorted: of equals, the oldest counts as the longest
    upcoming = 0
    chosen: list[int] = []
    taken: list[int] = []
    first = [0]
    left = capacity
    while True:
        while len(held) < buffer and upcoming < len(lengths):
            if lengths[upcoming]:
                insort(held, (lengths[upcoming], -upcoming))
            upcoming += 1
        if not held:
            break
        place = bisect_right(held, (left, 1)) - 1
        length, document = held.pop(max(place, 0))
        chosen.append(-document)
        taken.append(min(length, left))
        left -= taken[-1]
        if not left:
            first.append(len(chosen))
            left = capacity
    used = first[-1]  # a last row that could not be filled is dropped with the other overhangs
    starts = np.asarray(offsets)[np.array(chosen[:used], np.int64)]
    return Plan(starts.astype(np.int64), np.array(taken[:used], np.int32), np.array(first, np.int64))


# Rows made of pieces of documents: PACKED and PADDED (pieces that do not see each other's targets) and
# CROPPED.


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
