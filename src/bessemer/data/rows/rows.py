"""Rows: fixed-size training examples made of a store, addressed by number.

A row has `block_size` positions with an input and a target each: the target of a token is the next one, −1 where there
is no loss. PMD cuts the whole stream into windows of block_size + 1 tokens that overlap by one, so every token but the
very first is a target exactly once per epoch; the last row is padded.

| field | shape (n, T) | meaning |
|---|---|---|
| input_ids | int32 | tokens; the pad token after the end |
| target_ids | int32 | next token, −1 = no loss |
| positions | int32 | in the row (PMD, CROPPED); in the document piece (PACKED, PADDED) |
| segment_ids | int32 | 1, 2, … for each document piece in the row; 0 = padding |
| loss_mask | float32 | 1 where the target counts |
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from bessemer.data.rows.store import Store
from bessemer.errors import InputError
from bessemer.storage.checksums import json_digest

Batch = dict[str, np.ndarray]
Fields = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Name of a field → shape and dtype of one row of it."""

TEXT_TYPES = {
    "input_ids": np.int32,
    "target_ids": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "loss_mask": np.float32,
}


COMPLETIONS = "completions"
"""Field (n, 1) of rows into which RL packs completions: how many each row holds. Rows without one come last, and whole
micro-batches of them are not computed."""


class DatasetStyle(Enum):
    """How documents become rows; docs/data-plans.md compares them."""

    PMD = "pmd"  # contiguous windows of the whole stream
    PACKED = "packed"  # whole documents by best fit, nothing dropped
    CROPPED = "cropped"  # best fit, rows always full, the overhang cropped and counted
    PADDED = "padded"  # one example per row
    CONTRASTIVE = "contrastive"  # whole pairs, chosen and rejected side by side


class Rows(Protocol):
    """Random access to rows. `fields` declares what `get` returns; `stats` counts documents, tokens, target_tokens,
    padding and everything left out."""

    block_size: int
    fields: Fields
    fingerprint: str
    stats: dict[str, Any]

    def __len__(self) -> int: ...

    def get(self, indices: np.ndarray) -> Batch: ...


class PmdRows:
    """Contiguous windows of the stream: row i is tokens [iT, iT + T]."""

    def __init__(self, store: Store, block_size: int) -> None:
        self.store, self.block_size = store, block_size
        self.fields = text_fields(block_size)
        self.tokens, self.offsets, self.mask = store.tokens, store.offsets, store.mask
        count = len(self.tokens)
        self.rows = -(-(count - 1) // block_size)
        self.fingerprint = fingerprint_of(store, "PMD", block_size)
        targets = count - 1 if self.mask is None else int(np.count_nonzero(self.mask[1:]))
        self.stats = {**base_stats(store, self.rows, targets), **padding(self.rows * block_size, count - 1)}

    def __len__(self) -> int:
        return self.rows

    def get(self, indices: np.ndarray) -> Batch:
        pad = self.store.info["pad_id"]
        starts = np.asarray(indices, np.int64) * self.block_size
        self.store.require(starts, starts + self.block_size + 1)
        windows = self._windows(self.tokens, starts, pad)  # (n, T + 1)
        left = np.minimum(len(self.tokens) - 1 - starts, self.block_size)  # real targets in each row
        trained = None if self.mask is None else self._windows(self.mask, starts, 0)[:, 1:] > 0
        return finish(windows, left, self._segments(starts), trained, pad)

    def _windows(self, values: np.ndarray, starts: np.ndarray, fill: int) -> np.ndarray:
        """Return (n, T + 1) windows, copied as whole rows rather than by one index per token."""
        width = self.block_size + 1
        size = values.itemsize
        if len(values) < width:
            out = np.full((len(starts), width), fill, values.dtype)
            out[:, : len(values)] = values
            return out
        view = as_strided(values, (len(values) - width + 1, width), (size, size), writeable=False)
        out = view[np.minimum(starts, len(view) - 1)]
        for row in np.flatnonzero(starts >= len(view)):  # only the stream's last row runs over the end
            tail = values[starts[row] :]
            out[row, : len(tail)] = tail
            out[row, len(tail) :] = fill
        return out

    def _segments(self, starts: np.ndarray) -> np.ndarray:
        """(n, T): 1 + the number of documents that began in the row before or at each position."""
        width = self.block_size
        first = np.searchsorted(self.offsets, starts, side="right")
        last = np.searchsorted(self.offsets, np.minimum(starts + width, len(self.tokens)), side="left")
        out = np.zeros((len(starts), width), np.int32)
        out[:, 0] = 1
        rows, number = ragged(np.maximum(last - first, 0))
        begins = self.offsets[first[rows] + number] - starts[rows]
        out[rows, begins] = 1
        return np.cumsum(out, axis=1, dtype=np.int32)


def text_fields(block_size: int) -> Fields:
    """Return the five fields that all rows of text have."""
    return {name: ((block_size,), np.dtype(kind)) for name, kind in TEXT_TYPES.items()}


def fields_of(batch: Mapping[str, np.ndarray]) -> Fields:
    """Return the fields of sample rows."""
    return {name: (values.shape[1:], values.dtype) for name, values in batch.items()}


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's group and index in it: for counts (2, 0, 3), (0, 0, 2, 2, 2) and (0, 1, 0, 1, 2)."""
    groups = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return groups, np.arange(len(groups)) - starts[groups]


def supervised(mask: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(pieces,) how many of the `counts` tokens from each start are trained on; in blocks of bounded memory."""
    out = np.zeros(len(starts), np.int64)
    for block in np.array_split(np.arange(len(starts)), max(1, len(starts) // 4096)):
        piece, offset = ragged(counts[block].astype(np.int64))
        values = mask[starts[block][piece] + offset]
        out[block] = np.bincount(piece, weights=values, minlength=len(block))
    return out


def finish(windows: np.ndarray, left: np.ndarray, segments: np.ndarray, trained: np.ndarray | None, pad: int) -> Batch:
    """windows (n, T + 1) with `left` real targets each → the five fields, positions counted along the row."""
    n, width = windows.shape[0], windows.shape[1] - 1
    inputs = windows[:, :-1].astype(np.int32)
    targets = windows[:, 1:].astype(np.int32)
    positions = np.empty((n, width), np.int32)
    positions[:] = np.arange(width, dtype=np.int32)
    if (left < width).any():
        beyond = positions >= left[:, None]
        inputs[beyond] = pad
        targets[beyond] = -1
        segments[beyond] = 0
    if trained is not None:
        targets[~trained] = -1
    return {
        "input_ids": inputs,
        "target_ids": targets,
        "positions": positions,
        "segment_ids": segments,
        "loss_mask": (targets >= 0).astype(np.float32),
    }


def base_stats(store: Store, rows: int, targets: int) -> dict[str, Any]:
    about = store.about
    return {
        "rows": rows,
        "documents": len(store.offsets) - 1,
        "dropped": sum(int(about.get(reason, 0)) for reason in ("duplicates", "empty", "skipped")),
        "tokens": len(store.tokens),
        "target_tokens": targets,
        "cropped_share": 0.0,
        "truncated": 0,
        **({"unverified": True} if about and not store.info.get("checksums") else {}),
        **({"turn_rows": turns} if (turns := about.get("turn_rows") or store.info.get("turn_rows")) else {}),
        **({"files_left_out": about["files_left_out"]} if about.get("files_left_out") else {}),
    }


def padding(positions: int, used: int) -> dict[str, float]:
    return {"padding_share": 1 - used / positions if positions else 0.0}


def fingerprint_of(store: Store, *facts: Any) -> str:
    """Names the rows by the content of the store and how they are cut."""
    return json_digest([store.fingerprint, *facts])


def check_length(store: Store, block_size: int) -> None:
    """Raise InputError if the data cannot fill a training row."""
    if block_size < 1:
        raise InputError(f"architecture.block_size is {block_size}; it must be at least 1.")
    if len(store.tokens) < block_size + 1:
        raise InputError(
            f"architecture.block_size={block_size} needs at least {block_size + 1} tokens, but the data has "
            f"{len(store.tokens)} in {len(store.offsets) - 1} documents: use a smaller block size or more data."
        )
