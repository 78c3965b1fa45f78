"""What a store holds: its counts, lengths and the beginning of a few documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.rows.store import TokenStore
from bessemer.data.tokenize.documents import ANSWER, BEGINS, PAIRS
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import StorageError

SHOWN = 3
WIDTH = 24  # tokens of each document shown


def describe_store(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """Return the root store.json, with the lengths and first tokens of the documents of each split. `verify`: read
    every byte first, and raise StorageError if one is not as it was prepared."""
    store = TokenStore(path)
    tokenizer = Tokenizer.load(store.root / FILE)
    if tokenizer.hash != store.info["tokenizer"]:
        raise StorageError(
            f"'{store.root / FILE}' is damaged or was replaced: its tokenizer is {tokenizer.hash[:12]}, the store's "
            f"{store.info['tokenizer'][:12]}. Copy the store again, or prepare it again."
        )
    facts: dict[str, Any] = {
        **store.about,
        "path": str(store.root),
        "lengths": {},
        "examples": {},
        "checksums": {},
    }
    for name in store.splits:
        part = store.split(name)
        facts["checksums"][name] = part.has_checksums
        if verify:
            part.verify()
        lengths = np.diff(part.offsets)
        marks = np.quantile(lengths, (0, 0.5, 0.9, 1), method="lower").tolist() if len(lengths) else [0] * 4
        facts["lengths"][name] = dict(zip(("min", "median", "p90", "max"), marks, strict=True))
        show = _pair if part.info["kind"] == PAIRS else _beginning
        facts["examples"][name] = [show(part, n, tokenizer) for n in range(min(SHOWN, len(lengths)))]
    if verify:
        facts["verified"] = True
    return facts


def _beginning(part: TokenStore, number: int, tokenizer: Tokenizer) -> str:
    start, end = part.offsets[number], part.offsets[number + 1]
    part.require(np.array([start]), np.array([min(end, start + WIDTH)]))
    return tokenizer.decode(part.tokens[start : min(end, start + WIDTH)])


def _pair(part: TokenStore, number: int, tokenizer: Tokenizer) -> str:
    """The end of the prompt and the beginning of both answers."""
    assert part.mask is not None
    start, end = part.offsets[number], part.offsets[number + 1]
    ids, marks = part.tokens[start:end], part.mask[start:end]
    cut = int(np.flatnonzero(marks & BEGINS)[0])
    sides = [(ids[:cut], marks[:cut] & ANSWER), (ids[cut:], marks[cut:] & ANSWER)]
    first = int(np.argmax(sides[0][1]))
    prompt = tokenizer.decode(ids[max(0, first - WIDTH) : first])
    chosen, rejected = (tokenizer.decode(side[mask == 1][:WIDTH]) for side, mask in sides)
    return f"{prompt} ▸ chosen: {chosen} ▸ rejected: {rejected}"
