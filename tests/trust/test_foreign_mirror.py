"""A mirror that somebody else can write to: keys that lead out of the target, and what is never sent to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiny_run import make_run
from tests.trust.memory_store import MemoryStore

from bessemer.checkpoint import Checkpoints
from bessemer.errors import InputError
from bessemer.storage import remote
from bessemer.training.persistence.mirror import Mirror, fetched, inner_name

URL = "s3://bucket/runs"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    held = MemoryStore()
    monkeypatch.setattr(remote, "_client", lambda scheme, bucket, endpoint: held.system)
    yield held


@pytest.fixture
def mirrored(store: MemoryStore, tmp_path: Path) -> MemoryStore:
    """A run's copy, at s3://bucket/runs/tiny."""
    run = make_run(tmp_path, steps=(10, 20))
    private = tmp_path / "id_rsa"
    private.write_text("PRIVATE KEY")
    (run.path / "notes.txt").symlink_to(private)
    (run.path / "folder").symlink_to(tmp_path)
    (run.path / "inside.txt").symlink_to("config.yaml")
    (run.checkpoints / "step_00000020" / "more.txt").symlink_to(private)
    said: list[str] = []
    manager = Checkpoints(run.checkpoints)
    mirror = Mirror(run, URL, said.append)
    mirror.push(manager, 20)
    mirror.push(manager, 20)
    manager.close()
    assert not mirror.behind
    assert len([line for line in said if "notes.txt" in line]) == 1, "said once"
    return store


def test_what_a_link_leads_to_is_not_uploaded(mirrored: MemoryStore) -> None:
    assert b"PRIVATE KEY" not in mirrored.objects.values()
    names = {key.removeprefix("bucket/runs/tiny/") for key in mirrored.objects}
    assert {"config.yaml", "origin.json", "inside.txt", "checkpoints/step_00000020/COMMIT"} <= names
    assert not {"notes.txt", "lock", "checkpoints/step_00000020/more.txt"} & names
    assert not any(name.startswith("folder/") for name in names)


def test_a_mirror_comes_back_whole(mirrored: MemoryStore, tmp_path: Path) -> None:
    here = Path(str(fetched(f"{URL}/tiny", tmp_path / "here")))
    there = tmp_path / "runs/tiny"
    assert (here / "config.yaml").read_bytes() == (there / "config.yaml").read_bytes()
    assert Checkpoints(here / "checkpoints").verify(20) == []


KEYS = ["../escaped.txt", "../../escaped.txt", "a/../../../escaped.txt", "/escaped.txt", "a//b", "./b", "a\nb", "..\\b"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("below", ["", "checkpoints/step_00000020/"])
def test_a_key_that_leads_out_of_the_target_is_refused(
    mirrored: MemoryStore, tmp_path: Path, key: str, below: str
) -> None:
    mirrored.objects[f"bucket/runs/tiny/{below}{key}"] = b"evil"
    here = tmp_path / "there" / "here"
    with pytest.raises(InputError, match="no run of ours writes"):
        fetched(f"{URL}/tiny", here)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"evil"]


def test_the_lock_of_another_machine_is_not_fetched(mirrored: MemoryStore, tmp_path: Path) -> None:
    mirrored.objects["bucket/runs/tiny/lock"] = b"evil"
    here = Path(str(fetched(f"{URL}/tiny", tmp_path / "here")))
    assert not (here / "lock").exists()


def test_an_object_of_another_place_has_no_name_here() -> None:
    assert inner_name("s3://b/runs/x/model/a.json", "s3://b/runs/x") == "model/a.json"
    with pytest.raises(InputError, match="no run of ours"):
        inner_name("s3://b/elsewhere", "s3://b/runs/x")
