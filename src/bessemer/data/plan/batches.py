"""`batch(step)`: which rows a step trains on, as a pure function of the data, the seed and the step.

There is no iterator and nothing to save. At step t, source s fills C_s(t+1) − C_s(t) slots (`Shares` in mixture.py).
Its rows are numbers C_s(t), C_s(t)+1, … of an endless sequence in which epoch e is the permutation keyed by
(seed, source, e). The order of the slots in the batch is another permutation, keyed by the step. Any
process computes any rows of any batch, in any order, and gets the same ones.

A permutation is a keyed bijection on [0, n) that is computed, not stored: a Feistel network over a grid of a × b >= n
cells, a = ceil(sqrt(n)), on which indices are written as (left, right). Each round adds a hash of one coordinate to
the other, modulo its size; every round can be undone, so the whole is a permutation of the grid. An image beyond n is
permuted again (cycle walking), which keeps it a bijection on [0, n).

`Prefetcher` prepares the next batches in a background thread, and measures how long the loop still waits.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from bessemer.data.plan.mixture import FADES, Sampling, Shares, check_mixture, shares_of
from bessemer.data.rows.rows import Batch, Fields, Rows, fields_of
from bessemer.errors import InputError
from bessemer.storage.checksums import json_digest

ROUNDS = 6
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def key_of(*parts: object) -> int:
    """Return a 64-bit key of the parts, the same on every machine and in every process (unlike `hash`)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(index: np.ndarray | range | int, n: int, key: int) -> np.ndarray:
    """Return the image of each index in [0, n) under the permutation that `key` selects; int64, same shape."""
    values: np.ndarray = np.asarray(index, np.uint64)
    if n <= 1:
        return np.zeros(values.shape, np.int64)
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = _splitmix64(np.arange(ROUNDS, dtype=np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF))
    out = _feistel_rounds(values.ravel(), np.uint64(rows), np.uint64(columns), keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _feistel_rounds(out[outside], np.uint64(rows), np.uint64(columns), keys)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(values.shape)


def _feistel_rounds(values: np.ndarray, rows: np.uint64, columns: np.uint64, keys: np.ndarray) -> np.ndarray:
    """Return the image of each cell (left · columns + right) of the grid after one round per key."""
    left: np.ndarray = values // columns
    right: np.ndarray = values % columns
    for number, key in enumerate(keys):
        if number % 2:
            right = (right + _splitmix64(left ^ key) % columns) % columns
        else:
            left = (left + _splitmix64(right ^ key) % rows) % rows
    return left * columns + right


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64: every output bit depends on every input bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> _S30)) * _M1
        x = (x ^ (x >> _S27)) * _M2
        return x ^ (x >> _S31)


BLANK = {"target_ids": -1, "segment_ids": 0, "loss_mask": 0, "pair_ids": -1}
"""Values of a row without any target."""


class Validation:
    """A fixed set of `count` rows, divided by the rates of the mixture; a source with fewer rows provides all it has.

    The rows do not depend on the seed or the number of processes, so all runs are evaluated on the same text.
    """

    def __init__(self, sources: Sequence[tuple[Sampling, Rows]], count: int) -> None:
        self.fields = common_fields(sources)
        self.rows = [rows for _, rows in sources]
        quotas = _apportion(shares_of([sampling for sampling, _ in sources]), count)
        sizes = [min(quota, len(rows)) for quota, rows in zip(quotas, self.rows, strict=True)]
        self.source = np.repeat(np.arange(len(sizes)), sizes)  # (count,)
        self.index = np.concatenate(
            [permute(np.arange(size), len(r), key_of("validation")) for size, r in zip(sizes, self.rows, strict=True)]
        )

    def __len__(self) -> int:
        """Sequences in one pass."""
        return len(self.source)

    def batches(self, batch_size: int) -> int:
        return -(-len(self) // batch_size)

    def batch(self, number: int, batch_size: int, rows: slice | None = None) -> Batch:
        """Return batch `number` of a pass, or only `rows` of it; the last is filled up with rows without targets."""
        chosen = np.arange(number * batch_size, (number + 1) * batch_size)[rows or slice(None)]
        real = chosen < len(self)
        chosen = np.where(real, chosen, 0)
        batch = gather(self.rows, self.fields, self.source[chosen], self.index[chosen])
        if real.all():
            return batch
        return {name: _blanked(name, values, real) for name, values in batch.items()}


def _blanked(name: str, values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return `values` with the rows that are not real set to what means "no target"."""
    if name not in BLANK:
        return values
    shape = (len(real),) + (1,) * (values.ndim - 1)
    return np.where(real.reshape(shape), values, values.dtype.type(BLANK[name]))


def common_fields(mixture: Sequence[tuple[Sampling, Rows]]) -> Fields:
    """Return the fields that the rows of every source have. Raise InputError if they differ: a batch has one shape,
    and there is nothing to fill a missing field with."""
    (first, rows), *others = mixture
    for sampling, other in others:
        if other.fields != rows.fields:
            raise InputError(
                "the sources of a mixture must have the same fields in their rows: "
                f"{_label(first)} {_describe_difference(rows.fields, other.fields)}, "
                f"{_label(sampling)} {_describe_difference(other.fields, rows.fields)}. Preference pairs (CONTRASTIVE) "
                "cannot be mixed with documents; give all sources of training.dataset the same kind of data."
            )
    return rows.fields


def _label(sampling: Sampling) -> str:
    return f"'{sampling.name}' ({sampling.row_style.name})"


def _describe_difference(fields: Fields, other: Fields) -> str:
    """Name the fields that the other source lacks or has in another shape or type."""
    differing = [(name, *facts) for name, facts in fields.items() if other.get(name) != facts]
    if not differing:
        return "has only " + ", ".join(fields)
    return "has " + ", ".join(f"{name} {list(shape)} {dtype}" for name, shape, dtype in differing)


def gather(sources: Sequence[Rows], fields: Fields, source: np.ndarray, index: np.ndarray) -> Batch:
    """Return rows (source[i], index[i]) as one batch, in this order; all sources have the given fields."""
    if len(sources) == 1:
        return sources[0].get(index)
    out = {name: np.empty((len(source), *shape), dtype) for name, (shape, dtype) in fields.items()}
    for number, rows in enumerate(sources):
        places = np.flatnonzero(source == number)
        if len(places):
            found = rows.get(index[places])
            assert fields_of(found) == fields, f"{type(rows).__name__} declares {fields}, returns {fields_of(found)}"
            for name, values in out.items():  # every place belongs to one source, so all of `values` is written
                values[places] = found[name]
    return out


def _apportion(rates: Sequence[float], count: int) -> list[int]:
    """Return integer quotas that sum to `count`, by largest remainder."""
    ideal = np.array(rates) * count
    quota = np.floor(ideal + 1e-9).astype(int)
    for place in np.argsort(-(ideal - quota), kind="stable")[: count - int(quota.sum())]:
        quota[place] += 1
    return quota.tolist()


Mixture = Sequence[tuple[Sampling, Rows]]


class BatchPlan(Protocol):
    """What training needs of its data: token plans (DataPlan), prompts (rl/prompts.py) and stored completions
    (StoredPlan there) provide it."""

    @property
    def sources(self) -> Sequence[Rows]:
        """Return the rows of every source."""

    @property
    def validation(self) -> Validation | None:
        """Return the held-out rows; None if there are none, or if they are not evaluated as rows."""

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Return what a step is made from, one entry per row, or only `rows` of it; the same for the same step."""

    def epoch(self, step: int) -> float:
        """Return how many times the data has been seen before the step."""

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        """Counts of each source, by its name."""

    @property
    def fingerprint(self) -> str:
        """Return a hash that is equal for two plans with equal batches."""


class DataPlan:
    """Stages of mixtures, and the batch of every step.

    stages: the mixture of each stage; boundaries: the first step of each stage but the first; crossfade: shape of the
    change between neighbors, over `crossfade_share` of the shorter one; steps: the horizon, which bounds the last
    stage's fade; validation: mixture of the fixed set of `validation_count` sequences.
    """

    def __init__(
        self,
        stages: Sequence[Mixture],
        batch_size: int,
        seed: int,
        *,
        boundaries: Sequence[int] = (),
        steps: int | None = None,
        crossfade: str = "none",
        crossfade_share: float = 0.1,
        validation: Mixture = (),
        validation_count: int = 0,
    ) -> None:
        _check(stages, batch_size, boundaries, crossfade)
        self.batch_size, self.seed = batch_size, seed
        self.boundaries = tuple(boundaries)
        merged: dict[tuple[str, str, str], tuple[Sampling, Rows]] = {}
        for mixture in stages:
            for sampling, rows in mixture:
                merged.setdefault(sampling.identity, (sampling, rows))
        self.samplings = [sampling for sampling, _ in merged.values()]
        self.sources = [rows for _, rows in merged.values()]
        self.fields = common_fields(list(merged.values()))
        self.block_size = self.sources[0].block_size
        order = list(merged)
        rates = []
        for mixture in stages:
            samplings = [sampling for sampling, _ in mixture]
            given = {s.identity: share for s, share in zip(samplings, shares_of(samplings), strict=True)}
            rates.append([given.get(identity, 0.0) for identity in order])
        share = crossfade_share if crossfade != "none" else 0.0
        self.shares = Shares(rates, self.boundaries, batch_size, crossfade, share, steps)
        self.validation = Validation(validation, validation_count) if validation else None
        self.description = self._describe(rates, crossfade, share, steps if share else None)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Return the batch of one step, (batch_size, T) host arrays, or only `rows` of it; no other row is read."""
        source, number = self._slots(step)
        chosen = slice(None) if rows is None else rows
        source, number = source[chosen], number[chosen]
        index = np.empty(len(number), np.int64)
        for place in np.unique(source):
            here = source == place
            index[here] = self._rows_of(int(place), number[here])
        return gather(self.sources, self.fields, source, index)

    def _slots(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (B,) the source of each slot and (B,) which draw of that source it is."""
        begun = self.shares.before(step)
        counts = self.shares.before(step + 1) - begun
        source = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(self.batch_size) - np.repeat(np.cumsum(counts) - counts, counts) + begun[source]
        order = permute(np.arange(self.batch_size), self.batch_size, key_of(self.seed, "order", step))
        return source[order], number[order]

    def _rows_of(self, source: int, number: np.ndarray) -> np.ndarray:
        rows = self.sources[source]
        epochs, within = np.divmod(number, len(rows))
        out = np.empty(len(number), np.int64)
        for epoch in np.unique(epochs):  # one, or two where an epoch ends inside the batch
            here = epochs == epoch
            key = key_of(self.seed, "rows", rows.fingerprint, int(epoch))
            out[here] = permute(within[here], len(rows), key)
        return out

    def epoch(self, step: int) -> float:
        """Return the rows drawn before the step over all rows there are."""
        return step * self.batch_size / self.rows

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows in self.sources)

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        pairs = zip(self.samplings, self.sources, strict=True)
        return {"/".join(filter(None, s.identity)): rows.stats for s, rows in pairs}

    def validation_batch(self, number: int, batch_size: int, rows: slice | None = None) -> Batch:
        """Return batch `number` of the validation set; the last one is filled up with rows without targets."""
        if self.validation is None:
            raise InputError(
                "there is no validation data: prepare a validation split, or set training.validation=false."
            )
        return self.validation.batch(number, batch_size, rows)

    @property
    def fingerprint(self) -> str:
        """Return a hash that is equal for two plans with equal batches."""
        facts = {key: value for key, value in self.description.items() if key != "names"}
        return json_digest(facts)

    def _describe(self, rates: list[list[float]], crossfade: str, share: float, steps: int | None) -> dict[str, Any]:
        return {
            "names": ["/".join(filter(None, s.identity)) for s in self.samplings],
            "rows": [rows.fingerprint for rows in self.sources],
            "rates": rates,
            "boundaries": list(self.boundaries),
            "crossfade": [crossfade, share, steps] if share else None,
            "block_size": self.block_size,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }


def _check(stages: Sequence[Mixture], batch_size: int, boundaries: Sequence[int], crossfade: str) -> None:
    """Raise InputError for stages that no plan can be made of."""
    if not stages:
        raise InputError("training.dataset is empty: name at least one dataset.")
    for mixture in stages:
        check_mixture([sampling for sampling, _ in mixture])
    sizes = {rows.block_size for mixture in stages for _, rows in mixture}
    if len(sizes) > 1:
        raise InputError(f"all sources of a plan need one block size; these have {sorted(sizes)}.")
    if batch_size < 1:
        raise InputError(f"training.batch_size is {batch_size}; it must be at least 1.")
    if len(boundaries) != len(stages) - 1:
        raise InputError(
            f"{len(stages)} stages of data need {len(stages) - 1} boundaries, got {len(boundaries)}: give as "
            f"many token counts in training.tokens as there are lists in training.dataset."
        )
    if list(boundaries) != sorted(set(boundaries)) or any(b < 1 for b in boundaries):
        raise InputError(f"stage boundaries must increase from step 1 on; got {list(boundaries)}.")
    if crossfade not in FADES:
        raise InputError(f"data.crossfade is '{crossfade}'; it must be one of {', '.join(FADES)}.")


ROWS_AT_ONCE = 256


def sample_tokens(mixture: Mixture, tokens: int, seed: int) -> list[np.ndarray]:
    """Return about `tokens` training tokens, one sequence per row, from each source by its rate; all of a source that
    has fewer. Padding is left out.

    Rows come in an order keyed by the seed and the source, never by a step or the number of processes.
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
        for sequence in _unpadded(batch):
            found.append(sequence[:left])
            left -= len(found[-1])
            if left <= 0:
                break
    return found


def _unpadded(batch: Batch) -> list[np.ndarray]:
    """Return the input tokens of each row without padding."""
    ids = batch["input_ids"]
    kept = batch["segment_ids"] > 0 if "segment_ids" in batch else np.ones(ids.shape, bool)
    return [row[keep] for row, keep in zip(ids, kept, strict=True)]


# --- prefetching ---


class Prefetcher:
    """`get(step)` returns `make(step)`; up to `depth` following batches are made while the caller works.

    depth 0 makes each batch when asked. Batches are functions of the step, so asking for another step than the next one
    (after a rollback) just starts over from there. `waited` is the seconds `get` could not return at once.
    """

    def __init__(self, make: Callable[[int], Any], start: int, depth: int) -> None:
        self.make, self.depth = make, depth
        self.waited = 0.0
        self._ready: deque[tuple[int, Any, BaseException | None]] = deque()
        self._next = start  # the step the thread makes next
        self._wanted = start  # the step the caller asks for next
        self._generation = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True) if depth > 0 else None
        if self._thread is not None:
            self._thread.start()

    def get(self, step: int) -> Any:
        """Return the batch of the step; raise the error that making it raised."""
        begun = time.monotonic()
        if self._thread is None:
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            try:
                return self.make(step)
            finally:
                self.waited += time.monotonic() - begun
        with self._changed:
            if step != self._wanted:
                self._ready.clear()
                self._next = step
                self._generation += 1  # what the thread is making now is not wanted any more
                self._changed.notify_all()
            while not self._ready and not self._closed:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            _, batch, error = self._ready.popleft()
            self._wanted = step + 1
            self._changed.notify_all()
            self.waited += time.monotonic() - begun
        if error is not None:
            self._wanted = -1  # the next get, of any step, tries again
            raise error
        return batch

    def close(self) -> None:
        """Stop the thread; safe to call twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (len(self._ready) >= self.depth or self._failed()):
                    self._changed.wait()
                if self._closed:
                    return
                step, generation = self._next, self._generation
            batch, error = None, None
            try:
                batch = self.make(step)
            except BaseException as raised:  # noqa: BLE001 -- handed to the caller, who raises it
                error = raised
            with self._changed:
                if generation == self._generation and not self._closed:
                    self._ready.append((step, batch, error))
                    self._next = step + 1
                    self._changed.notify_all()

    def _failed(self) -> bool:
        """Hold the failure for the caller; no batch is made until it is raised there."""
        return bool(self._ready) and self._ready[-1][2] is not None
