"""A token store is verified: a sample at open, each chunk before its first use, all of it on demand."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.tiny_run import tiny_tokenizer

from bessemer.data import DatasetStyle, TokenStore, make_rows, prepare
from bessemer.errors import StorageError
from bessemer.storage.checksums import CHUNK, ChunkSums, VerifiedFile

BLOCK = 256
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """About 60 chunks of tokens."""
    texts = [{"text": f"document {n} of some grey cats and {n} dogs. " * 40} for n in range(700)]
    prepare(texts, tmp_path / "store", tiny_tokenizer(), val_fraction=0.1)
    return tmp_path / "store"


def damage(path: Path, at: int, value: int = 7) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ value]))


def test_sums_do_not_depend_on_the_blocks_they_come_in(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 * CHUNK + 17)
    (tmp_path / "x").write_bytes(data)
    at_once = ChunkSums()
    at_once.update(data)
    whole = at_once.finish()
    assert len(whole) == 4
    for size in (1000, CHUNK, CHUNK + 1):
        sums = ChunkSums()
        for at in range(0, len(data), size):
            sums.update(data[at : at + size])
        np.testing.assert_array_equal(sums.finish(), whole)
    file = VerifiedFile(tmp_path / "x", np.frombuffer(data, np.uint8), whole)
    file.require(np.array([0, CHUNK - 1]), np.array([1, 2 * CHUNK + 1]))
    file.verify()
    changed = bytearray(data)
    changed[2 * CHUNK] ^= 1
    file = VerifiedFile(tmp_path / "x", np.frombuffer(bytes(changed), np.uint8), whole)
    file.require(np.array([0]), np.array([2 * CHUNK]))
    with pytest.raises(StorageError, match=f"bytes {2 * CHUNK} to {3 * CHUNK} are not what was written"):
        file.require(np.array([2 * CHUNK - 1]), np.array([2 * CHUNK + 1]))


@pytest.mark.parametrize("style", [DatasetStyle.PMD, DatasetStyle.PACKED, DatasetStyle.CROPPED, DatasetStyle.PADDED])
def test_no_chunk_is_used_before_it_is_verified(
    style: DatasetStyle, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped bit in a chunk outside the sample at open: rows outside it are given, rows in it are not."""
    sound = make_rows(TokenStore(store), style, BLOCK)
    expected = [sound.get(np.array([row])) for row in range(len(sound))]
    damage(store / "train/tokens.bin", 5 * CHUNK + 100)
    monkeypatch.setattr(VerifiedFile, "sample", lambda self: None)
    rows = make_rows(TokenStore(store), style, BLOCK)
    refused = 0
    for row in range(len(rows)):
        try:
            found = rows.get(np.array([row]))
        except StorageError as error:
            assert f"bytes {5 * CHUNK} to {6 * CHUNK}" in str(error) and error.exit_code == 4
            refused += 1
        else:
            for name in found:
                np.testing.assert_array_equal(found[name], expected[row][name])
    assert 0 < refused < len(rows) / 4


def replace_all(store: Path) -> None:
    path = store / "train/tokens.bin"
    values = np.fromfile(path, np.uint16)
    values[::-1].tofile(path)


def test_a_replaced_file_is_noticed_when_the_store_is_opened(store: Path) -> None:
    """Of the same length: it trained other weights, in silence."""
    replace_all(store)
    with pytest.raises(StorageError, match=r"tokens\.bin' is damaged"):
        TokenStore(store)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: damage(s / "train/docs.idx", 808), "docs.idx' is damaged"),
        (lambda s: damage(s / "train/sums.bin", 3), "sums.bin' is damaged"),
        (lambda s: os.remove(s / "train/sums.bin"), "cannot read"),
        (lambda s: (s / "train/store.json").write_text("[]"), "it is not a JSON object"),
        (lambda s: (s / "train/store.json").write_text('{"format": 1}'), "is damaged"),
    ],
)
def test_damage_beside_the_tokens_is_noticed_at_open(store: Path, change: Callable[[Path], object], words: str) -> None:
    change(store)
    with pytest.raises(StorageError, match=words):
        TokenStore(store)


def without_checksums(store: Path) -> None:
    """As stores were made before."""
    for split in ("train", "val"):
        info = json.loads((store / split / "store.json").read_text())
        del info["checksums"], info["check"]
        (store / split / "store.json").write_text(json.dumps(info))
        (store / split / "sums.bin").unlink()


def test_a_store_without_checksums_opens_and_says_so(store: Path, cli: Command) -> None:
    without_checksums(store)
    rows = make_rows(TokenStore(store), DatasetStyle.PMD, BLOCK)
    assert rows.stats["unverified"] is True and not TokenStore(store).has_checksums
    shown = cli("data", "inspect", str(store))
    assert shown.returncode == 0 and "checksums: none" in shown.stdout
    offsets = np.fromfile(store / "train/docs.idx", np.int64)
    offsets[5] = 10**12
    offsets.tofile(store / "train/docs.idx")
    with pytest.raises(StorageError, match="offsets do not lead from 0 to"):
        TokenStore(store)  # an index out of range was a traceback


@pytest.mark.parametrize("checksums", [True, False])
def test_inspect_verifies_every_byte(store: Path, checksums: bool, cli: Command) -> None:
    if not checksums:
        without_checksums(store)
    sound = cli("data", "inspect", str(store), "--verify")
    assert sound.returncode == 0 and "verified: every byte" in sound.stdout
    damage(store / "val/tokens.bin", 4321)
    found = cli("data", "inspect", str(store), "--verify")
    assert found.returncode == 4 and "is damaged" in found.stderr, found


def test_a_damaged_row_plan_is_built_again(store: Path) -> None:
    first = make_rows(TokenStore(store), DatasetStyle.PACKED, BLOCK).get(np.arange(4))
    (plan,) = (store / "train/.plans").iterdir()
    damage(plan / "starts.npy", 300, 255)
    again = make_rows(TokenStore(store), DatasetStyle.PACKED, BLOCK).get(np.arange(4))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
