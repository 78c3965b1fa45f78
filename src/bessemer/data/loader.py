"""`batch(step)`: which rows a step trains on, as a pure function of the data, the seed and the step.

There is no iterator and nothing to save. Of step t, source s owns C_s(t+1) − C_s(t) slots (shares.py); its
rows are numbers C_s(t), C_s(t)+1, … of an endless sequence in which epoch e is the permutation keyed by
(seed, source, e). The order of the slots in the batch is another permutation, keyed by the step. Any process
computes any rows of any batch, in any order, and they are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from bessemer.data.mixture import Sampling, check_mixture, shares_of
from bessemer.data.permutation import key_of, permute
from bessemer.data.rows import Batch, Rows
from bessemer.data.shares import Shares
from bessemer.data.validation import Validation, common_fields, gather
from bessemer.errors import InputError

Mixture = Sequence[tuple[Sampling, Rows]]
FADES = ("none", "linear", "cosine", "sigmoid")


class DataPlan:
    """Stages of mixtures, and the batch of every step.

    stages: the mixture of each stage; boundaries: the step at which each next stage begins (one fewer than
    stages); crossfade: shape of the change between neighbours, over `crossfade_share` of the shorter one;
    steps: the horizon, which bounds the last stage's fade; validation: mixture of the fixed set of
    `validation_count` sequences.
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
        _check(stages, batch_size, boundaries, crossfade, crossfade_share)
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
        """The batch of one step, (batch_size, T) host arrays; or only `rows` of it, which is all that is
        read."""
        source, number = self._slots(step)
        chosen = slice(None) if rows is None else rows
        source, number = source[chosen], number[chosen]
        index = np.empty(len(number), np.int64)
        for place in np.unique(source):
            here = source == place
            index[here] = self._rows_of(int(place), number[here])
        return gather(self.sources, self.fields, source, index)

    def _slots(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(B,) source of each slot, (B,) which draw of that source it is."""
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

    def rates(self, step: int) -> dict[str, float]:
        """The mixture at one step, by source name."""
        out: dict[str, float] = {}
        for sampling, rate in zip(self.samplings, self.shares.rates(step), strict=True):
            out[sampling.name] = out.get(sampling.name, 0.0) + float(rate)
        return out

    def epochs(self, step: int) -> dict[str, float]:
        """How often each source has been seen before the step."""
        drawn = self.shares.before(step)
        pairs = zip(self.samplings, self.sources, drawn, strict=True)
        return {"/".join(filter(None, s.identity)): int(n) / len(rows) for s, rows, n in pairs}

    def epoch(self, step: int) -> float:
        """Rows drawn before the step over all rows there are."""
        return step * self.batch_size / self.rows

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows in self.sources)

    def steps_per_epoch(self) -> float:
        return self.rows / self.batch_size

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        pairs = zip(self.samplings, self.sources, strict=True)
        return {"/".join(filter(None, s.identity)): rows.stats for s, rows in pairs}

    def validation_batches(self, batch_size: int) -> int:
        return 0 if self.validation is None else self.validation.batches(batch_size)

    def validation_batch(self, number: int, batch_size: int, rows: slice | None = None) -> Batch:
        """Batch `number` of the fixed validation set (the last is filled up with rows without targets)."""
        if self.validation is None:
            raise InputError(
                "there is no validation data: prepare a validation split, or set training.validation=false."
            )
        return self.validation.batch(number, batch_size, rows)

    @property
    def fingerprint(self) -> str:
        """Two plans with the same fingerprint give the same batches."""
        facts = {key: value for key, value in self.description.items() if key != "names"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _describe(
        self, rates: list[list[float]], crossfade: str, share: float, steps: int | None
    ) -> dict[str, Any]:
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


def _check(
    stages: Sequence[Mixture], batch_size: int, boundaries: Sequence[int], crossfade: str, share: float
) -> None:
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
    if not 0 <= share <= 1:
        raise InputError(f"data.crossfade_share is {share}; it must be between 0 and 1.")
