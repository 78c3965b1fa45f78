"""CONTRASTIVE rows: several whole preference pairs per row, chosen and rejected side by side, each its own segment.

Pairs are placed by best fit, like the documents of PACKED, so nothing is padded to the longest. A sequence of
n tokens takes n positions: its last token is an input without a target, from which a reward can be read.
Pair p of a row has segments 2p + 1 (chosen) and 2p + 2 (rejected); a pair is never in two rows, so never in
two micro-batches. In addition to the usual fields (rows.py), where only the tokens of an answer are targets:

| field | shape | meaning |
|---|---|---|
| pair_ids | (n, P) int32 | number of pair p in the store, −1 = the row has fewer; P = block_size // 8 |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bessemer.data.rows.packing import PieceRows, Plan, best_fit
from bessemer.data.rows.rows import Batch, Fields, ragged
from bessemer.data.rows.store import Store
from bessemer.data.tokenize.documents import ANSWER, BEGINS
from bessemer.errors import InputError

SMALLEST = 8
"""Positions a pair counts as at least: it bounds the pairs of a row by the block size alone, whatever the data."""


def most_pairs(block_size: int) -> int:
    """Return P, the slots for pairs in a row."""
    return max(1, block_size // SMALLEST)


def pair_fields(block_size: int) -> Fields:
    """Return the fields that rows of pairs have beside those of text."""
    return {"pair_ids": ((most_pairs(block_size),), np.dtype(np.int32))}


class Sides(NamedTuple):
    """Positions of each pair's sequences in the store, (pairs, 2) each: chosen, rejected."""

    starts: np.ndarray
    lengths: np.ndarray
    answers: np.ndarray  # tokens before the first one of the answer; the whole length where there is none


def sides_of(store: Store) -> Sides:
    assert store.mask is not None, "a store of pairs has a mask"
    begins = np.flatnonzero(store.mask & BEGINS)
    ends = np.asarray(store.offsets[1:])
    starts = np.stack([store.offsets[:-1], begins], 1)
    stops = np.stack([begins, ends], 1)
    marked = np.append(np.flatnonzero(store.mask & ANSWER), len(store.mask))
    first = marked[np.searchsorted(marked, starts)]
    return Sides(starts, stops - starts, np.minimum(first, stops) - starts)


class PairRows(PieceRows):
    """Rows of whole pairs. A pair too long for a row loses the beginning of its prompt, as many tokens on both sides
    (counted); one whose answers do not fit, or are empty, is refused or, with on_empty=skip, left out (counted)."""

    mask: np.ndarray

    def __init__(self, store: Store, block_size: int, on_empty: str = "fail") -> None:
        sides = sides_of(store)
        self.pairs = len(sides.starts)
        cut = np.maximum(-((block_size - sides.lengths.sum(1)) // 2), 0)  # ceil(excess / 2)
        fits = (cut < np.maximum(sides.answers.min(1), 1)) & (sides.answers < sides.lengths).all(1)
        kept = np.flatnonzero(fits)
        _check_lost(np.flatnonzero(~fits), self.pairs, block_size, on_empty)
        starts, lengths = (sides.starts + cut[:, None])[kept], (sides.lengths - cut[:, None])[kept]
        order, widths = best_fit(np.minimum(np.maximum(lengths.sum(1), SMALLEST), max(block_size, 1)), block_size)
        first = np.cumsum(np.concatenate([[0], widths]))
        plan = Plan(starts[order].ravel(), lengths[order].ravel().astype(np.int32), 2 * first)
        self.numbers = kept[order].astype(np.int32)  # of the pairs, in the order of their rows
        stats = {
            "pairs": len(kept),
            "truncated": int(np.count_nonzero(cut[kept])),
            "truncated_tokens": int(2 * cut[kept].sum()),
            "without_targets": self.pairs - len(kept),
        }
        super().__init__(store, block_size, plan, "CONTRASTIVE", stats)
        self.fields |= pair_fields(block_size)

    def get(self, indices: np.ndarray) -> Batch:
        indices = np.asarray(indices, np.int64)
        return super().get(indices) | {"pair_ids": self._numbers(indices)}

    def _targets(self, source: np.ndarray, position: np.ndarray) -> np.ndarray:
        last = np.append(position[1:] == 0, True)  # of its sequence
        following = np.minimum(source + 1, len(self.tokens) - 1)
        targets = self.tokens[following].astype(np.int32)
        targets[last | (self.mask[following] & ANSWER == 0)] = -1
        return targets

    def _target_tokens(self) -> int:
        count = np.append(0, np.cumsum(self.mask & ANSWER, dtype=np.int64))
        return int((count[self.plan.starts + self.plan.lengths] - count[self.plan.starts]).sum())

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        first, end = self.plan.first[indices] // 2, self.plan.first[indices + 1] // 2
        row, place = ragged(end - first)
        out = np.full((len(indices), most_pairs(self.block_size)), -1, np.int32)
        out[row, place] = self.numbers[first[row] + place]
        return out


def _check_lost(lost: np.ndarray, pairs: int, block_size: int, on_empty: str) -> None:
    if len(lost) == pairs:
        raise InputError(f"none of the {pairs} pairs fits into a row of {block_size} tokens: use a larger block size.")
    if len(lost) and on_empty == "fail":
        raise InputError(
            f"{len(lost)} of {pairs} pairs have an empty answer, or answers that do not fit into {block_size} tokens "
            f"even without the beginning of their prompt; the first is number {lost[0]}. Use a larger "
            "architecture.block_size, or data.on_empty=skip to leave them out (counted)."
        )
