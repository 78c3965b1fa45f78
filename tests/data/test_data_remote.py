"""Texts in an object store: the tokens of the same texts on a disk; and what has to be local says so."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.test_data_prepare import TOKENIZER, corpus
from tests.stores import s3  # noqa: F401 -- a fixture

from bessemer.data import Sampling, TokenStore, find_files, find_source, prepare, tokenizer_for
from bessemer.data.stores.catalog import data_root
from bessemer.errors import InputError, StorageError
from bessemer.job import ExecutionSpec, RunDirectory, find_run
from bessemer.job.trust import named_code
from bessemer.rl.prompts import read_split
from bessemer.storage.remote import is_remote, pattern, read_bytes, upload


def texts(folder: Path) -> list[Path]:
    """One file of every kind, of several pieces where a kind can be cut."""
    lines = corpus(folder, 300)
    packed = folder / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus(folder, 50, "small.jsonl").read_bytes()))
    (folder / "c.txt").write_text("".join(f"line {i} of some words\n" for i in range(4000)))
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(50)]}), folder / "d.parquet", row_group_size=20)
    return [lines, packed, folder / "c.txt", folder / "d.parquet"]


@pytest.mark.slow
def test_a_store_of_remote_texts_is_that_of_local_ones(tmp_path: Path, s3: str) -> None:  # noqa: F811
    files = texts(tmp_path)
    for path in files:
        upload(path, f"{s3}/texts/deep/{path.name}")
    names = [f"{s3}/texts/deep/{path.name}" for path in files]
    prepare(files, tmp_path / "here", TOKENIZER, val_fraction=0.1, shard_bytes=8192)
    prepare(names, tmp_path / "there", TOKENIZER, val_fraction=0.1, shard_bytes=8192, workers=2)
    for split in ("train", "val"):
        assert TokenStore(tmp_path / "here", split).fingerprint == TokenStore(tmp_path / "there", split).fingerprint
    assert [file.path for file in find_files(f"{s3}/texts").files] == names, "a directory, in order"
    assert [file.path for file in find_files(f"{s3}/texts/*/[!cd]*").files] == names[:2]
    assert [file.path for file in find_files(f"{s3}/**/*.jsonl*").files] == names[:2]
    before = find_source(f"{s3}/texts").key
    upload(files[2], names[0].replace("a.jsonl", "z.txt"))
    assert find_source(f"{s3}/texts").key != before, "a new file is another store"
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": "cut')
    upload(tmp_path / "bad.jsonl", f"{s3}/bad.jsonl")
    with pytest.raises(InputError, match=r"s3://steel/bad\.jsonl line 2: not valid JSON"):
        prepare(f"{s3}/bad.jsonl", tmp_path / "bad", TOKENIZER)
    with pytest.raises(InputError, match=r"no file is there"):
        find_files(f"{s3}/nothing/here")
    with pytest.raises(StorageError, match="cannot be reached or used"):
        find_files("s3://no-such-bucket-at-all/texts")
    upload(tmp_path / "here" / "store.json", f"{s3}/store/store.json")
    with pytest.raises(InputError, match="copy it to a local disk"):
        find_files(f"{s3}/store")
    assert read_bytes(f"{s3}/nothing") is None


@pytest.mark.slow
def test_remote_prompts_are_those_of_local_files(tmp_path: Path, s3: str) -> None:  # noqa: F811
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(60)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=25)
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        upload(tmp_path / name, f"{s3}/prompts/{name}")
        here, there = (read_split(Sampling(str(place)), 0.2) for place in (tmp_path / name, f"{s3}/prompts/{name}"))
        assert here == there and len(here[0]) + len(here[1]) == 60 and here[1]
    assert len(read_split(Sampling(f"{s3}/prompts"), 0.0)[0]) == 180


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: find_files("http://host/a.jsonl"), "http:// is not supported; s3://, gs:// are"),
        (lambda: find_files("s3://"), "names no bucket"),
        (lambda: prepare("a.txt", "s3://b/store", TOKENIZER), "must be local; prepare it here, then copy"),
        (lambda: data_root("gs://b/home"), "data.root must be local"),
        (lambda: tokenizer_for("s3://b/tokenizer", ["x"]), "copy it here first"),
        (lambda: RunDirectory(Path("s3://b/runs/x")), "logging.mirror"),
        (lambda: find_run("s3://b/runs/x"), "logging.mirror"),
        (lambda: ExecutionSpec("x", root=Path("gs://b/runs")).run_directory, "logging.mirror"),
    ],
)
def test_what_cannot_be_remote_says_so(call, part: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as caught:
        call()
    assert part in str(caught.value)


def test_urls_are_recognised_and_are_no_code(tmp_path: Path) -> None:
    assert is_remote("s3://b/x") and is_remote(Path("gs://b/x"))
    assert not is_remote("package.module:function") and not is_remote("data/a.jsonl:PADDED")
    assert named_code({"training": {"dataset": [[{"name": "s3://b/x.jsonl"}]]}}) == []
    assert named_code({"training": {"dataset": [[{"name": "module:function"}]]}}) == ["module:function"]
    assert pattern("b/**/a?.txt").fullmatch("b/c/d/a1.txt") and not pattern("b/*.txt").fullmatch("b/c/d.txt")
