"""Joining shards into the final store: duplicates out, validation apart, every byte in source order."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.checksums import ChunkSums, save_sums
from bessemer.data.preference import KIND as PAIRS
from bessemer.data.store import FORMAT, offsets_of, token_dtype, write_facts
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError

Shards = Sequence[Path]
BLOCK = 16 << 20  # tokens copied at a time


def read_counts(shard: Path) -> dict[str, Any]:
    return json.loads((shard / "counts.json").read_text(encoding="utf-8"))


def sizes_of(shards: Shards) -> np.ndarray:
    """(documents, 2) int64: tokens and bytes of each document, in order."""
    return np.concatenate([np.empty((0, 2), np.int64), *(np.load(s / "sizes.npy") for s in shards)])


def hashes_of(shards: Shards) -> np.ndarray:
    """(documents, 2) uint64 content hashes, in order."""
    return np.concatenate([np.empty((0, 2), np.uint64), *(np.load(s / "hashes.npy") for s in shards)])


def first_of_each(hashes: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """(documents,) bool: the first document of each content that is not already in `seen`."""
    both = np.concatenate([seen, hashes])
    _, first = np.unique(both, axis=0, return_index=True)
    keep = np.zeros(len(both), bool)
    keep[first] = True
    return keep[len(seen) :]


def choose_validation(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """(documents,) bool: hash / 2^64 < fraction, and at least the document with the smallest hash.

    The choice looks at one document's content alone, so it does not depend on the order or number of files.
    """
    if fraction == 0:
        return np.zeros(len(hashes), bool)
    if len(np.unique(hashes, axis=0)) < 2:
        copies = f" ({len(hashes)} copies of it)" if len(hashes) > 1 else ""
        raise InputError(
            f"all of the data is one document{copies}, so none can be set apart for validation: give more documents "
            "(a .jsonl with one text a line); or train without, by data.val_fraction=0 training.validation=false; or "
            "name the held-out texts by `bessemer data prepare … --val FILE`."
        )
    chosen = hashes[:, 0] < np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    if not chosen.any():
        chosen = hashes[:, 0] == hashes[:, 0].min()
    if chosen.all():
        chosen = hashes[:, 0] != hashes[:, 0].max()
    return chosen


def write_split(shards: Shards, keep: np.ndarray, out: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the kept documents of the shards as one split; returns its store.json."""
    out.mkdir(parents=True)
    masked = any(read_counts(s)["masked"] for s in shards)
    kind = kind_of(sum(read_counts(s).get("pairs", 0) for s in shards), len(keep))
    digest = hashlib.sha256()
    sums: dict[str, np.ndarray] = {}
    trained = 0
    for name in ["tokens.bin", "mask.bin"] if masked else ["tokens.bin"]:
        chunks = ChunkSums()
        with open(out / name, "wb") as file:
            for shard, chosen in zip(shards, _per_shard(shards, keep), strict=True):
                for block in _kept(shard, name, chosen, tokenizer):
                    file.write(block)
                    digest.update(block)
                    chunks.update(block)
                    trained += block.count(1) if name == "mask.bin" else 0
            file.flush()
            os.fsync(file.fileno())
        sums[name] = chunks.finish()
    sizes = sizes_of(shards)[keep]
    offsets = offsets_of(sizes[:, 0])
    (out / "docs.idx").write_bytes(offsets.tobytes())
    digest.update(offsets.tobytes())
    chunks = ChunkSums()
    chunks.update(offsets.tobytes())
    sums["docs.idx"] = chunks.finish()
    info = {
        "format": FORMAT,
        "kind": kind,
        "fields": ["input_ids", "loss_mask"] if masked else ["input_ids"],
        "dtype": str(token_dtype(tokenizer.vocab_size)),
        "documents": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        "bytes": int(sizes[:, 1].sum()),
        "mask": masked,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "pad_id": tokenizer.pad_id,
        "tokenizer": tokenizer.hash,
        "sha256": digest.hexdigest(),
        "checksums": save_sums(out, sums),
    }
    if masked:
        info["supervised"] = trained
    write_facts(out / "store.json", info)
    return info


def kind_of(pairs: int, documents: int) -> str:
    """What a store holds: preference pairs, or documents to learn as they are. Never both, as rows differ."""
    if 0 < pairs < documents:
        raise InputError(
            f"{pairs} of {documents} documents are preference pairs and the others are not: prepare them as two stores."
        )
    return PAIRS if pairs else "tokens"


def _per_shard(shards: Shards, keep: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([read_counts(s)["documents"] for s in shards])
    return np.split(keep, ends[:-1])


def _kept(shard: Path, name: str, chosen: np.ndarray, tokenizer: Tokenizer) -> Iterator[bytes]:
    """The bytes of the chosen documents in one shard file, in blocks of bounded size."""
    lengths = np.load(shard / "sizes.npy")[:, 0]
    offsets = offsets_of(lengths)
    dtype = token_dtype(tokenizer.vocab_size) if name == "tokens.bin" else np.dtype(np.uint8)
    missing = name == "mask.bin" and not read_counts(shard)["masked"]
    first = 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK, side="right")) - 1)
        begin, count = int(offsets[first]), int(offsets[last] - offsets[first])
        if missing:  # a shard without masks beside one with: everything in it is trained on
            values: np.ndarray = np.ones(count, np.uint8)
        else:
            values = np.fromfile(shard / name, dtype, count=count, offset=begin * dtype.itemsize)
        here = chosen[first:last]
        yield values.tobytes() if here.all() else values[np.repeat(here, lengths[first:last])].tobytes()
        first = last
