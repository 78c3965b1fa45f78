"""The validation set: the same sequences at every pass, in every run and for any number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bessemer.data.mixture import Sampling
from bessemer.data.permutation import key_of, permute
from bessemer.data.rows import Batch, Rows


class Validation:
    """`count` rows, shared out by the rates of the mixture; a source with fewer rows gives all it has.

    Which rows does not depend on the seed, so that runs with different seeds are judged on the same text.
    """

    def __init__(self, sources: Sequence[tuple[Sampling, Rows]], count: int) -> None:
        self.rows = [rows for _, rows in sources]
        quotas = _apportion([sampling.rate for sampling, _ in sources], count)
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
        batch = gather(self.rows, self.source[chosen], self.index[chosen])
        batch["target_ids"][~real] = -1
        batch["segment_ids"][~real] = 0
        batch["loss_mask"][~real] = 0
        if "pair_ids" in batch:
            batch["pair_ids"][~real] = -1
        return batch


def gather(sources: Sequence[Rows], source: np.ndarray, index: np.ndarray) -> Batch:
    """Rows (source[i], index[i]) as one batch, in this order."""
    if len(sources) == 1:
        return sources[0].get(index)
    out: Batch = {}
    for number, rows in enumerate(sources):
        places = np.flatnonzero(source == number)
        if not len(places):
            continue
        for name, values in rows.get(index[places]).items():
            if name not in out:
                out[name] = np.empty((len(source), *values.shape[1:]), values.dtype)
            out[name][places] = values
    return out if out else sources[0].get(index)


def _apportion(rates: Sequence[float], count: int) -> list[int]:
    """Largest remainder."""
    ideal = np.array(rates) * count
    quota = np.floor(ideal + 1e-9).astype(int)
    for place in np.argsort(-(ideal - quota), kind="stable")[: count - int(quota.sum())]:
        quota[place] += 1
    return quota.tolist()
