"""Examples that the caller brings: into rows by our own collate, or by a function of the caller's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bessemer.data import Batch, DatasetStyle, DataSettings, Rows, Tokenizer, make_rows, rows_of
from bessemer.data.rows import Fields, fields_of
from bessemer.errors import InputError

FINGERPRINTED = 10_000
"""Examples that name a data set whose content only the caller's collator understands."""

REQUIRED = ("input_ids", "target_ids", "loss_mask")


@dataclass(frozen=True)
class CollectFunction:
    """Examples (texts, {"text"}, {"input_ids", "loss_mask"}) -> one padded row each, too long ones truncated.

    `rows` makes rows of a whole data set, in any style: encoded once, with counts of what was left out.
    """

    tokenizer: Tokenizer | None
    max_sequence_length: int
    truncation_mode: str = "keep_end"

    def __call__(self, examples: Any) -> Batch:
        rows = make_rows(
            examples,
            DatasetStyle.PADDED,
            self.max_sequence_length,
            tokenizer=self.tokenizer,
            truncation=self.truncation_mode,
        )
        return rows.get(np.arange(len(rows)))

    def rows(self, source: Any, style: DatasetStyle, settings: DataSettings) -> Rows:
        if self.tokenizer is None:
            raise InputError(
                "examples given from Python need a tokenizer (tokenizer=… or data.tokenizer) or a data_collator."
            )
        chosen = replace(settings, truncation=self.truncation_mode)
        return rows_of(source, self.tokenizer, style, self.max_sequence_length, settings=chosen)


class CollatedRows:
    """Any random-access source through the caller's collator; row i is example i."""

    def __init__(self, source: Any, collator: Callable[[list[Any]], Mapping[str, Any]], block_size: int):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise InputError(
                f"a {type(source).__name__} has no length and no [i], so a run on it could not be resumed exactly; "
                "give a list, a dataset with random access, or write it to a store first."
            )
        self.source, self.collator, self.block_size = source, collator, block_size
        chosen = np.unique(np.linspace(0, len(source) - 1, min(len(source), FINGERPRINTED)).astype(int))
        digest = hashlib.sha256(f"{len(source)}".encode())
        for index in chosen:
            digest.update(repr(source[int(index)]).encode())
        self.fingerprint = digest.hexdigest()
        self.stats: dict[str, Any] = {"rows": len(source)}
        sample = self._collate(np.arange(1))
        self._check(sample)
        self.fields = fields_of(sample)

    def __len__(self) -> int:
        return len(self.source)

    def get(self, indices: np.ndarray) -> Batch:
        batch = self._collate(indices)
        if fields_of(batch) != self.fields or any(len(v) != len(indices) for v in batch.values()):
            raise InputError(
                f"the data_collator returned {_shapes(fields_of(batch))} for {len(indices)} examples, and "
                f"{_shapes(self.fields)} for the first one: it must return the same fields, shapes and types every "
                "time, one row per example."
            )
        return batch

    def _collate(self, indices: np.ndarray) -> Batch:
        return {
            name: np.asarray(value)
            for name, value in self.collator([self.source[int(i)] for i in indices]).items()
        }

    def _check(self, rows: Batch) -> None:
        missing = [name for name in REQUIRED if name not in rows]
        if missing:
            raise InputError(f"the data_collator returned {sorted(rows)}; {', '.join(missing)} is missing.")
        wrong = {name: array.shape for name, array in rows.items() if array.shape != (1, self.block_size)}
        if wrong:
            raise InputError(
                f"the data_collator must return arrays of (examples, {self.block_size}), the block size; got {wrong}."
            )


def _shapes(fields: Fields) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in fields.items())
