"""Which pieces of documents share a row: best fit for PACKED, nanochat's best fit with cropping for CROPPED."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.data.rows.rows import Batch, base_stats, fingerprint_of, finish, padding, ragged, supervised, text_fields
from bessemer.data.rows.store import Store

BUFFER = 1000  # documents CROPPED chooses among


@dataclass(frozen=True)
class Plan:
    """The pieces of row i are first[i] … first[i + 1] − 1."""

    starts: np.ndarray  # (pieces,) int64, in the token stream
    lengths: np.ndarray  # (pieces,) int32
    first: np.ndarray  # (rows + 1,) int64

    def __len__(self) -> int:
        return len(self.first) - 1


def pack(offsets: np.ndarray, block_size: int, mask: np.ndarray | None = None) -> Plan:
    """Best fit: each row takes the longest piece that fits, then the longest that fits what is left, and so on.

    A document of L tokens is L − 1 (input, target) pairs. More than a row of them is split into full rows and a rest.
    With a mask, pieces without a trained token are left out.
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
    """Return the pieces in the order of their rows, and how many each row has. All sizes are in [1, capacity].

    A filling is repeated while all its sizes last, so the work grows with the number of different sizes.
    """
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
    """nanochat's rule: fill rows of block_size + 1 tokens from a buffer of documents with the longest that fits; where
    none does, with the shortest, cropped to fill the row. The rest of a cropped document is dropped."""
    capacity = block_size + 1
    lengths = np.diff(offsets).tolist()
    held: list[tuple[int, int]] = []  # (length, −document), sorted: of equals, the oldest counts as the longest
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


# Rows made of pieces of documents


class PieceRows:
    """PACKED and PADDED rows. A piece of n pairs at `start` has inputs start … start+n−1 and targets start+1 … start+n.

    The last token of a piece is a target only: it overlaps by one token with the piece after it.
    """

    def __init__(self, store: Store, block_size: int, plan: Plan, name: str, stats: dict[str, Any]) -> None:
        self.store, self.block_size, self.plan = store, block_size, plan
        self.fields = text_fields(block_size)
        self.tokens, self.mask = store.tokens, store.mask
        self.fingerprint = fingerprint_of(store, name, block_size)
        used = int(plan.lengths.sum(dtype=np.int64))
        counts = base_stats(store, len(plan), self._target_tokens())
        self.stats = {**counts, **padding(len(plan) * block_size, used), **stats}

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def pieces(self) -> np.ndarray:
        """Return the number of pieces in each row."""
        return np.diff(self.plan.first)

    def get(self, indices: np.ndarray) -> Batch:
        self.store.require(*extent(self.plan, indices))
        shape = (len(indices), self.block_size)
        used, source, segment, position = spread(self.plan, indices)
        target_ids = lay_out(self._targets(source, position), used, shape, -1)
        return {
            "input_ids": lay_out(self.tokens[source].astype(np.int32), used, shape, self.store.info["pad_id"]),
            "target_ids": target_ids,
            "positions": lay_out(position.astype(np.int32), used, shape, 0),
            "segment_ids": lay_out(segment, used, shape, 0),
            "loss_mask": (target_ids >= 0).astype(np.float32),
        }

    def _targets(self, source: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the target of each token at place `source` of the store, −1 for none: int32."""
        targets = self.tokens[source + 1].astype(np.int32)
        if self.mask is not None:
            targets[self.mask[source + 1] == 0] = -1
        return targets

    def _target_tokens(self) -> int:
        if self.mask is None:
            return int(self.plan.lengths.sum(dtype=np.int64))
        return int(supervised(self.mask, self.plan.starts + 1, self.plan.lengths).sum())


class CroppedRows(PieceRows):
    """Full rows of block_size + 1 tokens. As in nanochat, the bos of the next document is a target too."""

    def __init__(self, store: Store, block_size: int, plan: Plan) -> None:
        total, kept = len(store.tokens), int(plan.lengths.sum(dtype=np.int64))
        stats = {"padding_share": 0.0, "cropped_share": 1 - kept / total, "cropped_tokens": total - kept}
        super().__init__(store, block_size, plan, "CROPPED", stats)

    def get(self, indices: np.ndarray) -> Batch:
        self.store.require(*extent(self.plan, indices))
        shape = (len(indices), self.block_size + 1)
        _, source, segment, _ = spread(self.plan, indices)
        trained = None if self.mask is None else self.mask[source].reshape(shape)[:, 1:] > 0
        full = np.full(len(indices), self.block_size)
        segments = segment.reshape(shape)[:, :-1].copy()
        return finish(self.tokens[source].reshape(shape), full, segments, trained, self.store.info["pad_id"])

    def _target_tokens(self) -> int:
        plan = self.plan
        if self.mask is None:
            return len(plan) * self.block_size
        later = np.ones(len(plan.starts), bool)  # pieces that are not the first of their row: all tokens are targets
        later[plan.first[:-1]] = False
        inside = supervised(self.mask, plan.starts + 1, plan.lengths - 1).sum()
        return int(inside + self.mask[plan.starts[later]].sum(dtype=np.int64))


def _pieces(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for every piece of the rows its row, its number in the row and its number in the plan."""
    first = plan.first[np.asarray(indices, np.int64)]
    row, number = ragged(plan.first[np.asarray(indices, np.int64) + 1] - first)
    return row, number, first[row] + number


def extent(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each piece of the rows begins in the store, and where it ends with the token after its last."""
    piece = _pieces(plan, indices)[2]
    return plan.starts[piece], plan.starts[piece] + plan.lengths[piece] + 1


def spread(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (n,) tokens in each row; and for every token of the rows, in order, its place in the store, its segment,
    and its position in the piece."""
    row, number, piece = _pieces(plan, indices)
    lengths = plan.lengths[piece].astype(np.int64)
    before = np.cumsum(lengths) - lengths  # tokens of all pieces before, over the batch
    used = np.bincount(row, weights=lengths, minlength=len(indices)).astype(np.int64)
    position = np.arange(int(used.sum())) - np.repeat(before, lengths)
    source = np.repeat(plan.starts[piece], lengths) + position
    return used, source, np.repeat((number + 1).astype(np.int32), lengths), position


def lay_out(values: np.ndarray, used: np.ndarray, shape: tuple[int, int], fill: int) -> np.ndarray:
    """Return the values of consecutive rows as (n, T), each row filled from the left."""
    if len(values) == shape[0] * shape[1]:
        return values.reshape(shape)
    out = np.full(shape, fill, values.dtype)
    out[np.arange(shape[1]) < used[:, None]] = values
    return out
