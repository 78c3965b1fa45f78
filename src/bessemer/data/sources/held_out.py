"""What is held out of a dataset: the one rule for token stores and prompts.

A registered dataset may bring a held-out part of its own. Otherwise an example is held out if the hash of its content,
as a share of 2^64, is below `data.val_fraction`: a rule that looks at one example alone, whatever the order and number
of files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.registry import datasets


def own_held_out(name: str) -> Any:
    """Return the held-out part that a registered dataset brings (its trait `held_out`); None if there is none."""
    held_out = datasets.entry(name).traits.get("held_out") if name in datasets else None
    return None if held_out is None else held_out()


def hashed_below(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Return whether each hash, (n,) uint64, is below `fraction` of 2^64: (n,) bool."""
    return hashes < np.uint64(min(int(fraction * 2**64), 2**64 - 1))
