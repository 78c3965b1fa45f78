"""Preparation: the same bytes whatever happens on the way, and nothing partial."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bessemer.data import Documents, Tokenizer, TokenStore, find_files, prepare
from bessemer.data.sources.datasets import hashed_below, own_held_out
from bessemer.errors import InputError, StorageError
from bessemer.storage import files
from bessemer.storage.files import exclusive

TOKENIZER = Tokenizer.train(["some words to learn from, and numbers 0123456789\n" * 50], 300)


def corpus(folder: Path, documents: int = 400, name: str = "a.jsonl") -> Path:
    rng = np.random.default_rng(documents)
    lines = [
        json.dumps({"text": " ".join(map(str, rng.integers(0, 999, rng.integers(1, 30))))}) for _ in range(documents)
    ]
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def content(store: Path) -> dict[str, str]:
    # a worker that outlives its killed parent may leave its unfinished shard in .work-*
    files = [p for p in sorted(store.rglob("*")) if p.is_file() and p.name != ".lock" and ".work-" not in str(p)]
    return {str(p.relative_to(store)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_store_holds_the_documents(tmp_path):
    path = corpus(tmp_path)
    info = prepare(path, tmp_path / "s", TOKENIZER)
    store = TokenStore(tmp_path / "s")
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert store.tokens.dtype == np.uint16 and store.mask is None
    for i, text in enumerate(texts):
        ids = store.tokens[store.offsets[i] : store.offsets[i + 1]]
        assert ids[0] == TOKENIZER.bos_id and TOKENIZER.decode(ids[1:]) == text
    assert info.splits["train"]["documents"] == 400 == len(store.offsets) - 1
    assert info.splits["train"]["bytes"] == sum(len(t.encode()) for t in texts)
    assert store.info["tokenizer"] == TOKENIZER.hash and Tokenizer.load(tmp_path / "s").hash == TOKENIZER.hash
    assert not list((tmp_path / "s").glob(".work-*"))
    assert prepare(path, tmp_path / "s", TOKENIZER).reused


def test_workers_do_not_change_a_byte(tmp_path):
    path = corpus(tmp_path)
    stores = []
    for workers in (1, 2, 3):
        prepare(path, tmp_path / str(workers), TOKENIZER, workers=workers, val_fraction=0.1, shard_bytes=4096)
        stores.append(content(tmp_path / str(workers)))
    assert stores[0] == stores[1] == stores[2]


CHILD = """
import sys, time
from pathlib import Path
from bessemer.data import Tokenizer, prepare
source, out, tokenizer, workers, calls = sys.argv[1:]
left = int(calls)

def progress(state):
    global left
    left -= 1
    if left == 0:
        print("here", flush=True)
        for _ in range(60000):
            if Path(out + ".go").exists():
                break
            time.sleep(0.01)

prepare(source, out, Tokenizer.load(tokenizer), workers=int(workers), val_fraction=0.1,
        shard_bytes=4096, progress=progress)
"""


def child_process(path, out, workers, calls):
    """Prepares in a process of its own, which pauses at a given call of its progress callback until OUT.go is there."""
    TOKENIZER.save(out.parent / "t")
    arguments = [str(path), str(out), str(out.parent / "t"), str(workers), str(calls)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "here\n"
    return child


# With one worker the callback comes once before the shards, then in the middle and at the end of each.
@pytest.mark.parametrize(("workers", "calls"), [(1, 1), (1, 2), (1, 6), (1, 7), (2, 3), (2, 8)])
def test_killed_and_continued_is_the_same_store(tmp_path, workers, calls):
    path = corpus(tmp_path)
    prepare(path, tmp_path / "whole", TOKENIZER, val_fraction=0.1, shard_bytes=4096)
    out = tmp_path / "killed"
    child = child_process(path, out, workers, calls)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (out / "store.json").exists()
    with pytest.raises(InputError, match="not a finished store"):
        TokenStore(out)
    states = []
    prepare(path, out, TOKENIZER, workers=3 - workers, val_fraction=0.1, shard_bytes=4096, progress=states.append)
    assert content(out) == content(tmp_path / "whole")
    if calls > 5:
        assert states[0].done > 0  # finished shards were found, not made again


def test_a_worker_that_dies_fails_the_preparation(tmp_path, monkeypatch):
    path = corpus(tmp_path)
    real = subprocess.Popen
    started = []

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        if len(started) == 2:
            started[1].kill()
        return started[-1]

    monkeypatch.setattr("bessemer.data.stores.prepare.subprocess.Popen", popen)
    with pytest.raises(StorageError, match="worker ended with code -9"):
        prepare(path, tmp_path / "s", TOKENIZER, workers=2, shard_bytes=1024)
    assert not (tmp_path / "s" / "store.json").exists()
    assert all(process.poll() is not None for process in started)
    monkeypatch.undo()
    prepare(path, tmp_path / "s", TOKENIZER, shard_bytes=1024)
    prepare(path, tmp_path / "t", TOKENIZER, shard_bytes=1024)
    assert content(tmp_path / "s") == content(tmp_path / "t")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_fails_or_is_counted(tmp_path, workers):
    path = corpus(tmp_path)
    with path.open("a") as file:
        file.write('{"text": "cut')
    arguments = {"workers": workers, "shard_bytes": 2048}
    with pytest.raises(InputError, match=r"a\.jsonl line 401: not valid JSON.*--on-error skip"):
        prepare(path, tmp_path / "s", TOKENIZER, **arguments)
    assert not (tmp_path / "s" / "store.json").exists()
    info = prepare(path, tmp_path / "s", TOKENIZER, on_error="skip", **arguments)
    assert info.about["skipped"] == 1 and "line 401" in info.about["skipped_where"][0]
    assert info.splits["train"]["documents"] == 400


def test_workers_do_not_import_jax(tmp_path):
    code = "import sys, bessemer.data.stores.worker, bessemer.data.stores.prepare; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_validation_by_content_does_not_depend_on_the_files(tmp_path):
    a, b = corpus(tmp_path, 200, "a.jsonl"), corpus(tmp_path, 150, "b.jsonl")

    def val(name, sources):
        prepare(sources, tmp_path / name, TOKENIZER, val_fraction=0.2)
        store = TokenStore(tmp_path / name, "val")
        return {store.tokens[i:j].tobytes() for i, j in zip(store.offsets, store.offsets[1:], strict=False)}

    both, other, alone = val("1", [a, b]), val("2", [b, a]), val("3", [a])
    assert both == other and alone < both and 40 < len(both) < 100


def test_validation_always_has_a_document(tmp_path):
    path = corpus(tmp_path, 20)
    info = prepare(path, tmp_path / "s", TOKENIZER, val_fraction=1e-9)
    assert info.splits["val"]["documents"] == 1 and info.splits["train"]["documents"] == 19
    corpus(tmp_path, 1, "one.jsonl")
    with pytest.raises(InputError, match="one document"):
        prepare(tmp_path / "one.jsonl", tmp_path / "t", TOKENIZER, val_fraction=0.1)


def test_a_single_text_file_can_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} of some words\n" for i in range(3000)))
    info = prepare(tmp_path / "a.txt", tmp_path / "s", TOKENIZER, val_fraction=0.05)
    assert info.splits["val"]["tokens"] > 0 and info.splits["train"]["documents"] >= 10


def test_given_validation_files_and_duplicates(tmp_path):
    train, val = corpus(tmp_path, 50, "a.jsonl"), corpus(tmp_path, 20, "v.jsonl")
    (tmp_path / "again.jsonl").write_text(train.read_text() + val.read_text())
    plain = prepare([train, tmp_path / "again.jsonl"], tmp_path / "s", TOKENIZER, val=val)
    assert plain.splits["train"]["documents"] == 120 and plain.splits["val"]["documents"] == 20
    clean = prepare([train, tmp_path / "again.jsonl"], tmp_path / "d", TOKENIZER, val=val, dedup=True)
    assert clean.splits["train"]["documents"] == 50 and clean.about["duplicates"] == 70
    with pytest.raises(InputError, match="give one of them"):
        prepare(train, tmp_path / "x", TOKENIZER, val=val, val_fraction=0.1)


def test_an_occupied_directory_is_not_overwritten(tmp_path):
    path = corpus(tmp_path, 30)
    prepare(path, tmp_path / "s", TOKENIZER)
    before = content(tmp_path / "s")
    with pytest.raises(InputError, match="other sources"):
        prepare(path, tmp_path / "s", TOKENIZER, dedup=True)
    assert content(tmp_path / "s") == before


def test_two_preparations_of_one_directory(tmp_path):
    path = corpus(tmp_path, 30)
    with (
        exclusive(tmp_path / "s", "a preparation of"),
        pytest.raises(InputError, match=f"already running .process {os.getpid()}"),
    ):
        prepare(path, tmp_path / "s", TOKENIZER)
    prepare(path, tmp_path / "s", TOKENIZER)


def test_empty_corpus_and_empty_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(InputError, match="hold no documents"):
        prepare(tmp_path / "a.jsonl", tmp_path / "s", TOKENIZER)
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    assert prepare(tmp_path / "b.jsonl", tmp_path / "t", TOKENIZER).about["empty"] == 1


def test_documents_from_python_with_masks(tmp_path):
    items = [{"text": "plain"}, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, "more"]
    prepare(Documents(items), tmp_path / "s", TOKENIZER)
    store = TokenStore(tmp_path / "s")
    assert store.mask is not None and len(store.mask) == len(store.tokens)
    begin, end = store.offsets[1:3]
    assert store.tokens[begin:end].tolist() == [5, 6, 7] and store.mask[begin:end].tolist() == [0, 1, 1]
    assert store.mask.sum() == len(store.tokens) - 1
    assert store.info["fields"] == ["input_ids", "loss_mask"]
    prepare((item for item in items), tmp_path / "t", TOKENIZER)  # a generator, read once
    assert (TokenStore(tmp_path / "t").tokens == store.tokens).all()
    with pytest.raises(InputError, match="another tokenizer"):
        prepare(Documents([{"input_ids": [5000]}]), tmp_path / "u", TOKENIZER)


def test_a_cut_off_copy_of_a_store_is_noticed(tmp_path):
    prepare(corpus(tmp_path, 30), tmp_path / "s", TOKENIZER)
    tokens = tmp_path / "s" / "train" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(StorageError, match="incomplete"):
        TokenStore(tmp_path / "s")
    with pytest.raises(InputError, match="no 'val' part"):
        TokenStore(tmp_path / "s", "val")


def test_a_large_vocabulary_needs_four_bytes():
    from bessemer.data.rows.rows import token_dtype

    assert token_dtype(65536) == np.uint16 and token_dtype(65537) == np.uint32


def test_a_store_is_not_a_source(tmp_path):
    prepare(corpus(tmp_path, 30), tmp_path / "s", TOKENIZER)
    with pytest.raises(InputError, match="prepared store"):
        find_files(tmp_path / "s")


def test_waiting_for_another_preparation(tmp_path, monkeypatch):
    """The other one goes on when it has been found at work."""
    path, go = corpus(tmp_path, 100), tmp_path / "s.go"
    child = child_process(path, tmp_path / "s", 1, 2)

    def found(seconds):
        go.touch()
        time.sleep(0.01)

    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=found))
    info = prepare(path, tmp_path / "s", TOKENIZER, val_fraction=0.1, shard_bytes=4096, wait=True)
    assert info.reused and go.exists()
    assert child.wait() == 0


def test_prompts_and_documents_are_held_out_by_one_rule() -> None:
    hashes = np.array([0, 2**62 - 1, 2**62, 2**64 - 1], np.uint64)
    assert hashed_below(hashes, 0.25).tolist() == [True, True, False, False]
    assert not hashed_below(hashes, 0.0).any()
    assert hashed_below(hashes.astype(">u8"), 0.25).tolist() == [True, True, False, False]  # either byte order
    assert own_held_out("python-reference") is None and own_held_out("toy-sort")[0]["answer"]
