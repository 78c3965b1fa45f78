"""What a store holds: its counts, lengths and the beginning of a few documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.store import TokenStore
from bessemer.data.tokenizer import FILE, Tokenizer

SHOWN = 3
WIDTH = 24  # tokens of each document shown


def describe_store(path: str | Path) -> dict[str, Any]:
    """The root store.json, with the lengths and first tokens of the documents of each split."""
    store = TokenStore(path)
    tokenizer = Tokenizer.load(store.root / FILE)
    facts: dict[str, Any] = {**store.about, "path": str(store.root), "lengths": {}, "examples": {}}
    for name in store.splits:
        part = store.split(name)
        lengths = np.diff(part.offsets)
        marks = np.quantile(lengths, (0, 0.5, 0.9, 1), method="lower").tolist() if len(lengths) else [0] * 4
        facts["lengths"][name] = dict(zip(("min", "median", "p90", "max"), marks, strict=True))
        starts = part.offsets[: min(SHOWN, len(lengths))]
        ends = np.minimum(part.offsets[1 : len(starts) + 1], starts + WIDTH)
        facts["examples"][name] = [
            tokenizer.decode(part.tokens[a:b]) for a, b in zip(starts, ends, strict=True)
        ]
    return facts
