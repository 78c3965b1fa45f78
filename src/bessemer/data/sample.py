"""A fixed sample of the training tokens: the same for every number of processes, devices and steps."""

from __future__ import annotations

import numpy as np

from bessemer.data.loader import Mixture
from bessemer.data.mixture import shares_of
from bessemer.data.permutation import key_of, permute
from bessemer.data.rows import Batch, Rows

ROWS_AT_ONCE = 256


def sample_tokens(mixture: Mixture, tokens: int, seed: int) -> list[np.ndarray]:
    """About `tokens` tokens as one sequence a row, from each source by its rate; all of a source that has fewer.

    Rows come in an order keyed by the seed and the source, never by a step, so it is a pure function of data and
    seed. Padding is left out.
    """
    return [
        sequence
        for share, (_, rows) in zip(shares_of([sampling for sampling, _ in mixture]), mixture, strict=True)
        for sequence in _of_source(rows, round(share * tokens), key_of(seed, "sample", rows.fingerprint))
    ]


def _of_source(rows: Rows, tokens: int, key: int) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    left, count = tokens, len(rows)
    for first in range(0, count, ROWS_AT_ONCE):
        if left <= 0:
            break
        batch = rows.get(permute(np.arange(first, min(first + ROWS_AT_ONCE, count)), count, key))
        for sequence in _real(batch):
            found.append(sequence[:left])
            left -= len(found[-1])
            if left <= 0:
                break
    return found


def _real(batch: Batch) -> list[np.ndarray]:
    """The input tokens of each row without padding."""
    ids = batch["input_ids"]
    kept = batch["segment_ids"] > 0 if "segment_ids" in batch else np.ones(ids.shape, bool)
    return [row[keep] for row, keep in zip(ids, kept, strict=True)]
