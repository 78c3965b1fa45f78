"""Encoding one shard of documents into a directory that appears by a single rename.

A shard keeps every document with its content hash; which split it belongs to, and whether it is a duplicate,
is decided when shards are joined, because only then are all documents known.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bessemer.data.readers import Bad, Document
from bessemer.data.store import token_dtype, write_json
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError

BATCH_BYTES = 1 << 20  # text encoded at a time
SHOWN = 5  # skipped lines quoted in the report
Report = Callable[[int, int], None]  # documents, tokens since the last call


@dataclass
class Counts:
    """What happened in a shard; `where` quotes the first skipped lines."""

    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    empty: int = 0
    masked: bool = False
    pairs: int = 0
    where: tuple[str, ...] = ()


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
        temporary = self.directory.with_name(f"{self.directory.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with open(temporary / "tokens.bin", "wb") as tokens, open(temporary / "mask.bin", "wb") as mask:
            self._stream(documents, tokens, mask)
            for file in (tokens, mask):
                file.flush()
                os.fsync(file.fileno())
        np.save(temporary / "sizes.npy", np.concatenate([np.empty((0, 2), np.int64), *self.sizes]))
        np.save(temporary / "hashes.npy", np.frombuffer(b"".join(self.hashes), np.uint64).reshape(-1, 2))
        write_json(temporary / "counts.json", vars(self.counts))
        try:
            os.rename(temporary, self.directory)
        except OSError:
            if (
                not self.directory.is_dir()
            ):  # else a worker that outlived its parent has just committed the same shard
                raise
            shutil.rmtree(temporary, ignore_errors=True)
        return self.counts

    def _stream(self, documents: Iterable[Document | Bad], tokens: BinaryIO, mask: BinaryIO) -> None:
        waiting: list[Document] = []
        size = 0
        for read in documents:
            if isinstance(read, Bad):
                self._bad(read)
                continue
            self.counts.pairs += read.pair is not None
            if not (read.text or read.ids):
                self.counts.empty += 1
                continue
            waiting.append(read)
            size += len(read.text) if read.text is not None else 2 * len(read.ids or ())
            if size >= BATCH_BYTES:
                self._flush(waiting, tokens, mask)
                waiting, size = [], 0
        self._flush(waiting, tokens, mask)

    def _bad(self, bad: Bad) -> None:
        if self.on_error == "fail":
            raise InputError(
                f"{bad}. Mend or remove it, or skip and count such lines with data.on_error=skip (--on-error skip when "
                "preparing)."
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
        for document in documents:
            if document.ids is None:
                arrays.append(np.array([bos, *next(encoded)], self.dtype))
                content = next(texts)
                sizes.append(len(content))
            else:
                arrays.append(self._given(document.ids))
                sizes.append(document.bytes)
                content = arrays[-1].tobytes() + bytes(document.mask or ())
            self.hashes.append(hashlib.blake2b(content, digest_size=16).digest())
        lengths = np.array([len(a) for a in arrays], np.int64)
        self.sizes.append(np.stack([lengths, np.array(sizes, np.int64)], 1))
        tokens.write(np.concatenate(arrays).tobytes())
        self._masks(documents, lengths, mask)
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

    def _masks(self, documents: list[Document], lengths: np.ndarray, mask: BinaryIO) -> None:
        """mask.bin stays empty until the first masked document; then it is filled with ones up to there."""
        if not self.counts.masked:
            if all(d.mask is None for d in documents):
                return
            self.counts.masked = True
            mask.write(b"\x01" * self.counts.tokens)
        for document, length in zip(documents, lengths, strict=True):
            mask.write(bytes(document.mask) if document.mask is not None else b"\x01" * int(length))
