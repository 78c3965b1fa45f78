"""Models on the same text: bits per byte that compare, whatever each was trained on and with which tokenizer.

The text is what a run held out, as documents. Each model reads it with its own tokenizer in windows of its own context
length, every token scored once. The denominator is the text's bytes, the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bessemer.errors import InputError
from bessemer.evaluate.held_out import held_out, where
from bessemer.evaluate.scoring import Row, score
from bessemer.generate import LoadedModel


class Measured(NamedTuple):
    """One model on one text: `nats` and `sizes` (bytes) of each document."""

    nats: np.ndarray
    sizes: np.ndarray

    @property
    def bpb(self) -> float:
        return float(self.nats.sum() / (math.log(2) * self.sizes.sum()))

    @property
    def error(self) -> float | None:
        """Standard error over documents."""
        return _error(self.nats - self.bpb * math.log(2) * self.sizes, self.sizes)

    def above(self, other: Measured) -> tuple[float, float | None]:
        """(difference in bits per byte, its standard error): paired by document, so smaller than the two errors."""
        gap = self.bpb - other.bpb
        return gap, _error(self.nats - other.nats - gap * math.log(2) * self.sizes, self.sizes)


def _error(residuals: np.ndarray, sizes: np.ndarray) -> float | None:
    count = len(sizes)
    if count < 2:
        return None
    return float(math.sqrt((residuals**2).sum() * count / (count - 1)) / (math.log(2) * sizes.sum()))


def held_out_documents(loaded: LoadedModel, limit: int | None = None) -> list[str]:
    """The text that the run holds out: neighboring sequences joined, then split where documents begin."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    rows = held_out(loaded, limit)
    pieces: list[list[int]] = []
    before: tuple[int, int] | None = None
    for place in np.lexsort((rows.index, rows.source)):
        row = rows.batch(int(place), 1)
        if "target_ids" not in row:
            raise InputError(
                f"{where(loaded)} holds out pairs, not text: --common compares models on plain text."
            )
        targets = row["target_ids"][0]
        if not row["loss_mask"][0][targets >= 0].all():
            raise InputError(
                f"{where(loaded)} holds out conversations, of which only the answers count: --common compares models "
                "on plain text."
            )
        here = (int(rows.source[place]), int(rows.index[place]))
        if before is None or here != (before[0], before[1] + 1):
            pieces.append([])
        before = here
        for token in targets[targets >= 0].tolist():
            if token == tokenizer.bos_id:
                pieces.append([])
            else:
                pieces[-1].append(token)
    texts = [tokenizer.decode(piece).replace("\N{REPLACEMENT CHARACTER}", "") for piece in pieces if piece]
    found = [text for text in texts if text.strip()]
    if not found:
        raise InputError(f"{where(loaded)} holds out no text.")
    return found


def measure_on(loaded: LoadedModel, texts: Sequence[str], batch_size: int | None = None) -> Measured:
    """Bits per byte of `loaded` on these documents."""
    tokenizer, block = loaded.tokenizer, loaded.model.block_size
    if tokenizer is None:
        raise InputError(f"{where(loaded)} has no tokenizer.")
    windows: list[Row] = []
    owners: list[int] = []
    for number, text in enumerate(texts):
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        for start in range(0, len(ids) - 1, block):
            windows.append(Row(ids[start : start + block + 1], 1))
            owners.append(number)
    nats = np.zeros(len(texts))
    np.add.at(nats, owners, [one.nats for one in score(loaded, windows, batch_size)])
    return Measured(nats, np.array([len(text.encode()) for text in texts], float))
