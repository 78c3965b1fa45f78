"""logging.mirror: a run goes on from its copy in an object store, on a machine that has nothing else of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from tests.stores import s3  # noqa: F401 -- a fixture
from tests.training.stops import StopAt
from tests.training.test_training_processes import assert_same_run

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.files import COMMIT
from bessemer.errors import InputError, Stopped, StorageError
from bessemer.job import RunDirectory
from bessemer.storage.remote import find, remove, upload
from bessemer.training.launch import build_trainer, reopen
from bessemer.training.persistence import mirror
from bessemer.training.persistence.mirror import fetched, mirrored_steps

slow = pytest.mark.slow
SETTINGS = {"optimization.name": "adamw", "training.per_device_batch_size": 1}


@slow
def test_a_fresh_machine_goes_on_bit_for_bit(
    tiny: dict[str, object],
    corpus: Path,
    s3: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Data, checkpoints and files come from the store alone: the home and the run directory of the first machine are
    gone."""
    upload(corpus, f"{s3}/texts/tiny.jsonl")
    settings = {**tiny, **SETTINGS, "training.dataset": f"{s3}/texts/*.jsonl", "logging.keep_last": 2}
    build_trainer("quickstart", settings, name="x", root=tmp_path / "whole").run()

    first, url = tmp_path / "first", f"{s3}/runs/x"
    settings["logging.mirror"] = f"{s3}/runs"
    trainer = build_trainer("quickstart", settings, name="x", root=first, callbacks=[StopAt(7)])
    with pytest.raises(Stopped):
        trainer.run()
    assert mirrored_steps(url) == [6, 7], "retention holds there too"
    with pytest.raises(InputError, match="already mirrored"):
        build_trainer("quickstart", settings, name="x", root=tmp_path / "again").run()

    shutil.rmtree(first)
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "another home"))
    old = next(entry.name for entry in find(f"{url}/checkpoints/step_00000007") if "/state/" in entry.name)
    second = tmp_path / "second"
    assert fetched(url, second) == second / "x" and fetched("plain", second) == "plain"
    with pytest.raises(InputError, match=r"downloads s3://steel/texts/\*\.jsonl \(training\.dataset"):
        reopen(url, root=second)  # with this user's credentials: another home has not seen who asked for it
    trainer = reopen(url, {"training.dataset": settings["training.dataset"]}, root=second)
    assert trainer.step == 7
    trainer.run()
    assert_same_run(second / "x", tmp_path / "whole" / "x")
    assert mirrored_steps(url) == [9, 10]
    names = {entry.name.removeprefix(f"{url}/") for entry in find(url)}
    assert {"config.yaml", "metrics.jsonl", "report.md", "model/model.safetensors", "status.json"} <= names
    assert "lock" not in names and old.removeprefix(f"{url}/") not in names

    victim = next(entry.name for entry in find(f"{url}/checkpoints/step_00000010") if "/state/" in entry.name)
    (tmp_path / "noise").write_bytes(b"x")
    upload(tmp_path / "noise", victim)
    path = Path(str(fetched(url, tmp_path / "third")))
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["step_00000009"], "the damaged one is passed over"
    for step in (9, 10):
        remove(f"{url}/checkpoints/step_{step:08d}/{COMMIT}")
    with pytest.raises(InputError, match="no complete checkpoint"):
        fetched(url, tmp_path / "fourth")


@slow
def test_a_store_that_cannot_be_reached_is_found_before_training(
    tiny: dict[str, object],
    s3: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        build_trainer(
            "quickstart", {**tiny, **SETTINGS, "logging.mirror": "s3://no-such-bucket/x"}, root=tmp_path, name="y"
        ).run()
    assert not (tmp_path / "y" / "config.yaml").exists()
    with pytest.raises(InputError, match="object store"):
        build_trainer("quickstart", {**tiny, **SETTINGS, "logging.mirror": "/disk"}, root=tmp_path, name="z")


class Store:
    """An object store in memory, as the functions of storage/remote.py see it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def upload(self, path: Path, name: str) -> None:
        self.objects[name] = path.read_bytes()

    def find(self, prefix: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in sorted(self.objects) if name.startswith(f"{prefix}/")]

    def remove(self, name: str) -> None:
        self.objects.pop(name, None)


def test_a_step_that_is_saved_again_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback another checkpoint bears the number of one that was sent, perhaps the only one there."""
    store = Store()
    for name in ("upload", "find", "remove"):
        monkeypatch.setattr(mirror, name, getattr(store, name))
    monkeypatch.setattr(mirror, "read_bytes", store.objects.get)
    run, said = RunDirectory(tmp_path / "x").create(), list[str]()
    copy = mirror.Mirror(run, "s3://bucket/runs", said.append)
    manager = Checkpoints(run.checkpoints, on_commit=copy.push)

    def save(step: int, value: float) -> None:
        manager.save(step, {"params": {"w": jnp.full(3, value)}}, wait=True)
        remote = "s3://bucket/runs/x/checkpoints/" + manager.path(step).name
        for path in (path for path in manager.path(step).rglob("*") if path.is_file()):
            name = f"{remote}/{path.relative_to(manager.path(step)).as_posix()}"
            assert store.objects[name] == path.read_bytes(), name

    save(2, 1.0)
    save(4, 1.0)
    manager.set_aside_after(2)
    save(4, 2.0)
    manager.set_aside_after(2)
    save(3, 2.0)
    assert mirror.mirrored_steps("s3://bucket/runs/x") == [2, 3]
    save(4, 2.0)
    assert said == []
