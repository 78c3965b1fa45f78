"""From the name in a `Sampling` to its rows: registered dataset, store directory, hub dataset, file or glob.

What is not a store yet is prepared once under the data root and found again by a key of its sources (paths, sizes,
times), the tokenizer and the settings, so a stale store is never used.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from bessemer.data.plan.mixture import Sampling
from bessemer.data.rows.build import make_rows
from bessemer.data.rows.rows import DatasetStyle, Rows
from bessemer.data.rows.store import ArrayStore, TokenStore, is_store
from bessemer.data.settings import DataSettings, data_root
from bessemer.data.sources.datasets import own_held_out
from bessemer.data.sources.files import Source, Stream, find_files
from bessemer.data.sources.hub import hub_files, is_hub_dataset
from bessemer.data.stores.prepare import Options, as_source, content_key, prepare
from bessemer.data.stores.shards import Callback
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.registry import datasets
from bessemer.storage.files import commit_directory
from bessemer.storage.remote import is_remote


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
