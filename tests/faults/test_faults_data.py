"""A data worker that dies: an error with the remedy, never a dataset with a hole; the same command ends the work."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.faults.harness import call, finish, start, until, write_corpus

from bessemer.data.sources.files import SHARD_BYTES


def children(pid: int) -> list[int]:
    try:
        found = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
    return [int(child) for text in found for child in text.split()]


def content(store: Path) -> dict[str, bytes]:
    files = (p for p in store.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(store)): p.read_bytes() for p in files}


@pytest.mark.slow
def test_a_killed_worker_fails_the_preparation(tmp_path: Path, home: Path) -> None:
    small, corpus = write_corpus(tmp_path / "small.jsonl"), tmp_path / "corpus.jsonl"
    lines = (json.dumps({"text": f"{n} " + "the red fox runs over the hill " * 30}) + "\n" for n in range(12_000))
    corpus.write_text("".join(lines))
    assert corpus.stat().st_size > SHARD_BYTES, "two shards, so that there are workers"
    words = ["tokenizer", "train", str(small), "-o", str(tmp_path / "t"), "--vocab-size", "300"]
    code, output = call(home, *words)
    assert code == 0, output

    def prepare(store: str) -> list[str]:
        words = ["data", "prepare", str(corpus), "-o", str(tmp_path / store), "--val-fraction", "0.1"]
        return [*words, "--tokenizer", str(tmp_path / "t"), "--workers", "2"]

    process = start(home, *prepare("part"))
    assert until(process, lambda: bool(children(process.pid)), poll=0.001)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 4, output
    assert "worker ended with code -9" in output and "run the same command again" in output
    assert not (tmp_path / "part/store.json").exists()
    code, output = call(home, "data", "inspect", str(tmp_path / "part"))
    assert code == 2, output
    for store in ("part", "whole"):
        code, output = call(home, *prepare(store))
        assert code == 0, output
    assert content(tmp_path / "part") == content(tmp_path / "whole")
