"""`make_rows`: rows of a store, or of documents from Python, in one of the styles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.rows.packing import CroppedRows, PieceRows, Plan, crop, pack
from bessemer.data.rows.preference import PairRows
from bessemer.data.rows.rows import DatasetStyle, PmdRows, Rows, check_length, supervised
from bessemer.data.rows.store import ArrayStore, Store, TokenStore, kind_of
from bessemer.data.tokenize.documents import PAIRS, Bad, TurnRows, document_of
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.storage.checksums import file_digest
from bessemer.storage.files import atomic_directory

VERSION = 3  # of the plans; raised when packing changes, or what is kept of them
DIGESTS = "sha256.json"


def make_rows(
    data: Any,
    style: DatasetStyle = DatasetStyle.PMD,
    block_size: int = 512,
    *,
    tokenizer: Tokenizer | None = None,
    truncation: str = "keep_end",
    on_empty: str = "fail",
    allow_short: bool = False,
    text_key: str | None = None,
) -> Rows:
    """Rows of `data`: a store, or anything with `len` and `[i]` (texts, {"text"}, {"messages"}, {"input_ids",
    "loss_mask"}), which is encoded into memory with `tokenizer`.

    truncation: which end of a PADDED example too long for a row stays; on_empty: what to do with a PADDED or
    CONTRASTIVE example that has no trained token (fail, skip); allow_short: accept less data than one row (validation).
    """
    store = data if isinstance(data, (TokenStore, ArrayStore)) else store_of(data, tokenizer, text_key)
    if len(store.tokens) < 2:
        raise InputError(f"the data has {len(store.tokens)} tokens; rows need at least two.")
    check_kind(store, style)
    if style is DatasetStyle.CONTRASTIVE:
        return PairRows(store, block_size, on_empty)
    if style is not DatasetStyle.PADDED and not allow_short:
        check_length(store, block_size)
    if style is DatasetStyle.PADDED:
        return _padded(store, block_size, truncation, on_empty)
    if style is DatasetStyle.PACKED:
        return _packed(store, block_size)
    if style is DatasetStyle.CROPPED and len(store.tokens) > block_size:
        plan = _kept_plan(store, f"cropped-{block_size}", lambda: crop(store.offsets, block_size))
        return CroppedRows(store, block_size, plan)
    return PmdRows(store, block_size)


def check_kind(store: Store, style: DatasetStyle) -> None:
    """Raise InputError unless preference pairs, and only they, are used with CONTRASTIVE."""
    pairs = store.info.get("kind") == PAIRS
    if pairs and style is not DatasetStyle.CONTRASTIVE:
        raise InputError(
            f"the data holds preference pairs, which cannot be read as {style.name}: name their style, as in "
            "training.dataset=pairs.jsonl:CONTRASTIVE, and use an objective that compares answers (dpo, reward)."
        )
    if style is DatasetStyle.CONTRASTIVE and not pairs:
        raise InputError(
            "style CONTRASTIVE needs preference rows, each with 'chosen' and 'rejected' (docs/dpo.md shows their "
            "forms); this data has documents of another kind."
        )


def store_of(items: Any, tokenizer: Tokenizer | None, text_key: str | None = None) -> ArrayStore:
    """Return documents from Python as a store in memory. Texts get a bos token; ids are used as they are."""
    if tokenizer is None:
        raise InputError("documents given from Python need a tokenizer.")
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise InputError(
            f"a {type(items).__name__} has no length and no [i], so a run on it could not be resumed "
            f"exactly: write it to a store first with bessemer.data.stores.prepare(iterable, directory, tokenizer)."
        )
    arrays: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    masked, pairs, split = False, 0, TurnRows()
    for number in range(len(items)):
        read = document_of(items[number], f"example {number}", text_key, tokenizer)
        if isinstance(read, Bad):
            raise InputError(f"{read}.")
        pairs += read.pair is not None
        split.add(read)
        text = None if read.text is None else [tokenizer.bos_id, *tokenizer.encode(read.text)]
        for ids, mask in read.rows if text is None else [(text, None)]:
            arrays.append(np.array(ids, np.int64))
            if len(ids) and not 0 <= arrays[-1].min() <= arrays[-1].max() < tokenizer.vocab_size:
                raise InputError(f"example {number} has ids outside the tokenizer's {tokenizer.vocab_size} tokens.")
            masked = masked or mask is not None
            masks.append(np.ones(len(ids), np.uint8) if mask is None else np.array(mask, np.uint8))
    info = {"vocab_size": tokenizer.vocab_size, "pad_id": tokenizer.pad_id, "tokenizer": tokenizer.hash}
    info["kind"] = kind_of(pairs, len(arrays))
    if split.conversations:
        info["turn_rows"] = asdict(split)
    return ArrayStore.of(arrays, masks if masked else None, info)


def _packed(store: Store, block_size: int) -> Rows:
    """Pack pieces by best fit. Supervised pieces without a trained token are dropped: a row of them has no loss."""
    plan = _kept_plan(store, f"packed-{block_size}", lambda: pack(store.offsets, block_size, store.mask))
    if store.mask is None:
        return PieceRows(store, block_size, plan, "PACKED", {})
    if not len(plan):
        raise InputError("no token of the data is trained on: all of its mask is 0.")
    left_out = int(np.maximum(np.diff(store.offsets) - 1, 0).sum()) - int(plan.lengths.sum(dtype=np.int64))
    split = int(np.count_nonzero(np.diff(store.offsets) - 1 > block_size))
    stats = {"untrained_tokens": left_out, "split_documents": split}
    return PieceRows(store, block_size, plan, "PACKED", stats)


def _padded(store: Store, block_size: int, truncation: str, on_empty: str) -> Rows:
    """Put one document in each row, truncated to its last (keep_end) or first (keep_start) block_size + 1 tokens."""
    if truncation not in ("keep_end", "keep_start"):
        raise InputError(f"truncation is '{truncation}'; it must be keep_end or keep_start.")
    pairs = np.diff(store.offsets) - 1
    lengths = np.minimum(pairs, block_size)
    starts = store.offsets[:-1] + (pairs - lengths if truncation == "keep_end" else 0)
    keep = pairs > 0
    if store.mask is not None:
        keep &= supervised(store.mask, starts + 1, np.maximum(lengths, 0)) > 0
    lost = np.flatnonzero(~keep)
    if len(lost) and on_empty == "fail":
        raise InputError(
            f"{len(lost)} examples have nothing to train on in {block_size} tokens ({truncation}); the first "
            f"is number {lost[0]}. Use a larger architecture.block_size or the other data.truncation, or "
            f"data.on_empty=skip."
        )
    if not keep.any():
        raise InputError(f"no example has anything to train on in {block_size} tokens ({truncation}).")
    cut = (pairs - lengths)[keep]
    plan = Plan(starts[keep].astype(np.int64), lengths[keep].astype(np.int32), np.arange(keep.sum() + 1))
    stats = {"truncated": int(np.count_nonzero(cut)), "truncated_tokens": int(cut.sum()), "without_targets": len(lost)}
    return PieceRows(store, block_size, plan, f"PADDED {truncation}", stats)


def _kept_plan(store: Store, name: str, build: Callable[[], Plan]) -> Plan:
    """Return the plan saved beside the store, or build it: each time if the store is in memory or read-only."""
    if store.path is None:
        return build()
    folder = store.path / ".plans" / f"{name}-v{VERSION}-{store.fingerprint[:16]}"
    fields = ("starts", "lengths", "first")
    if folder.is_dir() and not _is_whole(folder, fields):
        shutil.rmtree(folder, ignore_errors=True)  # a cache: what is damaged is built again
    if not folder.is_dir():
        plan = build()
        if not _keep(folder, {field: getattr(plan, field) for field in fields}):
            return plan
    return Plan(*(np.load(folder / f"{field}.npy", mmap_mode="r").view(np.ndarray) for field in fields))


def _is_whole(folder: Path, fields: Sequence[str]) -> bool:
    """Return whether the files of a plan are those that were written."""
    try:
        written = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        return written == {field: file_digest(folder / f"{field}.npy") for field in fields}
    except (OSError, ValueError):
        return False


def _keep(folder: Path, arrays: dict[str, np.ndarray]) -> bool:
    """Write a plan; return whether it is there. On a disk that cannot be written it stays in memory."""
    try:
        with atomic_directory(folder, exist_ok=True) as temporary:
            for name, values in arrays.items():
                np.save(temporary / f"{name}.npy", values)
            digests = {name: file_digest(temporary / f"{name}.npy") for name in arrays}
            (temporary / DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
    except OSError:
        return folder.is_dir()
    return True
