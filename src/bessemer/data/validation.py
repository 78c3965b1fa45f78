"""The validation set: the same sequences at every pass, in every run and for any number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bessemer.data.mixture import Sampling, shares_of
from bessemer.data.permutation import key_of, permute
from bessemer.data.rows import Batch, Fields, Rows
from bessemer.errors import InputError

BLANK = {"target_ids": -1, "segment_ids": 0, "loss_mask": 0, "pair_ids": -1}
"""Values of a row without any target."""


class Validation:
    """`count` rows, shared out by the rates of the mixture; a source with fewer rows gives all it has.

    Which rows does not depend on the seed, so that runs with different seeds are judged on the same text.
    """

    def __init__(self, sources: Sequence[tuple[Sampling, Rows]], count: int) -> None:
        self.fields = common_fields(sources)
        self.rows = [rows for _, rows in sources]
        quotas = _apportion(shares_of([sampling for sampling, _ in sources]), count)
        sizes = [min(quota, len(rows)) for quota, rows in zip(quotas, self.rows, strict=True)]
        self.source = np.repeat(np.arange(len(sizes)), sizes)  # (count,)
        self.index = np.concatenate(
            [
                permute(np.arange(size), len(r), key_of("validation"))
                for size, r in zip(sizes, self.rows, strict=True)
            ]
        )

    def __len__(self) -> int:
        """Sequences in one pass."""
        return len(self.source)

    def batches(self, batch_size: int) -> int:
        return -(-len(self) // batch_size)

    def batch(self, number: int, batch_size: int, rows: slice | None = None) -> Batch:
        """Batch `number` of a pass, or the given rows of it; the last one is filled with rows without
        targets."""
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
                f"{_label(first)} {_excess(rows.fields, other.fields)}, "
                f"{_label(sampling)} {_excess(other.fields, rows.fields)}. Preference pairs (CONTRASTIVE) cannot be "
                "mixed with documents; give all sources of training.dataset the same kind of data."
            )
    return rows.fields


def _label(sampling: Sampling) -> str:
    return f"'{sampling.name}' ({sampling.row_style.name})"


def _excess(fields: Fields, other: Fields) -> str:
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
            for (
                name,
                values,
            ) in out.items():  # every place belongs to one source, so all of `values` is written
                values[places] = found[name]
    return out


def _apportion(rates: Sequence[float], count: int) -> list[int]:
    """Largest remainder."""
    ideal = np.array(rates) * count
    quota = np.floor(ideal + 1e-9).astype(int)
    for place in np.argsort(-(ideal - quota), kind="stable")[: count - int(quota.sum())]:
        quota[place] += 1
    return quota.tolist()
