"""The data.* settings, and what they name: the rows of a `Sampling`, and the tokenizer of data.tokenizer.

A `Sampling` names a registered dataset, a store directory, a hub dataset, a file or a glob. What is not a store yet is
prepared once under the data root and found again by a key of its sources (paths, sizes, times), the tokenizer and the
settings, so a stale store is never used. The tokenizer is found on disk or in a store, or trained on the data.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.config import field
from bessemer.data.plan.batches import permute
from bessemer.data.plan.mixture import FADES, Sampling
from bessemer.data.rows.build import make_rows
from bessemer.data.rows.rows import ArrayStore, DatasetStyle, Rows, TokenStore, is_store
from bessemer.data.sources.datasets import own_held_out
from bessemer.data.sources.files import Documents, Files, Piece, Source, Stream, find_files, plan_shards
from bessemer.data.sources.hub import hub_files, is_hub_dataset
from bessemer.data.stores.prepare import Options, as_source, content_key, documents_of, prepare, source_key
from bessemer.data.stores.shards import Callback
from bessemer.data.tokenize.chat import spoken
from bessemer.data.tokenize.documents import Bad, Document, read_piece, texts_of
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError
from bessemer.registry import datasets
from bessemer.storage.checksums import json_digest
from bessemer.storage.files import commit_directory, exclusive, home
from bessemer.storage.remote import is_remote, refuse_remote

# --- settings ---


@dataclass
class DataSettings:
    """data/*: where data lives and how it is made into batches."""

    root: str | None = field(
        "data/root", default=None, help="directory of the stores; default BESSEMER_HOME or the user cache"
    )
    tokenizer: str = field(
        "data/tokenizer",
        default="auto",
        help="a directory or tokenizer.json; train:N trains one on the data; auto = the store's own",
    )
    val_fraction: float = field(
        "data/val_fraction",
        default=0.01,
        minimum=0.0,
        maximum=0.5,
        help="share of documents set apart for validation when a file or registered dataset is prepared",
    )
    text_key: str | None = field("data/text_key", default=None, help="column with the text; default text")
    on_error: str = field(
        "data/on_error",
        default="fail",
        choices=("fail", "skip"),
        help="a line that cannot be read: fail, or skip and count",
    )
    dedup: bool = field("data/dedup", default=False, help="drop exact duplicate documents (counted)")
    workers: int = field("data/workers", default=1, minimum=1, help="processes that prepare data")
    prefetch: int = field("data/prefetch", default=2, minimum=0, help="batches prepared ahead; 0 = none")
    truncation: str = field(
        "data/truncation",
        default="keep_end",
        choices=("keep_end", "keep_start"),
        help="which end of an overlong PADDED example to keep",
    )
    on_empty: str = field(
        "data/on_empty",
        default="fail",
        choices=("fail", "skip"),
        help="a PADDED or CONTRASTIVE example without a trained token in a row: fail, or skip and count",
    )
    crossfade: str = field(
        "data/crossfade", default="none", choices=FADES, help="how the mixture of one stage changes into the next"
    )
    crossfade_share: float = field(
        "data/crossfade_share",
        default=0.1,
        minimum=0.0,
        maximum=1.0,
        help="width of a cross-fade, as a share of the shorter neighboring stage",
    )


def data_root(root: str | Path | None = None) -> Path:
    """Return where prepared stores and trained tokenizers are kept."""
    refuse_remote(
        root, "stores are mapped into memory, so data.root must be local", "texts may come from s3:// or gs://"
    )
    return Path(root).expanduser() if root else home()


# Paths in settings. When a run starts, relative paths become full paths in config.yaml. If a saved path is gone because
# the whole folder was moved, its longest tail below the current directory is used.


Find = Callable[[str], str]


def full_path(name: str) -> str:
    """Return the full path of a local file; anything else (s3://…, ~/x, a registered name) as it is."""
    if Path(name).is_absolute() or not is_there(name):
        return name
    here = str(Path.cwd())
    if Path(name).exists():
        return str(Path(here, name))
    return name if ":" in here else str(Path(glob.escape(here), name))  # a colon means code: module:attribute


def found_again(name: str) -> str:
    """Return a full path that is gone, as the longest tail of it that is below the current directory; else as it is."""
    parts = Path(name).parts
    if not Path(name).is_absolute() or is_there(name):
        return name
    tails = (str(Path(*parts[start:])) for start in range(1, len(parts)))
    return full_path(next(filter(is_there, tails), name))


def is_there(name: str) -> bool:
    """Return whether a file, a directory, or at least one match of a pattern exists."""
    if not name.strip():
        return False
    return Path(name).exists() or (glob.has_magic(name) and any(glob.iglob(name, recursive=True)))


def relocated(sampling: Sampling, find: Find) -> Sampling:
    """Return the sampling with its name resolved by `find`. A registered name stays, unless a store has that name."""
    whole = sampling.name + sampling.suffix
    if sampling.name in datasets and not is_store(Path(whole)):
        return sampling
    found = find(whole)
    if found == whole:
        return sampling
    return dataclasses.replace(sampling, name=found.removesuffix(sampling.suffix))


def relocated_root(root: str, find: Find) -> str:
    """data.root as `find` finds it: a full path even of what is not there, as it is made then; an address is refused
    elsewhere. A directory that holds no stores is another one."""
    if is_remote(root):
        return root
    whole = str(Path(root).expanduser().absolute())
    found = find(whole)
    return found if (Path(found) / "stores").is_dir() else whole


# --- rows ---


def open_dataset(
    sampling: Sampling,
    tokenizer: Tokenizer,
    root: str | Path | None = None,
    split: str = "train",
    block_size: int = 512,
    *,
    settings: DataSettings | None = None,
    progress: Callback | None = None,
) -> Rows:
    """Return the rows of one split of the dataset a sampling names; prepare it first if needed."""
    chosen = settings or DataSettings()
    path = open_store(sampling, tokenizer, root, settings=chosen, progress=progress)
    store = TokenStore(path, split)
    if store.info["tokenizer"] != tokenizer.hash:
        raise InputError(
            f"store '{path}' was made with tokenizer {store.info['tokenizer'][:12]}, but the run uses "
            f"{tokenizer.hash[:12]} ({tokenizer.origin}): set data.tokenizer={path}, or prepare the store again."
        )
    return make_rows(
        store,
        sampling.row_style,
        block_size,
        truncation=chosen.truncation,
        on_empty=chosen.on_empty,
        allow_short=split != "train",
    )


def open_store(
    sampling: Sampling,
    tokenizer: Tokenizer,
    root: str | Path | None = None,
    *,
    settings: DataSettings | None = None,
    progress: Callback | None = None,
) -> Path:
    """Return the store directory of a sampling; prepare it if it is not there yet."""
    chosen = settings or DataSettings()
    existing = store_directory(sampling)
    if existing is not None:
        return existing
    source = find_source(sampling.name)
    held_out = held_out_source(sampling.name)
    out = store_place(sampling, source, tokenizer, root, settings=chosen)
    if not is_store(out):
        prepare(
            source,
            out,
            tokenizer,
            val=held_out,
            val_fraction=chosen.val_fraction if held_out is None else 0.0,
            on_error=chosen.on_error,
            workers=chosen.workers,
            text_key=chosen.text_key,
            dedup=chosen.dedup,
            progress=progress,
            wait=True,
        )
    return out


def store_place(
    sampling: Sampling, source: Source, tokenizer: Tokenizer, root: str | Path | None = None, *, settings: DataSettings
) -> Path:
    """Return where the store of a source is, or will be once it is prepared."""
    held_out = held_out_source(sampling.name)
    groups = {"train": source} if held_out is None else {"train": source, "val": held_out}
    share = settings.val_fraction if held_out is None else 0.0
    key = content_key(groups, tokenizer, Options(share, settings.on_error, settings.text_key, settings.dedup))
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(sampling.name).name).strip("-") or "data"
    return data_root(root or settings.root) / "stores" / f"{label[:60]}-{key[:16]}"


def rows_of(
    data: Any,
    tokenizer: Tokenizer,
    style: DatasetStyle,
    block_size: int,
    root: str | Path | None = None,
    *,
    settings: DataSettings | None = None,
    allow_short: bool = False,
) -> Rows:
    """Return the rows of documents from Python. Those without `len` and `[i]` are first written to a store under the
    data root, since only random access can be resumed exactly."""
    chosen = settings or DataSettings()
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not indexed and not isinstance(data, (TokenStore, ArrayStore)):
        data = TokenStore(_written(data, tokenizer, data_root(root or chosen.root) / "stores", chosen))
    return make_rows(
        data,
        style,
        block_size,
        tokenizer=tokenizer,
        truncation=chosen.truncation,
        on_empty=chosen.on_empty,
        allow_short=allow_short,
        text_key=chosen.text_key,
    )


def _written(data: Any, tokenizer: Tokenizer, stores: Path, settings: DataSettings) -> Path:
    """A store of a stream, named by what came out of it."""
    temporary = stores / f".stream-{os.getpid()}-{id(data)}"
    info = prepare(data, temporary, tokenizer, on_error=settings.on_error, text_key=settings.text_key)
    final = stores / f"stream-{info.splits['train']['sha256'][:16]}"
    commit_directory(temporary, final, exist_ok=True)
    return final


def store_directory(sampling: Sampling) -> Path | None:
    """The directory, when the name (with its suffix) is a store on disk. Only stores have variants: a suffix that
    leads to none is an error, since the data without it is other data."""
    path = Path(sampling.name + sampling.suffix).expanduser()
    if is_store(path):
        return path
    if sampling.suffix:
        raise InputError(
            f"dataset '{sampling.name}' with suffix '{sampling.suffix}': there is no prepared store at '{path}'. "
            f"Prepare it with `bessemer data prepare … -o {path}`, or leave the suffix out."
        )
    return None


def find_source(name: str) -> Source:
    """Return the source of a registered dataset, a hub dataset or files; else raise InputError with known names."""
    if is_hub_dataset(name):
        return hub_files(name)
    if name in datasets or is_code(name):
        source = as_source(datasets.get(name)())
        return Stream(source.items, f"registered {name}", name) if isinstance(source, Stream) else source
    try:
        return find_files(name)
    except InputError as error:
        if re.fullmatch(r"[\w-]+", name):
            raise InputError(f"{error} Registered datasets: {', '.join(datasets.names())}.") from error
        raise


def is_code(name: str) -> bool:
    """Whether a dataset's name is `module:function` or `file.py:function`, not a registered name, a file or an URL."""
    if is_hub_dataset(name):
        return False
    return ":" in name and name not in datasets and not Path(name).exists() and not is_remote(name)


def held_out_source(name: str) -> Source | None:
    """Return the held-out part that a registered dataset brings as a source; None if it has none."""
    held_out = own_held_out(name)
    return None if held_out is None else as_source(held_out)


# --- the tokenizer ---


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
