"""Files that would take the machine's memory, time or process are read in bounds, or end in one line and exit 2."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.processes import TIMEOUT
from tests.tiny_run import tiny_tokenizer

from bessemer.data import Tokenizer, tokenizer_for
from bessemer.data.sources import readers
from bessemer.data.sources.readers import Expands, read_batches
from bessemer.errors import InputError

MEMORY = 700 << 10
"""Kilobytes that a command may take here; the bomb took 6 GB."""


MEASURED = """
import atexit, sys
report = sys.argv.pop(1)
# not ru_maxrss, which keeps that of the process before exec
facts = lambda: open("/proc/self/status").read() + open("/proc/self/io").read()
atexit.register(lambda: open(report, "w").write(facts()))
from bessemer.cli import main
main()
"""


class Ended(NamedTuple):
    """How a command ended, its peak memory in kilobytes, and the bytes it read from files."""

    code: int
    errors: str
    memory: int
    read: int


def bessemer(*words: str) -> Ended:
    """Run the command line in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "status"
        command = [sys.executable, "-c", MEASURED, str(report), *words]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
        facts = report.read_text()
        peak, read = (int(facts.split(name)[1].split()[0]) for name in ("VmHWM:", "rchar:"))
        return Ended(done.returncode, done.stderr, peak, read)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    tiny_tokenizer().save(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.jsonl"])
def test_a_line_of_300_mb_is_bad_input_in_bounded_memory(name: str, tokenizer: str, tmp_path: Path) -> None:
    path, letters = tmp_path / name, b"a" * (1 << 20)
    with gzip.open(path, "wb", compresslevel=1) if name.endswith(".gz") else open(path, "wb") as file:
        file.write(b'{"text": "')
        for _ in range(300):
            file.write(letters)
        file.write(b'"}\n')
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "store"), "--tokenizer", tokenizer)
    code, errors, memory, _ = bessemer(*words, "--workers", "1")
    assert code == 2 and memory < MEMORY, (errors, memory)
    assert f"{name} line 1: longer than 16 MiB" in errors and "Traceback" not in errors


def test_a_compressed_text_of_one_letter_is_prepared_in_bounded_memory(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(12):
            file.write(b"a" * (1 << 20))
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "store"), "--tokenizer", tokenizer)
    code, errors, memory, _ = bessemer(*words, "--workers", "1")
    assert code == 0 and memory < MEMORY, (errors, memory)
    assert json.loads((tmp_path / "store/store.json").read_text())["splits"]["train"]["bytes"] == 12 << 20


def test_a_nested_line_is_bad_input(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "store"), "--tokenizer", tokenizer)
    code, errors, _, _ = bessemer(*words)
    assert code == 2 and "nested deeper than 64 levels" in errors and "Traceback" not in errors


def train_tokenizer(source: Path, out: Path) -> Ended:
    return bessemer("tokenizer", "train", str(source), "-o", str(out), "--vocab-size", "300")


@pytest.mark.slow
def test_a_tokenizer_is_trained_on_a_bounded_sample_of_a_sparse_terabyte(tmp_path: Path) -> None:
    """Zeros are one-character text in a .txt, and a line without an end in a .jsonl."""
    for name, code in (("big.txt", 0), ("big.jsonl", 2)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)
        ended = train_tokenizer(tmp_path / name, tmp_path / "out")
        assert ended.code == code and ended.memory < MEMORY and ended.read < 2 << 30, ended
    assert "no document was found" in ended.errors and "512 MiB, spread over it, were read" in ended.errors


def test_a_tokenizer_is_trained_on_a_bounded_part_of_a_compressed_line(tmp_path: Path) -> None:
    """1 GiB of one letter in a zstd file of 100 KB."""
    path = tmp_path / "bomb.jsonl.zst"
    with pa.output_stream(str(path), compression="zstd") as file:
        for _ in range(16):
            file.write(b"a" * (64 << 20))
    assert path.stat().st_size < 200_000
    ended = train_tokenizer(path, tmp_path / "out")
    assert ended.code == 2 and ended.memory < MEMORY and "longer than 16 MiB" in ended.errors, ended


def test_lines_after_a_line_without_end_are_found_and_named(tokenizer: str, tmp_path: Path) -> None:
    """A line of many pieces: no piece looks for its end, and the row after it is read once, with its number."""
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + b"a" * (40 << 20) + b'\n{"text": "three"}\n{"text": 4}\n')
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "store"), "--tokenizer", tokenizer)
    ended = bessemer(*words, "--workers", "1", "--on-error", "skip")
    about = json.loads((tmp_path / "store/store.json").read_text())
    assert ended.code == 0 and about["splits"]["train"]["documents"] == 2, ended.errors
    assert "line 2: longer than 16 MiB" in str(about) and "line 4: 'text' is int" in str(about)


def repeated(path: Path, text: str, rows: int) -> Path:
    """One text in a dictionary that every row points to."""
    indices = pa.array([0] * rows, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array([text]))})
    pq.write_table(table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30)
    return path


@pytest.mark.parametrize("command", ["data prepare", "tokenizer train"])
def test_a_parquet_file_that_repeats_one_text_is_refused_in_bounded_memory(
    command: str, tokenizer: str, tmp_path: Path
) -> None:
    """160 GB of text in 600 bytes."""
    path = repeated(tmp_path / "bomb.parquet", "a" * (8 << 20), 20_000)
    assert path.stat().st_size < 1000
    rest = ("--tokenizer", tokenizer, "--workers", "1") if command == "data prepare" else ("--vocab-size", "300")
    ended = bessemer(*command.split(), str(path), "-o", str(tmp_path / "out"), *rest)
    assert ended.code == 2 and ended.memory < MEMORY and "Traceback" not in ended.errors, ended
    assert "row group 0: 8,3" in ended.errors and "over 1,000 times as many" in ended.errors


@pytest.mark.slow
def test_a_parquet_page_that_expands_is_refused_before_it_is_unpacked(tokenizer: str, tmp_path: Path) -> None:
    """300 MB of one letter in one row: 10,000-fold by zstd."""
    path = tmp_path / "page.parquet"
    pq.write_table(pa.table({"text": ["a" * (300 << 20)]}), path, compression="zstd", use_dictionary=False)
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "out"), "--tokenizer", tokenizer)
    ended = bessemer(*words, "--workers", "1")
    assert ended.code == 2 and ended.memory < MEMORY and "more than 200-fold" in ended.errors, ended


def test_a_parquet_row_that_is_too_large_is_left_and_the_others_are_read(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["first", "a" * (70 << 20), "third"]}), path)
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "store"), "--tokenizer", tokenizer)
    ended = bessemer(*words, "--workers", "1", "--on-error", "skip")
    about = json.loads((tmp_path / "store/store.json").read_text())
    assert ended.code == 0 and about["splits"]["train"]["documents"] == 2, ended.errors
    assert "row 2: longer than 16 MiB" in str(about)


def test_a_parquet_list_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ones.parquet"
    pq.write_table(pa.table({"input_ids": [[1] * 1_000_000]}), path)
    assert len(next(read_batches(str(path), range(1), None))) == 1
    monkeypatch.setattr(readers, "MOST_VALUES", 100_000)
    with pytest.raises(Expands, match=r"input_ids.* holds 1,000,000 values"):
        next(read_batches(str(path), range(1), None))


@pytest.mark.parametrize("most", [1, 300, 64 << 20])
def test_parquet_rows_are_what_the_library_reads(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested, empty and missing values; slices of a row, of some rows, and of all."""
    monkeypatch.setattr(readers, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(readers, "SLICE_BYTES", most)
    turns = [{"role": "user", "content": "x" * n} for n in (0, 3, 50)]
    rows = [
        {
            "text": [None, "", "grey cats", "ä" * 40][n % 4],
            "messages": [None, [], turns, [*turns, {"role": None, "content": None}]][n % 4],
            "ids": list(range(n % 5)),
            "rate": n / 3,
            "pairs": [("key", "value" * (n % 9))],
        }
        for n in range(40)
    ]
    schema = pa.table({name: [row[name] for row in rows] for name in ("text", "messages", "ids", "rate")}).schema
    table = pa.Table.from_pylist(rows, schema.append(pa.field("pairs", pa.map_(pa.string(), pa.string()))))
    for dictionary in (True, False):
        pq.write_table(table, tmp_path / "rows.parquet", row_group_size=17, use_dictionary=dictionary)
        read = list(read_batches(str(tmp_path / "rows.parquet"), range(3), None))
        if most == 1:
            assert read == [1] * 40
        else:
            assert [row for part in read for row in part] == table.to_pylist()
    names = list(read_batches(str(tmp_path / "rows.parquet"), range(1, 2), ["ids"]))
    assert most == 1 or [row for part in names for row in part] == table.select(["ids"]).to_pylist()[17:34]


def test_a_device_is_no_tokenizer(tmp_path: Path) -> None:
    for path in ("/dev/zero", tmp_path / "big.json"):
        if path != "/dev/zero":
            with open(path, "wb") as file:
                file.truncate(1 << 40)
        with pytest.raises(InputError, match="is not a tokenizer: it"):
            Tokenizer.load(path)


@pytest.mark.parametrize(
    ("size", "message"), [("99999999999", "too large"), ("inf", "expected train:N"), ("1e400", "expected train:N")]
)
def test_a_vocabulary_of_billions_is_refused(size: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    with pytest.raises(InputError, match=message):
        tokenizer_for(f"train:{size}", [str(tmp_path / "a.txt")], tmp_path / "root")
