"""Encode one shard of documents into a directory, and join shards into a store.

A shard keeps every document with its content hash. Splits and duplicates are decided when shards are joined, because
only then are all documents known.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bessemer import console
from bessemer.data.rows.rows import FORMAT, kind_of, offsets_of, token_dtype, write_facts, write_json
from bessemer.data.sources.datasets import hashed_below
from bessemer.data.tokenize.documents import Bad, Document, TurnRows
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.storage.checksums import ChunkSums, save_sums
from bessemer.storage.files import atomic_directory

BATCH_BYTES = 1 << 20  # text encoded at a time
SHOWN = 5  # skipped lines quoted in the report
Report = Callable[[int, int], None]  # documents, tokens since the last call


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation. Counts are of this process; existing shards count only toward `done`."""

    label: str
    documents: int = 0
    tokens: int = 0
    done: int = 0  # source bytes finished, in whole shards
    total: int = 0
    seconds: float = 0.0

    @property
    def line(self) -> str:
        span = max(self.seconds, 1e-9)
        share = f"{100 * self.done / max(self.total, 1):.0f}%, " if self.done else ""
        return (
            f"{self.label}: {share}{self.documents:,} documents ({self.documents / span:,.0f}/s), "
            f"{self.tokens:,} tokens ({self.tokens / span:,.0f}/s)"
        )


Callback = Callable[[Progress], None]


@contextmanager
def show_progress(stream: Any = None) -> Iterator[Callback]:
    """Yield a callback that shows a preparation's progress on stderr."""
    with console.show_progress(stream=stream) as display:
        yield lambda state: display.update(state.label, state.done, state.total, state.line)


class Tally:
    """Adds up the workers' reports and passes the sum to the callback."""

    def __init__(self, label: str, total: int, callback: Callback | None) -> None:
        self.begun = time.monotonic()
        self.state = Progress(label, total=total)
        self.callback = callback

    def add(self, documents: int = 0, tokens: int = 0, done: int = 0) -> None:
        self.state = replace(
            self.state,
            documents=self.state.documents + documents,
            tokens=self.state.tokens + tokens,
            done=self.state.done + done,
            seconds=time.monotonic() - self.begun,
        )
        if self.callback is not None:
            self.callback(self.state)


@dataclass
class Counts:
    """Counts of one shard; `where` quotes the first skipped lines."""

    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    empty: int = 0
    masked: bool = False
    pairs: int = 0
    where: tuple[str, ...] = ()
    turn_rows: TurnRows = field(default_factory=TurnRows)


class ShardWriter:
    """Streams documents into `directory`, in bounded memory however long the source is."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, on_error: str, report: Report) -> None:
        self.directory, self.tokenizer, self.on_error, self.report = directory, tokenizer, on_error, report
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.counts = Counts()
        self.sizes: list[np.ndarray] = []  # (documents, 2): tokens and bytes of each
        self.hashes: list[bytes] = []

    def write(self, documents: Iterable[Document | Bad]) -> Counts:
        """Encode everything and commit; a crash at any moment leaves either the whole shard or none of it."""
        with atomic_directory(self.directory, exist_ok=True) as temporary:
            with open(temporary / "tokens.bin", "wb") as tokens, open(temporary / "mask.bin", "wb") as mask:
                self._stream(documents, tokens, mask)
                for file in (tokens, mask):
                    file.flush()
                    os.fsync(file.fileno())
            np.save(temporary / "sizes.npy", np.concatenate([np.empty((0, 2), np.int64), *self.sizes]))
            np.save(temporary / "hashes.npy", np.frombuffer(b"".join(self.hashes), np.uint64).reshape(-1, 2))
            write_json(temporary / "counts.json", asdict(self.counts))
        return self.counts

    def _stream(self, documents: Iterable[Document | Bad], tokens: BinaryIO, mask: BinaryIO) -> None:
        waiting: list[Document] = []
        size = 0
        for read in documents:
            if isinstance(read, Bad):
                self._bad(read)
                continue
            self.counts.pairs += read.pair is not None
            self.counts.turn_rows.add(read)
            if not (read.text or read.ids):
                self.counts.empty += 1
                continue
            waiting.append(read)
            size += len(read.text) if read.text is not None else sum(2 * len(ids) for ids, _ in read.rows)
            if size >= BATCH_BYTES:
                self._flush(waiting, tokens, mask)
                waiting, size = [], 0
        self._flush(waiting, tokens, mask)

    def _bad(self, bad: Bad) -> None:
        if self.on_error == "fail":
            raise InputError(
                f"{bad}. Fix or remove the line, or skip and count such lines with data.on_error=skip "
                "(--on-error skip when preparing)."
            )
        self.counts.skipped += 1
        if len(self.counts.where) < SHOWN:
            self.counts.where = (*self.counts.where, str(bad))

    def _flush(self, documents: list[Document], tokens: BinaryIO, mask: BinaryIO) -> None:
        if not documents:
            return
        raw = [d.text.encode() for d in documents if d.text is not None]
        encoded = iter(self.tokenizer.encode_batch([d.text for d in documents if d.text is not None]))
        texts = iter(raw)
        bos = self.tokenizer.bos_id
        arrays: list[np.ndarray] = []
        sizes: list[int] = []  # bytes of text, 0 for ids of unknown origin
        masks: list[list[int] | None] = []
        for document in documents:
            if document.ids is None:
                arrays.append(np.array([bos, *next(encoded)], self.dtype))
                masks.append(None)
                content = next(texts)
                sizes.append(len(content))
                self.hashes.append(hashlib.blake2b(content, digest_size=16).digest())
                continue
            rows = [(self._given(ids), mask) for ids, mask in document.rows]
            arrays += [ids for ids, _ in rows]
            masks += [mask for _, mask in rows]
            sizes += [document.bytes, *(0 for _ in document.further)]
            self.hashes += row_hashes([ids.tobytes() + bytes(mask or ()) for ids, mask in rows])
        lengths = np.array([len(a) for a in arrays], np.int64)
        self.sizes.append(np.stack([lengths, np.array(sizes, np.int64)], 1))
        tokens.write(np.concatenate(arrays).tobytes())
        self._masks(masks, lengths, mask)
        self.counts.documents += len(arrays)
        self.counts.tokens += int(lengths.sum())
        self.report(len(arrays), int(lengths.sum()))

    def _given(self, ids: list[int]) -> np.ndarray:
        array = np.asarray(ids, np.int64)
        if array.min() < 0 or array.max() >= self.tokenizer.vocab_size:
            raise InputError(
                f"input_ids hold {array.min()}…{array.max()}, but the tokenizer has "
                f"{self.tokenizer.vocab_size} tokens: they were made with another tokenizer."
            )
        return array.astype(self.dtype)

    def _masks(self, masks: list[list[int] | None], lengths: np.ndarray, mask: BinaryIO) -> None:
        """mask.bin stays empty until the first masked document; then it is filled with ones up to there."""
        if not self.counts.masked:
            if all(one is None for one in masks):
                return
            self.counts.masked = True
            mask.write(b"\x01" * self.counts.tokens)
        for one, length in zip(masks, lengths, strict=True):
            mask.write(bytes(one) if one is not None else b"\x01" * int(length))


def row_hashes(rows: Sequence[bytes]) -> list[bytes]:
    """16 bytes for each row of a document. The first 8, which decide about validation, are of all rows together: what
    is held out of one is held out of the others."""
    if len(rows) == 1:
        return [hashlib.blake2b(rows[0], digest_size=16).digest()]
    whole = hashlib.blake2b(digest_size=8)
    for row in rows:
        whole.update(len(row).to_bytes(8, "little") + row)
    numbered = (number.to_bytes(8, "little") for number in range(len(rows)))
    return [whole.digest() + hashlib.blake2b(number + whole.digest(), digest_size=8).digest() for number in numbered]


# Joining shards into the final store


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
    if len(np.unique(hashes[:, 0])) < 2:
        copies = f" ({len(hashes)} copies of it)" if len(hashes) > 1 else ""
        raise InputError(
            f"all of the data is one document{copies}, so none can be set apart for validation: give more documents "
            "(a .jsonl with one text per line); train without validation (data.val_fraction=0 "
            "training.validation=false); or "
            "name the held-out texts by `bessemer data prepare … --val FILE`."
        )
    chosen = hashed_below(hashes[:, 0], fraction)
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


def _per_shard(shards: Shards, keep: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([read_counts(s)["documents"] for s in shards])
    return np.split(keep, ends[:-1])


def _kept(shard: Path, name: str, chosen: np.ndarray, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the bytes of the chosen documents of a shard file, in blocks of bounded size."""
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
