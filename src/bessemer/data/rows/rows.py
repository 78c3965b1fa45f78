"""The token store, and rows: fixed-size training examples made of a store, addressed by number.

A store holds documents as one long array of ids, memory-mapped, with the offset of each document:

    DIR/store.json            what it was made from; written last, so its presence is the commit
    DIR/tokenizer.json        the tokenizer, so that a store can be used on its own
    DIR/train/tokens.bin      ids, uint16 when the vocabulary fits, else uint32; each document begins with bos
    DIR/train/docs.idx        int64 offsets, documents + 1 of them
    DIR/train/mask.bin        uint8 per token, only for supervised data: 1 = this token is trained on
    DIR/train/sums.bin        checksums of the chunks of the files above (checksums.py)
    DIR/train/store.json      counts, kind, sha256 of the first three
    DIR/val/…                 the same, when there is a validation split

Nothing is trained on unverified: offsets and mask are verified whole when the store is opened, the tokens in a sample,
and each chunk of them before its first use (`Store.require`).

A row has `block_size` positions with an input and a target each: the target of a token is the next one, −1 where there
is no loss. PMD cuts the whole stream into windows of block_size + 1 tokens that overlap by one, so every token but the
very first is a target exactly once per epoch; the last row is padded.

| field | shape (n, T) | meaning |
|---|---|---|
| input_ids | int32 | tokens; the pad token after the end |
| target_ids | int32 | next token, −1 = no loss |
| positions | int32 | in the row (PMD, CROPPED); in the document piece (PACKED, PADDED) |
| segment_ids | int32 | 1, 2, … for each document piece in the row; 0 = padding |
| loss_mask | float32 | 1 where the target counts |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from bessemer.config.bounded import read_json
from bessemer.data.tokenize.documents import ANSWER, BEGINS, PAIRS
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError, StorageError
from bessemer.storage.checksums import VerifiedFile, json_digest, load_sums
from bessemer.storage.files import atomic_file

# --- the token store ---


FORMAT = 1
CHECK = "check"  # the key of a store.json's checksum over all others
SPLITS = ("train", "val")


class Store(Protocol):
    """Tokens that rows are made of, on disk (TokenStore) or in memory (ArrayStore)."""

    tokens: np.ndarray  # (N,) ids
    offsets: np.ndarray  # (documents + 1,) int64
    mask: np.ndarray | None  # (N,) uint8
    info: dict[str, Any]
    path: Path | None
    about: dict[str, Any]  # facts of preparation, such as what was left out; empty in memory

    @property
    def fingerprint(self) -> str: ...

    def require(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Verify the tokens [begins[i], ends[i]) before they are used. Raise StorageError if they are damaged."""


class ArrayStore:
    """A store in memory, of documents passed from Python."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, mask: np.ndarray | None, info: dict[str, Any]):
        self.tokens, self.offsets, self.mask, self.info = tokens, offsets, mask, info
        self.path: Path | None = None
        self.about: dict[str, Any] = {}

    @property
    def fingerprint(self) -> str:
        return self.info["sha256"]

    def require(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Do nothing: memory needs no checksums."""

    @classmethod
    def of(cls, documents: Iterable[np.ndarray], masks: list[np.ndarray] | None, info: dict[str, Any]) -> ArrayStore:
        listed = list(documents)
        lengths = np.array([len(d) for d in listed], np.int64)
        dtype = token_dtype(info["vocab_size"])
        tokens = np.concatenate([np.empty(0, dtype), *listed]).astype(dtype)
        mask = None if masks is None else np.concatenate([np.empty(0, np.uint8), *masks]).astype(np.uint8)
        offsets = offsets_of(lengths)
        digest = hashlib.sha256(tokens.tobytes() + offsets.tobytes() + (b"" if mask is None else mask.tobytes()))
        facts = {"documents": len(listed), "tokens": len(tokens), "sha256": digest.hexdigest(), **info}
        return cls(tokens, offsets, mask, facts)


class TokenStore:
    """A store on disk. A directory with splits opens as its `train`; `split` gives the others."""

    def __init__(self, path: str | Path, split: str = "train") -> None:
        given = Path(path)
        self.root = given.parent if (given / "tokens.bin").exists() and given.name in SPLITS else given
        leaf = given if (given / "tokens.bin").exists() else given / split
        self.path: Path | None = leaf
        self.about = read_facts(self.root / "store.json", given)
        if not leaf.is_dir():
            raise InputError(
                f"store '{self.root}' has no '{split}' part; it has {', '.join(self.splits)}. Prepare it "
                "with --val-fraction or --val (data.val_fraction above 0), or train with training.validation=false."
            )
        self.info = read_facts(leaf / "store.json", given)
        try:
            self.tokens = _map(leaf / "tokens.bin", np.dtype(self.info["dtype"]), int(self.info["tokens"]))
            self.offsets = _map(leaf / "docs.idx", np.dtype(np.int64), int(self.info["documents"]) + 1)
            self.mask = _map(leaf / "mask.bin", np.dtype(np.uint8), len(self.tokens)) if self.info["mask"] else None
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"'{leaf / 'store.json'}' is damaged ({error!r}); prepare the store again.") from error
        self.verified = _verified(leaf, self.info.get("checksums"), self._files())
        for name, file in self.verified.items():
            file.sample() if name == "tokens.bin" else file.verify()
        _check_offsets(self.offsets, len(self.tokens), leaf / "docs.idx")

    def _files(self) -> dict[str, np.ndarray]:
        """Name → values, in the order of their bytes in the store's sha256."""
        masked = {} if self.mask is None else {"mask.bin": self.mask}
        return {"tokens.bin": self.tokens, **masked, "docs.idx": self.offsets}

    @property
    def has_checksums(self) -> bool:
        """Whether chunks are verified; stores made before there were checksums are not."""
        return bool(self.verified)

    def require(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Verify the tokens [begins[i], ends[i]), each chunk once. Raise StorageError if they are damaged."""
        if (file := self.verified.get("tokens.bin")) is not None:
            size = self.tokens.itemsize
            file.require(begins * size, np.minimum(ends, len(self.tokens)) * size)

    def verify(self) -> None:
        """Verify every byte of the split, also of a store without checksums. Raise StorageError if it is damaged."""
        for file in self.verified.values():
            file.verify()
        digest = hashlib.sha256()
        for values in self._files().values():
            for first in range(0, len(values), 1 << 22):
                digest.update(values[first : first + (1 << 22)].data)
        if digest.hexdigest() != self.fingerprint:
            raise StorageError(
                f"store '{self.path}' is damaged: its files are not those that were prepared (SHA-256 differs). Copy "
                "it again, or delete it and prepare it again."
            )

    @property
    def splits(self) -> list[str]:
        return [name for name in SPLITS if (self.root / name / "store.json").exists()]

    def split(self, name: str) -> TokenStore:
        return TokenStore(self.root, name)

    @property
    def fingerprint(self) -> str:
        return self.info["sha256"]


def is_store(path: str | Path) -> bool:
    return (Path(path) / "store.json").is_file()


def kind_of(pairs: int, documents: int) -> str:
    """Return what a store holds: preference pairs, or documents to learn as they are. Never both, as rows differ."""
    if 0 < pairs < documents:
        raise InputError(
            f"{pairs} of {documents} documents are preference pairs and the others are not: prepare them as two stores."
        )
    return PAIRS if pairs else "tokens"


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """(n,) lengths to (n + 1,) offsets."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as file:
        file.write(f"{json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)}\n".encode())


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write a store.json, with a checksum over everything in it."""
    plain = json.loads(json.dumps(facts))  # as it will be read
    write_json(path, {**plain, CHECK: _digest(plain)})


def _digest(facts: dict[str, Any]) -> str:
    return json_digest({name: value for name, value in facts.items() if name != CHECK})


def read_facts(path: Path, given: Path) -> dict[str, Any]:
    """Return a store.json. Raise StorageError if it is not what was written; older ones have no checksum."""
    try:
        value = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"'{given}' is not a finished store: '{path.name}' is missing. Make it with `bessemer data "
            f"prepare`; an interrupted preparation continues when it is run again."
        ) from None
    except ValueError as error:
        raise StorageError(f"'{path}' is damaged ({error}); prepare the store again.") from error
    if not isinstance(value, dict):
        raise StorageError(f"'{path}' is damaged (it is not a JSON object); prepare the store again.")
    if value.get(CHECK, digest := _digest(value)) != digest:
        raise StorageError(
            f"'{path}' is damaged: its own checksum does not match. Copy the store again, or delete it and prepare it "
            "again."
        )
    if value.get("format") != FORMAT:
        raise InputError(f"'{path}' has store format {value.get('format')}; this version reads format {FORMAT}.")
    return value


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StorageError(f"cannot open '{path}': {error.strerror}; prepare the store again.") from error
    if size != length * dtype.itemsize:
        raise StorageError(
            f"'{path}' has {size} bytes where store.json says {length * dtype.itemsize}: the copy is "
            f"incomplete; copy or prepare the store again."
        )
    if length == 0:
        return np.empty(0, dtype)
    # A plain array over the map: the memmap class pays Python for every slice.
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _verified(leaf: Path, facts: dict[str, Any] | None, files: dict[str, np.ndarray]) -> dict[str, VerifiedFile]:
    """Return the files of a split with their checksums; none for a store made before there were any."""
    if facts is None:
        return {}
    sums = load_sums(leaf, facts)
    if set(sums) != set(files):
        raise StorageError(f"'{leaf / 'store.json'}' is damaged: it lists checksums of {', '.join(sums)}.")
    return {name: VerifiedFile(leaf / name, values.view(np.uint8), sums[name]) for name, values in files.items()}


def _check_offsets(offsets: np.ndarray, tokens: int, path: Path) -> None:
    """Raise StorageError unless the documents follow each other from the first token to the last."""
    if offsets[0] != 0 or offsets[-1] != tokens or (len(offsets) > 1 and np.diff(offsets).min() < 0):
        raise StorageError(
            f"'{path}' is damaged: its offsets do not lead from 0 to the {tokens} tokens of the store. Copy the store "
            "again, or delete it and prepare it again."
        )


# What a store holds, for `bessemer data inspect`.

SHOWN = 3
WIDTH = 24  # tokens of each document shown


def describe_store(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """Return the root store.json, with the lengths and first tokens of the documents of each split. `verify`: read
    every byte first, and raise StorageError if one is not as it was prepared."""
    store = TokenStore(path)
    tokenizer = Tokenizer.load(store.root / FILE)
    if tokenizer.hash != store.info["tokenizer"]:
        raise StorageError(
            f"'{store.root / FILE}' is damaged or was replaced: its tokenizer is {tokenizer.hash[:12]}, the store's "
            f"{store.info['tokenizer'][:12]}. Copy the store again, or prepare it again."
        )
    facts: dict[str, Any] = {**store.about, "path": str(store.root), "lengths": {}, "examples": {}, "checksums": {}}
    for name in store.splits:
        part = store.split(name)
        facts["checksums"][name] = part.has_checksums
        if verify:
            part.verify()
        lengths = np.diff(part.offsets)
        marks = np.quantile(lengths, (0, 0.5, 0.9, 1), method="lower").tolist() if len(lengths) else [0] * 4
        facts["lengths"][name] = dict(zip(("min", "median", "p90", "max"), marks, strict=True))
        show = _pair if part.info["kind"] == PAIRS else _beginning
        facts["examples"][name] = [show(part, n, tokenizer) for n in range(min(SHOWN, len(lengths)))]
    if verify:
        facts["verified"] = True
    return facts


def _beginning(part: TokenStore, number: int, tokenizer: Tokenizer) -> str:
    start, end = part.offsets[number], part.offsets[number + 1]
    part.require(np.array([start]), np.array([min(end, start + WIDTH)]))
    return tokenizer.decode(part.tokens[start : min(end, start + WIDTH)])


def _pair(part: TokenStore, number: int, tokenizer: Tokenizer) -> str:
    """Return the end of the prompt and the beginning of both answers."""
    assert part.mask is not None
    start, end = part.offsets[number], part.offsets[number + 1]
    ids, marks = part.tokens[start:end], part.mask[start:end]
    cut = int(np.flatnonzero(marks & BEGINS)[0])
    sides = [(ids[:cut], marks[:cut] & ANSWER), (ids[cut:], marks[cut:] & ANSWER)]
    first = int(np.argmax(sides[0][1]))
    prompt = tokenizer.decode(ids[max(0, first - WIDTH) : first])
    chosen, rejected = (tokenizer.decode(side[mask == 1][:WIDTH]) for side, mask in sides)
    return f"{prompt} ▸ chosen: {chosen} ▸ rejected: {rejected}"


# --- rows ---


Batch = dict[str, np.ndarray]
Fields = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Name of a field → shape and dtype of one row of it."""

TEXT_TYPES = {
    "input_ids": np.int32,
    "target_ids": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "loss_mask": np.float32,
}


COMPLETIONS = "completions"
"""Field (n, 1) of rows into which RL packs completions: how many each row holds. Rows without one come last, and whole
micro-batches of them are not computed."""


class DatasetStyle(Enum):
    """How documents become rows; docs/data-plans.md compares them."""

    PMD = "pmd"  # contiguous windows of the whole stream
    PACKED = "packed"  # whole documents by best fit, nothing dropped
    CROPPED = "cropped"  # best fit, rows always full, the overhang cropped and counted
    PADDED = "padded"  # one example per row
    CONTRASTIVE = "contrastive"  # whole pairs, chosen and rejected side by side


class Rows(Protocol):
    """Random access to rows. `fields` declares what `get` returns; `stats` counts documents, tokens, target_tokens,
    padding and everything left out."""

    block_size: int
    fields: Fields
    fingerprint: str
    stats: dict[str, Any]

    def __len__(self) -> int: ...

    def get(self, indices: np.ndarray) -> Batch: ...


class PmdRows:
    """Contiguous windows of the stream: row i is tokens [iT, iT + T]."""

    def __init__(self, store: Store, block_size: int) -> None:
        self.store, self.block_size = store, block_size
        self.fields = text_fields(block_size)
        self.tokens, self.offsets, self.mask = store.tokens, store.offsets, store.mask
        count = len(self.tokens)
        self.rows = -(-(count - 1) // block_size)
        self.fingerprint = fingerprint_of(store, "PMD", block_size)
        targets = count - 1 if self.mask is None else int(np.count_nonzero(self.mask[1:]))
        self.stats = {**base_stats(store, self.rows, targets), **padding(self.rows * block_size, count - 1)}

    def __len__(self) -> int:
        return self.rows

    def get(self, indices: np.ndarray) -> Batch:
        pad = self.store.info["pad_id"]
        starts = np.asarray(indices, np.int64) * self.block_size
        self.store.require(starts, starts + self.block_size + 1)
        windows = self._windows(self.tokens, starts, pad)  # (n, T + 1)
        left = np.minimum(len(self.tokens) - 1 - starts, self.block_size)  # real targets in each row
        trained = None if self.mask is None else self._windows(self.mask, starts, 0)[:, 1:] > 0
        return finish(windows, left, self._segments(starts), trained, pad)

    def _windows(self, values: np.ndarray, starts: np.ndarray, fill: int) -> np.ndarray:
        """Return (n, T + 1) windows, copied as whole rows rather than by one index per token."""
        width = self.block_size + 1
        size = values.itemsize
        if len(values) < width:
            out = np.full((len(starts), width), fill, values.dtype)
            out[:, : len(values)] = values
            return out
        view = as_strided(values, (len(values) - width + 1, width), (size, size), writeable=False)
        out = view[np.minimum(starts, len(view) - 1)]
        for row in np.flatnonzero(starts >= len(view)):  # only the stream's last row runs over the end
            tail = values[starts[row] :]
            out[row, : len(tail)] = tail
            out[row, len(tail) :] = fill
        return out

    def _segments(self, starts: np.ndarray) -> np.ndarray:
        """(n, T): 1 + the number of documents that began in the row before or at each position."""
        width = self.block_size
        first = np.searchsorted(self.offsets, starts, side="right")
        last = np.searchsorted(self.offsets, np.minimum(starts + width, len(self.tokens)), side="left")
        out = np.zeros((len(starts), width), np.int32)
        out[:, 0] = 1
        rows, number = ragged(np.maximum(last - first, 0))
        begins = self.offsets[first[rows] + number] - starts[rows]
        out[rows, begins] = 1
        return np.cumsum(out, axis=1, dtype=np.int32)


def text_fields(block_size: int) -> Fields:
    """Return the five fields that all rows of text have."""
    return {name: ((block_size,), np.dtype(kind)) for name, kind in TEXT_TYPES.items()}


def fields_of(batch: Mapping[str, np.ndarray]) -> Fields:
    """Return the fields of sample rows."""
    return {name: (values.shape[1:], values.dtype) for name, values in batch.items()}


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's group and index in it: for counts (2, 0, 3), (0, 0, 2, 2, 2) and (0, 1, 0, 1, 2)."""
    groups = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return groups, np.arange(len(groups)) - starts[groups]


def supervised(mask: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(pieces,) how many of the `counts` tokens from each start are trained on; in blocks of bounded memory."""
    out = np.zeros(len(starts), np.int64)
    for block in np.array_split(np.arange(len(starts)), max(1, len(starts) // 4096)):
        piece, offset = ragged(counts[block].astype(np.int64))
        values = mask[starts[block][piece] + offset]
        out[block] = np.bincount(piece, weights=values, minlength=len(block))
    return out


def finish(windows: np.ndarray, left: np.ndarray, segments: np.ndarray, trained: np.ndarray | None, pad: int) -> Batch:
    """windows (n, T + 1) with `left` real targets each → the five fields, positions counted along the row."""
    n, width = windows.shape[0], windows.shape[1] - 1
    inputs = windows[:, :-1].astype(np.int32)
    targets = windows[:, 1:].astype(np.int32)
    positions = np.empty((n, width), np.int32)
    positions[:] = np.arange(width, dtype=np.int32)
    if (left < width).any():
        beyond = positions >= left[:, None]
        inputs[beyond] = pad
        targets[beyond] = -1
        segments[beyond] = 0
    if trained is not None:
        targets[~trained] = -1
    return {
        "input_ids": inputs,
        "target_ids": targets,
        "positions": positions,
        "segment_ids": segments,
        "loss_mask": (targets >= 0).astype(np.float32),
    }


def base_stats(store: Store, rows: int, targets: int) -> dict[str, Any]:
    about = store.about
    return {
        "rows": rows,
        "documents": len(store.offsets) - 1,
        "dropped": sum(int(about.get(reason, 0)) for reason in ("duplicates", "empty", "skipped")),
        "tokens": len(store.tokens),
        "target_tokens": targets,
        "cropped_share": 0.0,
        "truncated": 0,
        **({"unverified": True} if about and not store.info.get("checksums") else {}),
        **({"turn_rows": turns} if (turns := about.get("turn_rows") or store.info.get("turn_rows")) else {}),
        **({"files_left_out": about["files_left_out"]} if about.get("files_left_out") else {}),
    }


def padding(positions: int, used: int) -> dict[str, float]:
    return {"padding_share": 1 - used / positions if positions else 0.0}


def fingerprint_of(store: Store, *facts: Any) -> str:
    """Names the rows by the content of the store and how they are cut."""
    return json_digest([store.fingerprint, *facts])


def check_length(store: Store, block_size: int) -> None:
    """Raise InputError if the data cannot fill a training row."""
    if block_size < 1:
        raise InputError(f"architecture.block_size is {block_size}; it must be at least 1.")
    if len(store.tokens) < block_size + 1:
        raise InputError(
            f"architecture.block_size={block_size} needs at least {block_size + 1} tokens, but the data has "
            f"{len(store.tokens)} in {len(store.offsets) - 1} documents: use a smaller block size or more data."
        )
