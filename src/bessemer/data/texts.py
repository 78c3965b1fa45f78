"""What a tokenizer is trained on: the texts of the sources, or of large ones an even sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bessemer.data.chat import spoken
from bessemer.data.permutation import permute
from bessemer.data.preference import texts_of
from bessemer.data.prepare import documents_of
from bessemer.data.readers import Bad, Document, read_piece
from bessemer.data.sources import Files, Piece, Source, plan_shards
from bessemer.errors import InputError

SAMPLE_BYTES = 32 << 20  # text a tokenizer is trained on
SAMPLE_SHARD = 1 << 20  # a larger corpus is sampled in pieces of this size
MOST_SHARDS = 1 << 16  # a corpus of more is sampled at the beginnings of this many parts of it
MOST_READ = 512 << 20
"""Bytes of a source that are looked through for its share of the text: rows may have little text among much else, and a
file may be one endless line."""
MOST_UNPACKED = 128 << 20  # bytes of what one compressed file expands to


def sample_texts(
    sources: Sequence[Source], text_key: str | None = None, limit: int = SAMPLE_BYTES
) -> Iterator[str]:
    """Texts of the sources, about `limit` bytes in all; of larger ones a sample of pieces spread over them.

    What cannot be read is left out here, since preparing the data judges it; but if nothing is left, that is said.
    """
    share = limit // max(1, len(sources))
    wrong: Bad | None = None
    found = 0
    for source in sources:
        used = 0
        for text in _texts(source, text_key):
            if isinstance(text, Bad):
                wrong = wrong or text
                continue
            yield text
            used += len(text)
            if used >= share:
                break
        found += used
    if not found:
        raise InputError(f"there is no text to train a tokenizer on: {wrong or _nothing_in(sources)}.")


def _nothing_in(sources: Sequence[Source]) -> str:
    labels = ", ".join(source.label for source in sources)
    large = any(isinstance(s, Files) and sum(f.size for f in s.files) > MOST_READ for s in sources)
    part = f" (of a large one {MOST_READ >> 20} MiB, spread over it, were read)" if large else ""
    return f"no document was found in {labels}{part}"


def _texts(source: Source, text_key: str | None) -> Iterator[str | Bad]:
    if isinstance(source, Files):
        reads: Iterator[Document | Bad] = (
            read
            for piece in _sampled(source)
            for read in read_piece(piece, text_key, most_unpacked=MOST_UNPACKED)
        )
    else:
        reads = documents_of(source.items, text_key)
    for read in reads:
        if isinstance(read, Bad):
            yield read
        elif read.messages:
            yield spoken(read.messages)
        elif read.text:
            yield read.text
        elif read.pair is not None:
            yield from texts_of(read.pair)


def _sampled(source: Files) -> Iterator[Piece]:
    """Pieces of the files in an order without a pattern, up to MOST_READ bytes in all."""
    size = sum(file.size for file in source.files)
    shards = plan_shards(source, max(SAMPLE_SHARD, -(-size // MOST_SHARDS)))
    read = 0
    for index in permute(range(len(shards)), len(shards), 0).tolist():
        for piece in shards[index]:
            if piece.kind in (
                "txt",
                "jsonl",
            ):  # a larger one only in a corpus of more than MOST_SHARDS pieces
                piece = replace(piece, stop=min(piece.stop, piece.start + SAMPLE_SHARD))
            yield piece
            read += min(piece.size, piece.stop - piece.start) if piece.kind != "parquet" else piece.size
            if read >= MOST_READ:
                return
