"""Rows made of pieces of documents: PACKED and PADDED (pieces that do not see each other's targets) and
CROPPED."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.data.packing import Plan
from bessemer.data.rows import Batch, base_stats, fingerprint_of, finish, padding, ragged
from bessemer.data.store import Store


class PieceRows:
    """Each piece of n pairs at `start` is inputs start … start+n−1 and targets start+1 … start+n.

    The last token of a piece is a target only; that is the overlap by one token with the piece after it.
    """

    def __init__(self, store: Store, block_size: int, plan: Plan, name: str, stats: dict[str, Any]) -> None:
        self.store, self.block_size, self.plan = store, block_size, plan
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
        n, width = len(indices), self.block_size
        place, source, segment, position = spread(self.plan, indices, width)
        inputs = np.full(n * width, self.store.info["pad_id"], np.int32)
        targets = np.full(n * width, -1, np.int32)
        segments = np.zeros(n * width, np.int32)
        positions = np.zeros(n * width, np.int32)
        inputs[place] = self.tokens[source]
        nexts = self.tokens[source + 1].astype(np.int32)
        targets[place] = nexts if self.mask is None else np.where(self.mask[source + 1] > 0, nexts, -1)
        segments[place] = segment
        positions[place] = position
        fields = {
            "input_ids": inputs,
            "target_ids": targets,
            "positions": positions,
            "segment_ids": segments,
            "loss_mask": (targets >= 0).astype(np.float32),
        }
        return {name: values.reshape(n, width) for name, values in fields.items()}


class CroppedRows:
    """Full rows of block_size + 1 tokens; as in nanochat the next document's bos is a target too."""

    def __init__(self, store: Store, block_size: int, plan: Plan) -> None:
        self.store, self.block_size, self.plan = store, block_size, plan
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
        n, width = len(indices), self.block_size + 1
        place, source, segment, _ = spread(self.plan, indices, width)
        windows = np.empty(n * width, self.tokens.dtype)
        windows[place] = self.tokens[source]
        segments = np.empty(n * width, np.int32)
        segments[place] = segment
        trained = None
        if self.mask is not None:
            trained = np.empty(n * width, bool)
            trained[place] = self.mask[source] > 0
            trained = trained.reshape(n, width)[:, 1:]
        full = np.full(n, self.block_size)
        return finish(windows.reshape(n, width), full, segments.reshape(n, width)[:, :-1].copy(), trained)


def spread(
    plan: Plan, indices: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For every token of the rows: its place in the flat batch, its place in the store, segment, position in
    piece."""
    indices = np.asarray(indices, np.int64)
    first = plan.first[indices]
    row, number = ragged(plan.first[indices + 1] - first)  # one entry a piece
    piece = first[row] + number
    lengths = plan.lengths[piece].astype(np.int64)
    total = np.cumsum(lengths)
    before = total - lengths  # tokens of all pieces before, over the batch
    heads = np.searchsorted(row, np.arange(len(indices)))  # first piece of each row
    begin = row * width + before - before[heads][row]  # where each piece goes
    position = np.arange(int(total[-1]) if len(total) else 0) - np.repeat(before, lengths)
    place = np.repeat(begin, lengths) + position
    source = np.repeat(plan.starts[piece], lengths) + position
    return place, source, np.repeat(number + 1, lengths), position


def supervised(mask: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(pieces,) how many of the `counts` tokens from each start are trained on; in blocks of bounded
    memory."""
    out = np.zeros(len(starts), np.int64)
    for block in np.array_split(np.arange(len(starts)), max(1, len(starts) // 4096)):
        piece, offset = ragged(counts[block].astype(np.int64))
        values = mask[starts[block][piece] + offset]
        out[block] = np.bincount(piece, weights=values, minlength=len(block))
    return out


def _later(plan: Plan) -> np.ndarray:
    """Pieces that are not the first of their row: their first token is a target."""
    later = np.ones(len(plan.starts), bool)
    later[plan.first[:-1]] = False
    return later
