"""Preparation on a real Ray of this machine: the bytes of a local one, also when workers are killed in the middle."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest
from tests.data.test_data_prepare import TOKENIZER, content, corpus

from bessemer.data import Documents, prepare
from bessemer.errors import InputError, StorageError

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow
OPTIONS = {"val_fraction": 0.1, "shard_bytes": 4096}


@pytest.fixture(scope="module", autouse=True)
def ray():
    """One Ray of three workers for all tests, as an existing cluster would be."""
    import ray

    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_the_bytes_are_those_of_a_local_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path)
    monkeypatch.chdir(tmp_path)  # named relatively, as on a command line
    prepare("a.jsonl", tmp_path / "local", TOKENIZER, **OPTIONS)
    states = []
    info = prepare("a.jsonl", "ray", TOKENIZER, engine="ray", progress=states.append, **OPTIONS)
    assert content(tmp_path / "ray") == content(tmp_path / "local")
    assert states[-1].done == states[-1].total and states[-1].documents == 400
    assert prepare("a.jsonl", "ray", TOKENIZER, engine="ray", **OPTIONS).reused and not info.reused


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """Whoever is seen writing a shard is killed, three times; Ray gives the shards to others."""
    path = corpus(tmp_path, 6000)
    prepare(path, tmp_path / "local", TOKENIZER, **OPTIONS)
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.is_set() and len(killed) < 3:
            for shard in (tmp_path / "ray").glob(".work-*/*.tmp"):
                found = re.fullmatch(r".*\.(\d+)\.tmp", shard.name)
                pid = int(found.group(1)) if found else os.getpid()
                if pid not in (*killed, os.getpid()):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        prepare(path, tmp_path / "ray", TOKENIZER, engine="ray", **OPTIONS)
    finally:
        over.set()
        killer.join()
    assert killed, "nobody was caught in the act"
    assert content(tmp_path / "ray") == content(tmp_path / "local")


def test_what_is_wrong_is_said_as_by_a_local_worker(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    with path.open("a") as file:
        file.write('{"text": "cut')
    with pytest.raises(InputError, match=r"a\.jsonl line 401: not valid JSON.*--on-error skip"):
        prepare(path, tmp_path / "s", TOKENIZER, engine="ray", **OPTIONS)
    assert not (tmp_path / "s" / "store.json").exists()
    assert prepare(path, tmp_path / "s", TOKENIZER, engine="ray", on_error="skip", **OPTIONS).about["skipped"] == 1
    with pytest.raises(InputError, match="comes from Python"):
        prepare(Documents(["a", "b"]), tmp_path / "t", TOKENIZER, engine="ray")


def test_a_file_system_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: not path.name.startswith("train-") and os.path.isdir(path))
    with pytest.raises(StorageError, match="all nodes of the Ray cluster share"):
        prepare(corpus(tmp_path, 20), tmp_path / "s", TOKENIZER, engine="ray")
