"""Files that would take the machine's memory, time or process end in one line and exit code 2."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.processes import TIMEOUT
from tests.tiny_run import tiny_tokenizer

from bessemer.data import Tokenizer, tokenizer_for
from bessemer.errors import InputError

MEMORY = 700 << 10
"""Kilobytes that a command may take here; the bomb took 6 GB."""


MEASURED = """
import atexit, sys
report = sys.argv.pop(1)
# not ru_maxrss, which keeps that of the process before exec
atexit.register(lambda: open(report, "w").write(open("/proc/self/status").read()))
from bessemer.cli import main
main()
"""


def bessemer(*words: str) -> tuple[int, str, int]:
    """(exit code, stderr, peak memory in kilobytes) of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "status"
        command = [sys.executable, "-c", MEASURED, str(report), *words]
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT
        )
        peak = int(report.read_text().split("VmHWM:")[1].split()[0])
        return done.returncode, done.stderr, peak


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
    code, errors, memory = bessemer(*words, "--workers", "1")
    assert code == 2 and memory < MEMORY, (errors, memory)
    assert f"{name} line 1: longer than 16 MiB" in errors and "Traceback" not in errors


def test_a_compressed_text_of_one_letter_is_prepared_in_bounded_memory(
    tokenizer: str, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(12):
            file.write(b"a" * (1 << 20))
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "store"), "--tokenizer", tokenizer)
    code, errors, memory = bessemer(*words, "--workers", "1")
    assert code == 0 and memory < MEMORY, (errors, memory)
    assert json.loads((tmp_path / "store/store.json").read_text())["splits"]["train"]["bytes"] == 12 << 20


def test_a_nested_line_is_bad_input(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    words = ("data", "prepare", str(path), "-o", str(tmp_path / "store"), "--tokenizer", tokenizer)
    code, errors, _ = bessemer(*words)
    assert code == 2 and "nested deeper than 64 levels" in errors and "Traceback" not in errors


def test_a_device_is_no_tokenizer(tmp_path: Path) -> None:
    for path in ("/dev/zero", tmp_path / "big.json"):
        if path != "/dev/zero":
            with open(path, "wb") as file:
                file.truncate(1 << 40)
        with pytest.raises(InputError, match="is not a tokenizer: it"):
            Tokenizer.load(path)


@pytest.mark.parametrize(
    ("size", "message"),
    [("99999999999", "too large"), ("inf", "expected train:N"), ("1e400", "expected train:N")],
)
def test_a_vocabulary_of_billions_is_refused(size: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    with pytest.raises(InputError, match=message):
        tokenizer_for(f"train:{size}", [str(tmp_path / "a.txt")], tmp_path / "root")
