"""Sources: what is found, what is read, and what is said about what cannot be."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.sources import readers
from bessemer.data.sources.datasets import python_stdlib
from bessemer.data.sources.files import Piece, find_files, plan_shards
from bessemer.data.tokenize import documents
from bessemer.data.tokenize.documents import Bad, Document, read_piece
from bessemer.errors import InputError

TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(50)]


def read_all(name, shard_bytes=1 << 20, text_key=None):
    shards = plan_shards(find_files(name), shard_bytes)
    return [read for shard in shards for piece in shard for read in read_piece(piece, text_key)]


def texts(reads):
    assert all(isinstance(read, Document) for read in reads), reads
    return [read.text for read in reads]


def jsonl(values):
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def test_every_format_gives_the_same_documents(tmp_path):
    rows = [{"text": text, "other": 1} for text in TEXTS]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(rows)))
    with pa.output_stream(tmp_path / "c.jsonl.zst", compression="zstd") as stream:
        stream.write(jsonl(rows))
    pq.write_table(pa.table({"text": TEXTS, "id": list(range(50))}), tmp_path / "d.parquet", row_group_size=7)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        assert texts(read_all(tmp_path / name)) == TEXTS, name
    assert texts(read_all(tmp_path)) == TEXTS * 4
    assert texts(read_all(str(tmp_path / "*.jsonl*"))) == TEXTS * 3


@pytest.mark.parametrize("shard_bytes", [1, 10, 100, 5000])
def test_jsonl_shards_do_not_lose_or_repeat_lines(tmp_path, shard_bytes):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": t} for t in TEXTS]).rstrip(b"\n"))
    assert texts(read_all(tmp_path / "a.jsonl", shard_bytes)) == TEXTS


@given(st.text(alphabet="ab\né世", min_size=1, max_size=3000), st.integers(8, 64))
@settings(max_examples=50)
def test_a_text_is_cut_without_loss(tmp_path_factory, text, cut):
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes(text.encode())
    size = path.stat().st_size
    whole = list(read_piece(Piece(str(path), "txt", 0, size, size, cut)))
    assert "".join(texts(whole)) == text
    half = size // 2 // cut * cut
    parts = [Piece(str(path), "txt", 0, half, 0, cut), Piece(str(path), "txt", half, size, 0, cut)]
    assert [read for part in parts for read in read_piece(part)] == whole


def test_a_small_text_alone_becomes_several_documents_and_many_texts_do_not(tmp_path):
    line = "one line of text\n"
    (tmp_path / "a.txt").write_text(line * 2000)
    found = texts(read_all(tmp_path / "a.txt"))
    assert 10 <= len(found) <= 17 and all(text.endswith("\n") for text in found)
    (tmp_path / "b.txt").write_text(line * 2000)
    assert len(read_all(tmp_path)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut off', "not valid JSON"),
        (b'{"title": "x"}', "no 'text' (it has title), nor any of: 'chosen' and 'rejected'; 'messages'"),
        (b'{"text": "x', "(Invalid control character at column 12)"),
        (b'{"conversations": [{"from": "human"}]}', "a turn without 'from' and 'value'"),
        (b'{"text": 5}', "'text' is int"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"messages": []}', "'messages' is a list of messages"),
        (b'{"prompt": 3, "completion": "x"}', "'prompt' is a list of messages"),
        (b'{"instruction": "x", "output": null}', "'output' is NoneType"),
        (b'{"chosen": "x", "rejected": "y"}', "without 'prompt'"),
        (b"[1]", "expected a text or a mapping"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [16, 1 << 20])
def test_a_bad_line_says_file_line_and_reason(tmp_path, line, reason, shard_bytes):
    good = jsonl([{"text": t} for t in TEXTS])
    (tmp_path / "a.jsonl").write_bytes(good + line + b"\n" + good)
    bad = [read for read in read_all(tmp_path / "a.jsonl", shard_bytes) if isinstance(read, Bad)]
    assert len(bad) == 1
    assert bad[0].where.endswith("a.jsonl line 51") and reason in bad[0].reason


def test_damaged_files(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match="not a readable parquet"):
        read_all(tmp_path / "a.parquet")
    whole = gzip.compress(jsonl([{"text": str(i) * 50} for i in range(3000)]))
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut short" in read_all(tmp_path / "b.jsonl.gz")[-1].reason
    (tmp_path / "c.txt").write_bytes(b"fine\n\xff\xfe\n")
    assert "byte 5" in read_all(tmp_path / "c.txt")[0].where
    table = pa.table({"text": ["x" * 100] * 100})
    pq.write_table(table, tmp_path / "d.parquet", compression="zstd", use_dictionary=False)
    content = bytearray((tmp_path / "d.parquet").read_bytes())
    content[20:60] = bytes(40)
    (tmp_path / "d.parquet").write_bytes(bytes(content))
    assert any(isinstance(read, Bad) for read in read_all(tmp_path / "d.parquet"))


def test_what_cannot_be_found(tmp_path):
    (tmp_path / "train.txt").write_text("x")
    (tmp_path / "chats.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    for name, match in [
        ("trian.txt", r"Did you mean '.*train\.txt'"),
        ("*.jsonl", "no file matches"),
        ("chats.json", "is a JSON list.* as .jsonl, one JSON object per line"),
        ("empty", "holds no"),
    ]:
        with pytest.raises(InputError, match=match):
            find_files(tmp_path / name)
    with pytest.raises(InputError, match="no data files"):
        find_files([])


PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", ["a.md", "a.py", "a.rst", "a.c", "a.pod", "a.txt", "Makefile"])
def test_any_text_is_read_whatever_its_name(tmp_path, name, packing):
    text = "".join(f"line {n} of a text with é and 世\n" for n in range(6000))
    (tmp_path / (name + packing)).write_bytes(PACKERS[packing](text.encode()))
    found = texts(read_all(tmp_path / (name + packing)))
    assert "".join(found) == text and len(found) > 2 and all(part.endswith("\n") for part in found)


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "part-0001"])
def test_json_lines_are_told_by_content(tmp_path, name, packing):
    (tmp_path / (name + packing)).write_bytes(PACKERS[packing](jsonl([{"text": t} for t in TEXTS])))
    assert texts(read_all(tmp_path / (name + packing))) == TEXTS


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
@given(text=st.text(alphabet="aé世", min_size=1, max_size=500), cut=st.integers(8, 64))
@settings(max_examples=30)
def test_a_compressed_text_is_cut_without_loss(tmp_path_factory, packing, text, cut):
    path = tmp_path_factory.mktemp("t") / f"a.txt{packing}"
    path.write_bytes(PACKERS[packing](text.encode()))
    kind = find_files(path).files[0].kind
    found = texts(list(read_piece(Piece(str(path), kind, 0, path.stat().st_size, 0, cut))))
    assert "".join(found) == text


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.txt", b"%PDF-1.7 ...", "is a PDF document"),
        ("a.md", b"PK\x03\x04....", "is a ZIP archive"),
        ("picture", b"\x89PNG\r\n", "is a PNG image"),
        ("a.py", b"print\0", r"not text in UTF-8 \(a zero byte at 5\)"),
        ("a.rst", "é".encode("latin-1") + b" x", r"not text in UTF-8 \(invalid continuation byte at byte 0\)"),
        ("a.c", "é".encode("utf-16"), "is text in UTF-16.*Convert it to UTF-8"),
        ("a.csv", b"a,b\n1,2\n", "is a table"),
        ("a.parquet", b"no parquet", "is not a parquet file"),
        ("a.json", b'{\n "text": 1}', "is JSON over several lines"),
        ("a.md.gz", gzip.compress(b"\x89PNG", mtime=0), "is a PNG image compressed with gzip"),
        ("a.md.gz", gzip.compress(b"x" * 9999, mtime=0)[:30], "is a gzip file that cannot be unpacked"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=found):
        find_files(tmp_path / name)


def test_a_directory_gives_its_rows_or_else_its_texts_and_counts_the_rest(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("print()\n")
    (tmp_path / "README.md").write_text("# words\n")
    (tmp_path / "logo.png").write_bytes(b"\x89PNG")
    files = find_files(tmp_path)
    assert [f.path.rpartition("/")[2] for f in files.files] == ["README.md", "a.py"]
    assert files.left_out == (("not readable as text", 1),)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl([{"text": "t"}])))
    files = find_files(tmp_path)
    assert [f.path.rpartition("/")[2] for f in files.files] == ["b.jsonl.gz"]
    assert files.left_out == (("beside files of rows", 3),)
    with pytest.raises(InputError, match=r"holds no files of text.*is a PNG image"):
        (tmp_path / "pictures").mkdir()
        (tmp_path / "pictures/x").write_bytes(b"\x89PNG")
        find_files(tmp_path / "pictures")
    with pytest.raises(InputError, match="not a regular file"):
        find_files("/dev/zero")


def test_what_would_not_fit_the_memory_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST", 1000)
    monkeypatch.setattr(documents, "LONGEST", 1000)
    lines = jsonl([{"text": "a"}]) + b'{"text": "' + b"a" * 5000 + b'"}\n' + jsonl([{"text": "b"}])
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("a.jsonl", "b.jsonl.gz"):
        for size in (1 << 20, 16):
            first, bad, last = read_all(tmp_path / name, size)
            assert first.text == "a" and last.text == "b" and "the most one document may have" in bad.reason
            assert bad.where.endswith("line 2")
    pq.write_table(pa.table({"text": ["a" * 5000]}), tmp_path / "c.parquet")
    assert "the most one document may have" in read_all(tmp_path / "c.parquet")[0].reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper than 64 levels"),
        (b'{"messages": ' + b'{"a": [' * 50 + b"]}" * 50 + b"}", "nested deeper than 64 levels"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"input_ids": ["a"]}', "lists of integers"),
        (b'{"input_ids": 5}', "lists of integers"),
        (b'{"input_ids": [1, 99999999999999999999]}', "not a token id"),
    ],
)
def test_a_hostile_line_is_a_bad_line(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    (bad,) = read_all(tmp_path / "a.jsonl")
    assert bad.where.endswith("a.jsonl line 1") and reason in bad.reason


def test_other_columns(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"body": "b", "text": "t"}]))
    assert texts(read_all(tmp_path / "a.jsonl", text_key="body")) == ["b"]
    pq.write_table(pa.table({"body": ["b"]}), tmp_path / "a.parquet")
    assert texts(read_all(tmp_path / "a.parquet", text_key="body")) == ["b"]
    with pytest.raises(InputError, match="no 'text'"):
        read_all(tmp_path / "a.parquet")


def test_the_standard_library_is_found_in_order():
    files = python_stdlib().files
    assert 8e6 < sum(file.size for file in files) < 20e6
    paths = [file.path for file in files]
    assert not [p for p in paths if "site-packages" in p or "/test/" in p or "__pycache__" in p]
    assert [file.path for file in python_stdlib().files] == paths
    assert any(p.endswith("argparse.py") for p in paths)


def test_a_stripped_library_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="zipped or stripped"):
        python_stdlib()
