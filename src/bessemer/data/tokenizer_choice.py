"""The tokenizer that the setting data/tokenizer means: one on disk, that of a store, or one trained on the data."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.data.catalog import find_source, store_directory
from bessemer.data.lock import exclusive
from bessemer.data.mixture import Sampling
from bessemer.data.prepare import source_key
from bessemer.data.progress import Callback
from bessemer.data.settings import DataSettings, data_root
from bessemer.data.sources import Documents, Source
from bessemer.data.store import ArrayStore, TokenStore
from bessemer.data.texts import SAMPLE_BYTES, sample_texts
from bessemer.data.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError, StorageError


def tokenizer_for(
    settings: DataSettings | str,
    sources: Sequence[Sampling | str],
    root: str | Path | None = None,
    *,
    progress: Callback | None = None,
) -> Tokenizer:
    """The tokenizer of the setting data/tokenizer: a path; `train:N`, trained once on (a bounded sample of)
    the sources and kept; or `auto`, the one the stores among the sources were made with."""
    chosen = DataSettings(tokenizer=settings) if isinstance(settings, str) else settings
    samplings = [Sampling.from_string(s) if isinstance(s, str) else s for s in sources]
    if not chosen.tokenizer.startswith("train:"):
        return Tokenizer.load(tokenizer_place(chosen, samplings))
    found, vocab_size = _to_train_on(chosen, samplings)
    return _trained(found, vocab_size, data_root(root or chosen.root), chosen.text_key)


def tokenizer_on(items: Any, settings: DataSettings, root: str | Path | None = None) -> Tokenizer:
    """The tokenizer of the setting data/tokenizer for documents given from Python: `train:N` is trained on (a bounded
    sample of) them, once, and kept; anything else is a path."""
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


def tokenizer_place(
    settings: DataSettings, samplings: Sequence[Sampling], root: str | Path | None = None
) -> Path:
    """Where the tokenizer of the setting is, or will be once it is trained."""
    wanted = settings.tokenizer
    if wanted == "auto":
        return _store_with_tokenizer(samplings)
    if not wanted.startswith("train:"):
        return Path(wanted).expanduser()
    found, vocab_size = _to_train_on(settings, samplings)
    return _trained_place(found, vocab_size, data_root(root or settings.root), settings.text_key)


def _to_train_on(settings: DataSettings, samplings: Sequence[Sampling]) -> tuple[list[Source], int]:
    """The sources of a `train:N`, and N."""
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
    """N of `train:N`."""
    try:
        return int(float(wanted.removeprefix("train:").replace("_", "")))
    except (ValueError, OverflowError):
        raise InputError(
            f"data.tokenizer={wanted}: expected train:N with a number of tokens, as train:8192."
        ) from None


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
    facts = json.dumps(
        ["bpe", 1, [source_key(source) for source in sources], vocab_size, SAMPLE_BYTES, text_key]
    )
    return root / "tokenizers" / f"bpe-{vocab_size}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _trained(sources: Sequence[Source], vocab_size: int, root: Path, text_key: str | None) -> Tokenizer:
    texts = sample_texts(sources, text_key)
    folder = _trained_place(sources, vocab_size, root, text_key)
    if (folder / FILE).exists():
        return Tokenizer.load(folder)
    with exclusive(folder, "training the tokenizer", wait=True):
        if not (folder / FILE).exists():
            made = Tokenizer.train(texts, vocab_size)
            temporary = folder / f"{os.getpid()}.tmp"
            try:
                made.save(temporary)
                os.replace(temporary / FILE, folder / FILE)
            except OSError as error:
                raise StorageError(f"cannot write the tokenizer to '{folder}': {error.strerror}.") from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return Tokenizer.load(folder)
