"""Datasets by their name on the hub: the real client against a local server that speaks the protocol."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.hub_server import Hub, Repository, hub_server

from bessemer.data.sources.hub import REGISTERED, HubFile, HubName, _by_name, parse
from bessemer.errors import InputError
from bessemer.job.trust import named_code
from bessemer.registry import datasets


def parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), out)
    return out.getvalue()


def words(name: str, count: int = 200) -> list[str]:
    return [f"{name} {i} says that text comes by name" for i in range(count)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("needs the extra `hf`")
    with hub_server() as server:
        yield server


def ours(hub: Hub, folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the hub's client pointed at the server; a cache and a data root of its own."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder / "cache"), "BESSEMER_HOME": str(folder / "home")}
    env = {**os.environ, **own, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5", **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=folder)


READ = """
from bessemer.data.stores.catalog import find_source
from pathlib import Path
import hashlib, json
files = find_source({name!r}).files
print(json.dumps([[Path(f.path).name, f.kind, hashlib.sha256(Path(f.path).read_bytes()).hexdigest()] for f in files]))
"""


def read(hub: Hub, folder: Path, name: str, **variables: str) -> tuple[list[list[str]], str]:
    done = ours(hub, folder, READ.format(name=name), **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def refusal(hub: Hub, folder: Path, name: str, **variables: str) -> str:
    done = ours(hub, folder, READ.format(name=name), **variables)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def with_splits(hub: Hub) -> Repository:
    repository = hub.repositories["steel/texts"] = Repository(card={"license": "odc-by"})
    repository.push(
        {
            "README.md": b"texts",
            "data/train-00000-of-00002.parquet": parquet(words("train")),
            "data/train-00001-of-00002.parquet": parquet(words("more")),
            "data/test-00000-of-00001.parquet": parquet(words("test")),
        }
    )
    return repository


def test_parts_of_a_name_are_parsed_and_printed_alike() -> None:
    assert parse("hf:a/b") == HubName("a/b")
    assert parse("hf:a/b:main@v1.0/test") == HubName("a/b", "main", "v1.0", "test")
    assert parse("hf:a/b@refs%2Fpr%2F1").revision == "refs/pr/1"
    for name in ("hf:a/b", "hf:a/b:c", "hf:a/b@1234/test", "hf:a/b:c@d/validation"):
        assert str(parse(name)) == name
    for name in ("hf:a", "hf:a/b/c/d", "hf:a/b::c", "hf:../../etc"):
        with pytest.raises(InputError, match="OWNER/NAME"):
            parse(name)


def test_registered_names_lead_to_names_of_the_hub() -> None:
    assert all(parse(name) for name in REGISTERED.values())
    assert set(REGISTERED) <= set(datasets.names())


def test_a_dataset_of_the_hub_is_not_code() -> None:
    assert named_code({"training": {"dataset": "hf:steel/texts:main/test"}}) == []
    assert named_code({"training": {"dataset": "hf:attribute"}}) == ["hf:attribute"]


def test_files_are_chosen_by_words_of_their_paths() -> None:
    def found(split: str, *paths: str, config: str | None = None) -> list[str]:
        files = [HubFile(path, 1) for path in paths]
        return [file.path for file in _by_name(HubName("a/b", config, split=split), files)]

    assert found("train", "train.jsonl", "test.jsonl") == ["train.jsonl"]
    assert found("test", "data/test-00000-of-00001.parquet", "data/train-0.parquet") == [
        "data/test-00000-of-00001.parquet"
    ]
    assert found("train", "a.jsonl", "b.jsonl") == ["a.jsonl", "b.jsonl"], "no file names a split: all are for training"
    assert found("train_prefs", "data/train_prefs-0.parquet", "data/test_prefs-0.parquet") == [
        "data/train_prefs-0.parquet"
    ]
    assert found("train", "texts_train.jsonl", "texts_test.jsonl") == ["texts_train.jsonl"]
    assert found("train", "main/train-0.parquet", "socratic/train-0.parquet", config="main") == ["main/train-0.parquet"]
    with pytest.raises(InputError, match=r"no split 'dev'; it has test, train"):
        found("dev", "train.jsonl", "test.jsonl")
    with pytest.raises(InputError, match=r"no config 'other'; it has main, socratic"):
        found("train", "main/train-0.parquet", "socratic/train-0.parquet", config="other")


def test_a_split_is_downloaded_once_with_its_size_and_license_stated(hub: Hub, tmp_path: Path) -> None:
    with_splits(hub)
    found, notes = read(hub, tmp_path, "hf:steel/texts")
    assert [name for name, _, _ in found] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert "2 files" in notes and "license odc-by" in notes
    before = [path for method, path in hub.served if method == "GET" and "/resolve/" in path]
    assert len(before) == 2
    again, notes = read(hub, tmp_path, "hf:steel/texts")
    assert again == found and "downloading" not in notes
    assert [path for method, path in hub.served if method == "GET" and "/resolve/" in path] == before


@pytest.mark.slow
def test_a_card_names_the_files_of_a_config(hub: Hub, tmp_path: Path) -> None:
    repository = with_splits(hub)
    repository.card["configs"] = [
        {"config_name": "all", "data_files": [{"split": "train", "path": "data/*"}]},
        {"config_name": "held", "data_files": [{"split": "held", "path": ["data/test-*"]}]},
    ]
    assert len(read(hub, tmp_path, "hf:steel/texts:all")[0]) == 3
    assert [name for name, _, _ in read(hub, tmp_path, "hf:steel/texts:held/held")[0]] == [
        "test-00000-of-00001.parquet"
    ]
    assert "several configs: all, held" in refusal(hub, tmp_path, "hf:steel/texts")
    assert "no config 'none'" in refusal(hub, tmp_path, "hf:steel/texts:none")
    assert "no split 'train'; it has held" in refusal(hub, tmp_path, "hf:steel/texts:held")


def test_code_in_a_repository_is_not_run_and_the_conversion_is_read(hub: Hub, tmp_path: Path) -> None:
    repository = hub.repositories["steel/script"] = Repository()
    repository.push({"script.py": b"raise SystemExit('executed')"})
    assert "no revision 'refs/convert/parquet'" in refusal(hub, tmp_path, "hf:steel/script")
    repository.push({"default/train/0000.parquet": parquet(words("converted"))}, "refs/convert/parquet")
    found, _ = read(hub, tmp_path, "hf:steel/script")
    assert [name for name, _, _ in found] == ["0000.parquet"]


@pytest.mark.slow
def test_an_interrupted_download_continues_where_it_broke_off(hub: Hub, tmp_path: Path) -> None:
    data = b"".join(os.urandom(32).hex().encode() + b"\n" for _ in range(400_000))  # 26 MB; the client writes tens
    hub.repositories["steel/texts"] = Repository()
    hub.repositories["steel/texts"].push({"train.txt": data})
    hub.cut_after = 15_000_000
    done = ours(hub, tmp_path, READ.format(name="hf:steel/texts"))
    if done.returncode:  # the client gave up: the same command continues
        assert "cannot be fetched" in done.stderr
    found, _ = read(hub, tmp_path, "hf:steel/texts")
    assert len(found) == 1 and hub.cut_after is None
    assert hub.ranges and all(int(wanted[6:].rstrip("-")) > 0 for wanted in hub.ranges), "bytes were fetched twice"


def test_a_file_with_another_checksum_is_refused_and_not_kept(hub: Hub, tmp_path: Path) -> None:
    with_splits(hub)
    hub.altered.add("data/train-00001-of-00002.parquet")
    assert "does not have the checksum" in refusal(hub, tmp_path, "hf:steel/texts")
    hub.altered.clear()
    assert len(read(hub, tmp_path, "hf:steel/texts")[0]) == 2


def test_a_changed_repository_keeps_the_first_commit_until_it_is_named(hub: Hub, tmp_path: Path) -> None:
    repository = with_splits(hub)
    first, _ = read(hub, tmp_path, "hf:steel/texts")
    commit = repository.push({"train.parquet": parquet(words("new"))})
    again, notes = read(hub, tmp_path, "hf:steel/texts")
    assert again == first
    assert f"hf:steel/texts@{commit[:12]}" in notes
    newer, _ = read(hub, tmp_path, f"hf:steel/texts@{commit[:12]}")
    assert [name for name, _, _ in newer] == ["train.parquet"]


def test_a_downloaded_dataset_works_offline(hub: Hub, tmp_path: Path) -> None:
    with_splits(hub)
    first, _ = read(hub, tmp_path, "hf:steel/texts")
    assert read(hub, tmp_path, "hf:steel/texts", HF_HUB_OFFLINE="1")[0] == first
    found, notes = read(hub, tmp_path, "hf:steel/texts", HF_ENDPOINT="http://127.0.0.1:9")
    assert found == first and "downloaded before" in notes
    assert "cannot be fetched" in refusal(hub, tmp_path, "hf:steel/texts/test", HF_ENDPOINT="http://127.0.0.1:9")


def test_what_cannot_be_read_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    with_splits(hub)
    assert "no dataset 'steel/none'" in refusal(hub, tmp_path, "hf:steel/none")
    assert "no revision 'v9'" in refusal(hub, tmp_path, "hf:steel/texts@v9")
    hub.gated.add("steel/texts")
    assert "accept its terms" in refusal(hub, tmp_path, "hf:steel/texts")


@pytest.mark.slow
def test_a_run_trains_on_a_dataset_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    with_splits(hub)
    settings = ["training.dataset=hf:steel/texts", "data.tokenizer=train:300", "model.depth=1", "model.head_dim=16"]
    settings += ["model.aspect=16", "architecture.block_size=32", "training.batch_size=4", "training.steps=2"]
    words_ = ["train", "quickstart", *settings, "--name", "hub", "--runs", "runs"]
    done = ours(hub, tmp_path, f"from bessemer.cli import main; main({words_!r})")
    assert done.returncode == 0, done.stderr
    assert "hf:steel/texts" in (tmp_path / "runs/hub/config.yaml").read_text()
