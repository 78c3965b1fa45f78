"""Find the tokenizer that data.tokenizer names: on disk, in a store, or trained on the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.data.plan.batches import permute
from bessemer.data.plan.mixture import Sampling
from bessemer.data.rows.store import ArrayStore, TokenStore
from bessemer.data.settings import DataSettings, data_root
from bessemer.data.sources.files import Documents, Files, Piece, Source, plan_shards
from bessemer.data.stores.catalog import find_source, store_directory
from bessemer.data.stores.prepare import documents_of, source_key
from bessemer.data.tokenize.chat import spoken
from bessemer.data.tokenize.documents import Bad, Document, read_piece, texts_of
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError
from bessemer.storage.checksums import json_digest
from bessemer.storage.files import exclusive


def tokenizer_for(
    settings: DataSettings | str, sources: Sequence[Sampling | str], root: str | Path | None = None
) -> Tokenizer:
    """Return the tokenizer of the setting data/tokenizer: a path; `train:N`, trained once on a bounded sample of the
    sources and kept; or `auto`, the one the stores among the sources were made with."""
    chosen = DataSettings(tokenizer=settings) if isinstance(settings, str) else settings
    samplings = [Sampling.from_string(s) if isinstance(s, str) else s for s in sources]
    if not chosen.tokenizer.startswith("train:"):
        return Tokenizer.load(tokenizer_place(chosen, samplings))
    found, vocab_size = _to_train_on(chosen, samplings)
    return _trained(found, vocab_size, data_root(root or chosen.root), chosen.text_key)


def tokenizer_on(items: Any, settings: DataSettings, root: str | Path | None = None) -> Tokenizer:
    """Return the tokenizer of the setting data/tokenizer for documents from Python: `train:N` is trained once on a
    bounded sample of them and kept; anything else is a path."""
    if not settings.tokenizer.startswith("train:"):
        return Tokenizer.load(Path(settings.tokenizer).expanduser())
    vocab_size = vocabulary_of(settings.tokenizer)
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        what = (
            "a prepared store holds tokens, not text"
            if isinstance(items, TokenStore | ArrayStore)
            else (f"a {type(items).__name__} can be read only once")
        )
        raise InputError(
            f"data.tokenizer={settings.tokenizer} cannot train on the data that was given: {what}. Give a list, or "
            "tokenizer=…."
        )
    return _trained([Documents(items)], vocab_size, data_root(root or settings.root), settings.text_key)


def tokenizer_place(settings: DataSettings, samplings: Sequence[Sampling], root: str | Path | None = None) -> Path:
    """Return where the tokenizer is, or will be once it is trained."""
    wanted = settings.tokenizer
    if wanted == "auto":
        return _store_with_tokenizer(samplings)
    if not wanted.startswith("train:"):
        return Path(wanted).expanduser()
    found, vocab_size = _to_train_on(settings, samplings)
    return _trained_place(found, vocab_size, data_root(root or settings.root), settings.text_key)


def _to_train_on(settings: DataSettings, samplings: Sequence[Sampling]) -> tuple[list[Source], int]:
    """Return the sources of a `train:N`, and N."""
    wanted = settings.tokenizer
    vocab_size = vocabulary_of(wanted)
    found = [find_source(s.name) for s in samplings if store_directory(s) is None]
    if not found:
        raise InputError(
            f"data.tokenizer={wanted} cannot train on prepared stores, which hold tokens, not text: use "
            f"data.tokenizer=auto."
        )
    return found, vocab_size


def vocabulary_of(wanted: str) -> int:
    """Return N of `train:N`."""
    try:
        return int(float(wanted.removeprefix("train:").replace("_", "")))
    except (ValueError, OverflowError):
        raise InputError(f"data.tokenizer={wanted}: expected train:N with a number of tokens, as train:8192.") from None


def _store_with_tokenizer(samplings: Sequence[Sampling]) -> Path:
    stores = [path for s in samplings if (path := store_directory(s)) is not None]
    if not stores:
        for sampling in samplings:
            find_source(sampling.name)  # a store that is gone is the cause, and its name is the message
        raise InputError(
            "data.tokenizer is not set and no dataset is a prepared store with one: set data.tokenizer=DIR, "
            "or data.tokenizer=train:8192 to train one on the data."
        )
    return stores[0]


def _trained_place(sources: Sequence[Source], vocab_size: int, root: Path, text_key: str | None) -> Path:
    key = json_digest(["bpe", 1, [source_key(source) for source in sources], vocab_size, SAMPLE_BYTES, text_key])
    return root / "tokenizers" / f"bpe-{vocab_size}-{key[:16]}"


def _trained(sources: Sequence[Source], vocab_size: int, root: Path, text_key: str | None) -> Tokenizer:
    texts = sample_texts(sources, text_key)
    folder = _trained_place(sources, vocab_size, root, text_key)
    if (folder / FILE).exists():
        return Tokenizer.load(folder)
    with exclusive(folder, "training the tokenizer", wait=True):
        if not (folder / FILE).exists():
            Tokenizer.train(texts, vocab_size).save(folder)
    return Tokenizer.load(folder)


# What a tokenizer is trained on: the texts of the sources, or an even sample of large ones.


SAMPLE_BYTES = 32 << 20  # text a tokenizer is trained on
SAMPLE_SHARD = 1 << 20  # a larger corpus is sampled in pieces of this size
MOST_SHARDS = 1 << 16  # a corpus of more is sampled at the beginnings of this many parts of it
MOST_READ = 512 << 20
"""Bytes of a source that are looked through for its share of the text: rows may have little text among much else, and a
file may be one endless line."""
MOST_UNPACKED = 128 << 20  # bytes of what one compressed file expands to


def sample_texts(sources: Sequence[Source], text_key: str | None = None, limit: int = SAMPLE_BYTES) -> Iterator[str]:
    """Texts of the sources, about `limit` bytes in all; of larger ones a sample of pieces spread over them.

    Files that cannot be read are skipped here, since preparing the data reports them; if none is left, it is an error.
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
            read for piece in _sampled(source) for read in read_piece(piece, text_key, most_unpacked=MOST_UNPACKED)
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
    """Return pieces of the files in a pseudorandom order, up to MOST_READ bytes in total."""
    size = sum(file.size for file in source.files)
    shards = plan_shards(source, max(SAMPLE_SHARD, -(-size // MOST_SHARDS)))
    read = 0
    for index in permute(range(len(shards)), len(shards), 0).tolist():
        for piece in shards[index]:
            if piece.kind in ("txt", "jsonl"):  # a larger one only in a corpus of more than MOST_SHARDS pieces
                piece = replace(piece, stop=min(piece.stop, piece.start + SAMPLE_SHARD))
            yield piece
            read += min(piece.size, piece.stop - piece.start) if piece.kind != "parquet" else piece.size
            if read >= MOST_READ:
                return
