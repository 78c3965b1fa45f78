"""`make_rows`: rows of a store, or of documents from Python, in one of the styles.

PACKED places pieces of documents by best fit, CROPPED by nanochat's best fit with cropping.

CONTRASTIVE rows hold several whole preference pairs, chosen and rejected side by side, each its own segment. Pairs are
placed by best fit, like the documents of PACKED, so nothing is padded to the longest. A sequence of n tokens takes n
positions: its last token is an input without a target, from which a reward can be read. Pair p of a row has segments
2p + 1 (chosen) and 2p + 2 (rejected); a pair is never in two rows, so never in two micro-batches. In addition to the
usual fields (rows.py), where only the tokens of an answer are targets:

| field | shape | meaning |
|---|---|---|
| pair_ids | (n, P) int32 | number of pair p in the store, −1 = the row has fewer; P = block_size // 8 |
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bessemer.data.rows.rows import (
    ArrayStore,
    Batch,
    DatasetStyle,
    Fields,
    PmdRows,
    Rows,
    Store,
    TokenStore,
    base_stats,
    check_length,
    fingerprint_of,
    finish,
    kind_of,
    padding,
    ragged,
    supervised,
    text_fields,
)
from bessemer.data.tokenize.documents import ANSWER, BEGINS, PAIRS, Bad, TurnRows, document_of
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.storage.checksums import file_digest
from bessemer.storage.files import atomic_directory

# --- pieces of documents that share a row ---


BUFFER = 1000  # documents CROPPED chooses among


@dataclass(frozen=True)
class Plan:
    """The pieces of row i are first[i] … first[i + 1] − 1."""

    starts: np.ndarray  # (pieces,) int64, in the token stream
    lengths: np.ndarray  # (pieces,) int32
    first: np.ndarray  # (rows + 1,) int64

    def __len__(self) -> int:
        return len(self.first) - 1


def pack(offsets: np.ndarray, block_size: int, mask: np.ndarray | None = None) -> Plan:
    """Best fit: each row takes the longest piece that fits, then the longest that fits what is left, and so on.

    A document of L tokens is L − 1 (input, target) pairs. More than a row of them is split into full rows and a rest.
    With a mask, pieces without a trained token are left out.
    """
    pairs = np.maximum(np.diff(offsets) - 1, 0)
    full, rest = np.divmod(pairs, block_size)
    owner = np.repeat(np.arange(len(pairs)), full)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    whole_starts = offsets[owner] + number * block_size
    documents = np.flatnonzero(rest)
    rest_starts, rests = (offsets[:-1] + full * block_size)[documents], rest[documents]
    if mask is not None:
        whole_starts = whole_starts[supervised(mask, whole_starts + 1, np.full(len(owner), block_size)) > 0]
        trained = supervised(mask, rest_starts + 1, rests) > 0
        rest_starts, rests = rest_starts[trained], rests[trained]
    order, widths = best_fit(rests, block_size)
    wholes = len(whole_starts)
    starts = np.concatenate([whole_starts, rest_starts[order]]).astype(np.int64)
    lengths = np.concatenate([np.full(wholes, block_size), rests[order]]).astype(np.int32)
    first = np.cumsum(np.concatenate([[0], np.ones(wholes, np.int64), widths]), dtype=np.int64)
    return Plan(starts, lengths, first)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces in the order of their rows, and how many each row has. All sizes are in [1, capacity].

    A filling is repeated while all its sizes last, so the work grows with the number of different sizes.
    """
    by_size = np.argsort(sizes, kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1).tolist()
    cursor = (np.cumsum(counts) - counts).tolist()  # next unused piece of each size, in by_size
    available = [size for size in range(1, capacity + 1) if counts[size]]
    orders: list[np.ndarray] = [np.empty(0, np.int64)]
    widths: list[np.ndarray] = [np.empty(0, np.int64)]
    while available:
        filling = _filling(available, counts, capacity)
        repeats = min(counts[size] // times for size, times in filling)
        columns = []
        for size, times in filling:
            taken = by_size[cursor[size] : cursor[size] + repeats * times]
            columns.append(taken.reshape(repeats, times))
            cursor[size] += repeats * times
            counts[size] -= repeats * times
            if not counts[size]:
                available.remove(size)
        block = np.concatenate(columns, axis=1)
        orders.append(block.ravel())
        widths.append(np.full(repeats, block.shape[1]))
    return np.concatenate(orders), np.concatenate(widths)


def _filling(available: list[int], counts: list[int], capacity: int) -> list[tuple[int, int]]:
    """(size, times) of one row: always the largest size that still fits."""
    filling = []
    left, limit = capacity, capacity
    while limit > 0:
        place = bisect_right(available, min(left, limit)) - 1
        if place < 0:
            break
        size = available[place]
        times = min(counts[size], left // size)
        filling.append((size, times))
        left -= times * size
        limit = size - 1
    return filling


def crop(offsets: np.ndarray, block_size: int, buffer: int = BUFFER) -> Plan:
    """nanochat's rule: fill rows of block_size + 1 tokens from a buffer of documents with the longest that fits; where
    none does, with the shortest, cropped to fill the row. The rest of a cropped document is dropped."""
    capacity = block_size + 1
    lengths = np.diff(offsets).tolist()
    held: list[tuple[int, int]] = []  # (length, −document), sorted: of equals, the oldest counts as the longest
    upcoming = 0
    chosen: list[int] = []
    taken: list[int] = []
    first = [0]
    left = capacity
    while True:
        while len(held) < buffer and upcoming < len(lengths):
            if lengths[upcoming]:
                insort(held, (lengths[upcoming], -upcoming))
            upcoming += 1
        if not held:
            break
        place = bisect_right(held, (left, 1)) - 1
        length, document = held.pop(max(place, 0))
        chosen.append(-document)
        taken.append(min(length, left))
        left -= taken[-1]
        if not left:
            first.append(len(chosen))
            left = capacity
    used = first[-1]  # a last row that could not be filled is dropped with the other overhangs
    starts = np.asarray(offsets)[np.array(chosen[:used], np.int64)]
    return Plan(starts.astype(np.int64), np.array(taken[:used], np.int32), np.array(first, np.int64))


# Rows made of pieces of documents


class PieceRows:
    """PACKED and PADDED rows. A piece of n pairs at `start` has inputs start … start+n−1 and targets start+1 … start+n.

    The last token of a piece is a target only: it overlaps by one token with the piece after it.
    """

    def __init__(self, store: Store, block_size: int, plan: Plan, name: str, stats: dict[str, Any]) -> None:
        self.store, self.block_size, self.plan = store, block_size, plan
        self.fields = text_fields(block_size)
        self.tokens, self.mask = store.tokens, store.mask
        self.fingerprint = fingerprint_of(store, name, block_size)
        used = int(plan.lengths.sum(dtype=np.int64))
        counts = base_stats(store, len(plan), self._target_tokens())
        self.stats = {**counts, **padding(len(plan) * block_size, used), **stats}

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def pieces(self) -> np.ndarray:
        """Return the number of pieces in each row."""
        return np.diff(self.plan.first)

    def get(self, indices: np.ndarray) -> Batch:
        self.store.require(*extent(self.plan, indices))
        shape = (len(indices), self.block_size)
        used, source, segment, position = spread(self.plan, indices)
        target_ids = lay_out(self._targets(source, position), used, shape, -1)
        return {
            "input_ids": lay_out(self.tokens[source].astype(np.int32), used, shape, self.store.info["pad_id"]),
            "target_ids": target_ids,
            "positions": lay_out(position.astype(np.int32), used, shape, 0),
            "segment_ids": lay_out(segment, used, shape, 0),
            "loss_mask": (target_ids >= 0).astype(np.float32),
        }

    def _targets(self, source: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the target of each token at place `source` of the store, −1 for none: int32."""
        targets = self.tokens[source + 1].astype(np.int32)
        if self.mask is not None:
            targets[self.mask[source + 1] == 0] = -1
        return targets

    def _target_tokens(self) -> int:
        if self.mask is None:
            return int(self.plan.lengths.sum(dtype=np.int64))
        return int(supervised(self.mask, self.plan.starts + 1, self.plan.lengths).sum())


class CroppedRows(PieceRows):
    """Full rows of block_size + 1 tokens. As in nanochat, the bos of the next document is a target too."""

    def __init__(self, store: Store, block_size: int, plan: Plan) -> None:
        total, kept = len(store.tokens), int(plan.lengths.sum(dtype=np.int64))
        stats = {"padding_share": 0.0, "cropped_share": 1 - kept / total, "cropped_tokens": total - kept}
        super().__init__(store, block_size, plan, "CROPPED", stats)

    def get(self, indices: np.ndarray) -> Batch:
        self.store.require(*extent(self.plan, indices))
        shape = (len(indices), self.block_size + 1)
        _, source, segment, _ = spread(self.plan, indices)
        trained = None if self.mask is None else self.mask[source].reshape(shape)[:, 1:] > 0
        full = np.full(len(indices), self.block_size)
        segments = segment.reshape(shape)[:, :-1].copy()
        return finish(self.tokens[source].reshape(shape), full, segments, trained, self.store.info["pad_id"])

    def _target_tokens(self) -> int:
        plan = self.plan
        if self.mask is None:
            return len(plan) * self.block_size
        later = np.ones(len(plan.starts), bool)  # pieces that are not the first of their row: all tokens are targets
        later[plan.first[:-1]] = False
        inside = supervised(self.mask, plan.starts + 1, plan.lengths - 1).sum()
        return int(inside + self.mask[plan.starts[later]].sum(dtype=np.int64))


def _pieces(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for every piece of the rows its row, its number in the row and its number in the plan."""
    first = plan.first[np.asarray(indices, np.int64)]
    row, number = ragged(plan.first[np.asarray(indices, np.int64) + 1] - first)
    return row, number, first[row] + number


def extent(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each piece of the rows begins in the store, and where it ends with the token after its last."""
    piece = _pieces(plan, indices)[2]
    return plan.starts[piece], plan.starts[piece] + plan.lengths[piece] + 1


def spread(plan: Plan, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (n,) tokens in each row; and for every token of the rows, in order, its place in the store, its segment,
    and its position in the piece."""
    row, number, piece = _pieces(plan, indices)
    lengths = plan.lengths[piece].astype(np.int64)
    before = np.cumsum(lengths) - lengths  # tokens of all pieces before, over the batch
    used = np.bincount(row, weights=lengths, minlength=len(indices)).astype(np.int64)
    position = np.arange(int(used.sum())) - np.repeat(before, lengths)
    source = np.repeat(plan.starts[piece], lengths) + position
    return used, source, np.repeat((number + 1).astype(np.int32), lengths), position


def lay_out(values: np.ndarray, used: np.ndarray, shape: tuple[int, int], fill: int) -> np.ndarray:
    """Return the values of consecutive rows as (n, T), each row filled from the left."""
    if len(values) == shape[0] * shape[1]:
        return values.reshape(shape)
    out = np.full(shape, fill, values.dtype)
    out[np.arange(shape[1]) < used[:, None]] = values
    return out


# --- preference pairs ---


SMALLEST = 8
"""Positions a pair counts as at least: it bounds the pairs of a row by the block size alone, whatever the data."""


def most_pairs(block_size: int) -> int:
    """Return P, the slots for pairs in a row."""
    return max(1, block_size // SMALLEST)


def pair_fields(block_size: int) -> Fields:
    """Return the fields that rows of pairs have beside those of text."""
    return {"pair_ids": ((most_pairs(block_size),), np.dtype(np.int32))}


class Sides(NamedTuple):
    """Positions of each pair's sequences in the store, (pairs, 2) each: chosen, rejected."""

    starts: np.ndarray
    lengths: np.ndarray
    answers: np.ndarray  # tokens before the first one of the answer; the whole length where there is none


def sides_of(store: Store) -> Sides:
    assert store.mask is not None, "a store of pairs has a mask"
    begins = np.flatnonzero(store.mask & BEGINS)
    ends = np.asarray(store.offsets[1:])
    starts = np.stack([store.offsets[:-1], begins], 1)
    stops = np.stack([begins, ends], 1)
    marked = np.append(np.flatnonzero(store.mask & ANSWER), len(store.mask))
    first = marked[np.searchsorted(marked, starts)]
    return Sides(starts, stops - starts, np.minimum(first, stops) - starts)


class PairRows(PieceRows):
    """Rows of whole pairs. A pair too long for a row loses the beginning of its prompt, as many tokens on both sides
    (counted); one whose answers do not fit, or are empty, is refused or, with on_empty=skip, left out (counted)."""

    mask: np.ndarray

    def __init__(self, store: Store, block_size: int, on_empty: str = "fail") -> None:
        sides = sides_of(store)
        self.pairs = len(sides.starts)
        cut = np.maximum(-((block_size - sides.lengths.sum(1)) // 2), 0)  # ceil(excess / 2)
        fits = (cut < np.maximum(sides.answers.min(1), 1)) & (sides.answers < sides.lengths).all(1)
        kept = np.flatnonzero(fits)
        _check_lost(np.flatnonzero(~fits), self.pairs, block_size, on_empty)
        starts, lengths = (sides.starts + cut[:, None])[kept], (sides.lengths - cut[:, None])[kept]
        order, widths = best_fit(np.minimum(np.maximum(lengths.sum(1), SMALLEST), max(block_size, 1)), block_size)
        first = np.cumsum(np.concatenate([[0], widths]))
        plan = Plan(starts[order].ravel(), lengths[order].ravel().astype(np.int32), 2 * first)
        self.numbers = kept[order].astype(np.int32)  # of the pairs, in the order of their rows
        stats = {
            "pairs": len(kept),
            "truncated": int(np.count_nonzero(cut[kept])),
            "truncated_tokens": int(2 * cut[kept].sum()),
            "without_targets": self.pairs - len(kept),
        }
        super().__init__(store, block_size, plan, "CONTRASTIVE", stats)
        self.fields |= pair_fields(block_size)

    def get(self, indices: np.ndarray) -> Batch:
        indices = np.asarray(indices, np.int64)
        return super().get(indices) | {"pair_ids": self._numbers(indices)}

    def _targets(self, source: np.ndarray, position: np.ndarray) -> np.ndarray:
        last = np.append(position[1:] == 0, True)  # of its sequence
        following = np.minimum(source + 1, len(self.tokens) - 1)
        targets = self.tokens[following].astype(np.int32)
        targets[last | (self.mask[following] & ANSWER == 0)] = -1
        return targets

    def _target_tokens(self) -> int:
        count = np.append(0, np.cumsum(self.mask & ANSWER, dtype=np.int64))
        return int((count[self.plan.starts + self.plan.lengths] - count[self.plan.starts]).sum())

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        first, end = self.plan.first[indices] // 2, self.plan.first[indices + 1] // 2
        row, place = ragged(end - first)
        out = np.full((len(indices), most_pairs(self.block_size)), -1, np.int32)
        out[row, place] = self.numbers[first[row] + place]
        return out


def _check_lost(lost: np.ndarray, pairs: int, block_size: int, on_empty: str) -> None:
    if len(lost) == pairs:
        raise InputError(f"none of the {pairs} pairs fits into a row of {block_size} tokens: use a larger block size.")
    if len(lost) and on_empty == "fail":
        raise InputError(
            f"{len(lost)} of {pairs} pairs have an empty answer, or answers that do not fit into {block_size} tokens "
            f"even without the beginning of their prompt; the first is number {lost[0]}. Use a larger "
            "architecture.block_size, or data.on_empty=skip to leave them out (counted)."
        )


# --- rows by style ---


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
