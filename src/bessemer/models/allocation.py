"""How many rows of a lookup table each token owns: LZW over a sample of the training tokens.

LZW reads phrase by phrase: it counts the longest known codeword, and adds that codeword plus the next token as a new
one. Frequent n-grams are the codewords read most; each gives a row to its *last* token, where the model has read it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn

from bessemer.config.bounded import parse_json
from bessemer.errors import InputError, StorageError
from bessemer.storage.files import ALLOCATION


def compute_lzw_allocation(
    sequences: Iterable[Sequence[int] | np.ndarray], vocab_size: int, rows: int, k_max: int
) -> np.ndarray:
    """k (vocab_size,) int32 with Σk = rows and 1 ≤ k_t ≤ k_max; a pure function of its arguments.

    Every token starts with one row. Codewords of two or more tokens, ranked by (count descending, length
    ascending, first seen ascending), give one row each to their last token while it has fewer than k_max. What is
    left over goes round the tokens below k_max, one row each a round, the most frequent first (then the lower id).
    """
    check_rows(vocab_size, rows, k_max)
    last, length, count, frequency = _codewords(sequences, vocab_size)
    k = np.ones(vocab_size, np.int64)
    ranked = last[np.lexsort((np.arange(len(last)), length, -count))]
    served = ranked[_occurrence(ranked) < k_max - 1][: rows - vocab_size]
    k += np.bincount(served, minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -frequency))
    while (left := rows - int(k.sum())) > 0:
        k[order[k[order] < k_max][:left]] += 1
    return k.astype(np.int32)


def allocation_to_bounds(k: Sequence[int] | np.ndarray) -> np.ndarray:
    """[0, cumsum(k)] int32: token t owns the rows bounds[t] … bounds[t + 1] − 1."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(k, dtype=np.int64)]).astype(np.int32)


def check_rows(vocab_size: int, rows: int, k_max: int) -> None:
    """InputError unless every token can have its first row and none more than k_max."""
    if not vocab_size <= rows <= vocab_size * k_max:
        raise InputError(
            f"architecture.lookup.rows={rows} cannot be shared out: {vocab_size} tokens own at least one row each and "
            f"at most architecture.lookup.k_max={k_max}, so it lies between {vocab_size} and {vocab_size * k_max}."
        )


def _codewords(
    sequences: Iterable[Sequence[int] | np.ndarray], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (last token, length, count) of the codewords of two or more tokens, in the order first seen, and the
    frequency of each token. A codeword counts when it is added, and each time it is read as a whole phrase.

    Phrases are integers (the tokens first); phrase · vocab + token finds a longer one. A phrase ends with its sequence.
    """
    known: dict[int, int] = {}
    count, last = [0] * vocab_size, list(range(vocab_size))
    length = [1] * vocab_size
    read = [np.asarray(sequence, np.int64) for sequence in sequences if len(sequence)]
    for tokens in read:
        phrase, *following = tokens.tolist()
        for token in following:
            key = phrase * vocab_size + token
            longer = known.get(key)
            if longer is not None:
                phrase = longer
                continue
            known[key] = len(count)
            count[phrase] += 1
            count.append(1)
            last.append(token)
            length.append(length[phrase] + 1)
            phrase = token
        count[phrase] += 1
    frequency = np.bincount(np.concatenate([np.empty(0, np.int64), *read]), minlength=vocab_size)
    words = [np.asarray(values[vocab_size:], np.int64) for values in (last, length, count)]
    return words[0], words[1], words[2], frequency


def _occurrence(values: np.ndarray) -> np.ndarray:
    """For each entry, how many equal ones come before it: (3, 5, 3, 3) → (0, 0, 1, 2)."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.searchsorted(ordered, ordered)
    out = np.empty(len(values), np.int64)
    out[order] = np.arange(len(values)) - starts
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Allocation:
    """The rows of every token: constant state of a model.

    It is a static attribute of the module, not a parameter leaf: an integer leaf would have to be kept from gradients,
    optimizers, decay, running averages and casts in every training loop, and shapes could not depend on the largest k.
    It is saved as lookup.json in every checkpoint and beside exported weights.

    k: (vocab,) rows of each token; mean_k: Σ f_t k_t over the sample's token frequencies f, the cost of a training
    token; tokenizer: the hash of the tokenizer whose ids these are.
    """

    k: np.ndarray
    mean_k: float
    tokenizer: str | None = None

    @classmethod
    def of(cls, k: Any, frequency: np.ndarray | None = None, tokenizer: str | None = None) -> Allocation:
        rows = np.asarray(k, np.int32)
        seen = frequency is not None and frequency.sum() > 0
        mean = np.average(rows, weights=frequency if seen else None)
        return cls(rows, float(mean), tokenizer)

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        return allocation_to_bounds(self.k)

    @property
    def vocab_size(self) -> int:
        return len(self.k)

    @property
    def rows(self) -> int:
        return int(self.bounds[-1])

    @property
    def longest(self) -> int:
        return int(self.k.max())

    @functools.cached_property
    def digest(self) -> str:
        facts = json.dumps([self.k.tolist(), self.mean_k, self.tokenizer])
        return hashlib.sha256(facts.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allocation) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> str:
        facts = {"sha256": self.digest, "tokenizer": self.tokenizer, "mean_k": self.mean_k}
        return json.dumps({**facts, "k": self.k.tolist()})

    @classmethod
    def read(cls, directory: Path) -> Allocation:
        """The allocation saved in a checkpoint or beside exported weights."""
        file = ALLOCATION.path(directory)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{file}, the lookup rows of each token, cannot be read ({error}).") from error
        return cls.from_json(text, str(file))

    @classmethod
    def from_json(cls, text: str, where: str) -> Allocation:
        try:
            saved = parse_json(text)
            made = cls(np.asarray(saved["k"], np.int32), float(saved["mean_k"]), saved["tokenizer"])
            whole = made.digest == saved["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{where} cannot be read ({error}).") from error
        if not whole:
            raise StorageError(f"{where} is damaged: its rows do not have the hash they were saved with.")
        return made

    def check(self, model: nn.Module, tokenizer: str | None, where: str) -> None:
        """InputError unless it was made for this vocabulary, number of rows and tokenizer."""
        if tokenizer is not None and self.tokenizer is not None and tokenizer != self.tokenizer:
            raise InputError(
                f"{where}: the lookup rows were shared out for another tokenizer ({self.tokenizer[:12]} then, "
                f"{tokenizer[:12]} now), so tokens would read each other's rows. Use that tokenizer again."
            )
        wanted = model.lookup_rows or self.rows
        if (self.vocab_size, self.rows) != (model.vocab_size, wanted):
            raise InputError(
                f"{where}: {self.rows} lookup rows for {self.vocab_size} tokens do not fit a model with "
                f"architecture.lookup.rows={wanted} and model.vocab_size={model.vocab_size}; use the same numbers."
            )
