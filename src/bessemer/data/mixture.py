"""What is sampled and how: `Sampling`, the row styles, and checks on a mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bessemer.errors import InputError, nearest


class DatasetStyle(Enum):
    """How documents become rows; docs/data.md compares them."""

    PMD = "pmd"  # contiguous windows of the whole stream
    PACKED = "packed"  # whole documents by best fit, nothing dropped
    CROPPED = "cropped"  # best fit, rows always full, the overhang cropped and counted
    PADDED = "padded"  # one example a row
    CONTRASTIVE = "contrastive"  # whole pairs, chosen and rejected side by side


@dataclass(frozen=True)
class Sampling:
    """One source of a mixture. `name`: a registered dataset, a store directory, or a file or glob; `rate`: its weight
    beside the others; `style`: None is the objective's, PMD where it has none; `suffix` names a variant of the store
    (appended to a store directory's name)."""

    name: str
    rate: float = 1.0
    style: DatasetStyle | None = None
    suffix: str = ""

    @classmethod
    def from_string(cls, text: str) -> Sampling:
        """`name` or `name:STYLE`."""
        name, colon, style = text.rpartition(":")
        if colon and style.upper() in DatasetStyle.__members__:
            return cls(name, style=DatasetStyle[style.upper()])
        close = nearest(style.upper(), list(DatasetStyle.__members__), 0.7) if colon else None
        if close and style.isupper():
            raise InputError(f"dataset '{text}': unknown style '{style}'. Did you mean '{close}'?")
        return cls(text)

    @property
    def identity(self) -> tuple[str, str, str]:
        """What makes two samplings the same stream of rows, whatever their rates."""
        return (self.name, self.row_style.name, self.suffix)

    @property
    def row_style(self) -> DatasetStyle:
        """The style in force."""
        return self.style or DatasetStyle.PMD


def shares_of(mixture: Sequence[Sampling]) -> list[float]:
    """Return the share of each source in the mixture: its rate over the sum of all. Rates that sum to 1 are themselves,
    to the bit, so that a run is named as before."""
    total = math.fsum(sampling.rate for sampling in mixture)
    normal = abs(total - 1) <= 1e-6
    return [sampling.rate if normal else sampling.rate / total for sampling in mixture]


def check_mixture(mixture: Sequence[Sampling]) -> None:
    """Raise InputError unless all rates are above 0 and no source occurs twice."""
    if not mixture:
        raise InputError("training.dataset is empty: name at least one dataset.")
    for sampling in mixture:
        if not sampling.name.strip():
            raise InputError(
                "training.dataset names nothing: give a text file, a glob, a prepared directory or a registered name "
                "such as python-stdlib."
            )
        if not (math.isfinite(sampling.rate) and sampling.rate > 0):
            raise InputError(f"dataset '{sampling.name}' has rate {sampling.rate}; rates are above 0.")
    seen: set[tuple[str, str, str]] = set()
    for sampling in mixture:
        if sampling.identity in seen:
            raise InputError(f"dataset '{sampling.name}' appears twice in one mixture; add its rates up.")
        seen.add(sampling.identity)
