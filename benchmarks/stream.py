"""The reference's token stream: encoded from its parquet files, checked, and cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bessemer.data import Tokenizer
from bessemer.errors import InputError


@dataclass(frozen=True)
class Facts:
    """What identifies a stream."""

    documents: int
    bytes: int
    tokens: int
    total: int  # sum of all ids
    first: tuple[int, ...] = ()


FACTS = {
    "train": Facts(12_732, 149_406_379, 37_761_442, 55_891_705_245, (0, 45, 292, 5305, 5087, 65, 5623, 2401)),
    "val": Facts(155, 1_755_612, 442_015, 654_304_912),
}


class Stream(NamedTuple):
    tokens: np.ndarray  # uint16
    facts: Facts


def encode(files: Sequence[Path], tokenizer: Tokenizer) -> Stream:
    """All documents of parquet files, each bos + tokens; the tokenizer library uses every core."""
    import pyarrow.parquet as pq

    parts: list[np.ndarray] = []
    documents = size = 0
    for file in files:
        texts = pq.read_table(file, columns=["text"]).column("text").to_pylist()
        documents += len(texts)
        size += sum(len(text.encode()) for text in texts)
        for ids in tokenizer.encode_batch(texts):
            parts.append(np.asarray([tokenizer.bos_id, *ids], np.uint16))
    return described(np.concatenate(parts), documents, size)


def described(tokens: np.ndarray, documents: int, size: int) -> Stream:
    first = tuple(map(int, tokens[:8]))
    return Stream(tokens, Facts(documents, size, tokens.size, int(tokens.sum(dtype=np.int64)), first))


def check(name: str, found: Facts, expected: Facts) -> None:
    """Refuse a stream that is not the reference's: a curve on other tokens compares nothing."""
    if not expected.first:
        found = Facts(**{**asdict(found), "first": ()})
    if found != expected:
        raise InputError(
            f"the {name} stream is not the reference's: found {found}, expected {expected}. Give the reference's "
            "parquet files and tokenizer.json, or pass --any-stream to train on what is there."
        )


def load_streams(data: Path, reference: Path, cache: Path | None) -> dict[str, Stream]:
    """train and val, encoded now or read from the cache (an .npz, compressed), which is written when missing."""
    if cache is not None and cache.exists():
        with np.load(cache) as stored:
            return {name: described(stored[name], *map(int, stored[f"{name}_size"])) for name in FACTS}
    tokenizer = Tokenizer.load(reference)
    streams = {}
    for name in FACTS:
        files = sorted(data.glob(f"{name}-*.parquet"))
        if not files:
            raise InputError(f"no {name}-*.parquet in '{data}'; give the directory of the reference's data.")
        streams[name] = encode(files, tokenizer)
    if cache is not None:
        sizes = {f"{name}_size": [s.facts.documents, s.facts.bytes] for name, s in streams.items()}
        np.savez_compressed(cache, **{name: s.tokens for name, s in streams.items()}, **sizes)  # type: ignore[arg-type]
    return streams


def windows(tokens: np.ndarray, step: int, size: int, length: int) -> np.ndarray:
    """Windows step·size … (step + 1)·size - 1, modulo the number of whole ones: (size, T + 1) int32."""
    whole = (tokens.size - 1) // length
    if whole < 1:
        raise InputError(f"{tokens.size} tokens hold no window of {length} + 1; set a smaller block_size.")
    starts = (np.arange(step * size, (step + 1) * size) % whole) * length
    return tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def batch_of(rows: np.ndarray, documents: bool = False) -> dict[str, np.ndarray]:
    """(…, T + 1) → what the step reads; `documents`: number those of each row (bos is 0), for document_mask."""
    batch = {"input_ids": rows[..., :-1], "target_ids": rows[..., 1:]}
    if documents:
        batch["segment_ids"] = 1 + np.cumsum(batch["input_ids"] == 0, axis=-1, dtype=np.int32)
    return batch
