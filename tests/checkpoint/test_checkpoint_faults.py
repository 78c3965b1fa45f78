"""Kill -9 inside saves, full, read-only and vanished disks: the last committed checkpoint survives."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.processes import TIMEOUT

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint import store as store_module
from bessemer.errors import StorageError
from bessemer.storage.files import storage

SAVER = """
import sys
import jax, numpy as np
from bessemer.checkpoint import Checkpoints
store = Checkpoints(sys.argv[1], keep_last=3)
store.clean()
step = store.latest() or 0
print("ready", flush=True)
while True:
    step += 1
    store.save(step, {"a": np.full((64, 64), step, np.int32), "b": np.full(1000, -step, np.int64)},
               files={"loop.json": str(step)})
"""


def test_sigkill_in_the_middle_of_saves_never_leaves_a_bad_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    chance = random.Random(0)
    expected = {"a": np.zeros((64, 64), np.int32), "b": np.zeros(1000, np.int64)}
    reached = 0
    for _ in range(3):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE)
        assert saver.stdout is not None and saver.stdout.readline() == b"ready\n"
        while (Checkpoints(folder).latest() or 0) < reached + 3:  # however slow the machine is
            assert saver.poll() is None
            time.sleep(0.01)
        time.sleep(chance.random() * 0.5)
        saver.kill()
        saver.wait()
        store = Checkpoints(folder)
        steps = store.committed()
        assert steps and steps[-1] >= reached + 3
        reached = steps[-1]
        assert store.newest_valid() == (reached, [])
        for step in steps:
            assert store.verify(step) == []
            back = store.restore(step, expected)
            assert (back["a"] == step).all() and (back["b"] == -step).all()
            assert store.read(step, "loop.json") == str(step)


@pytest.fixture
def tiny_disk(tmp_path):
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def noise(seed, size):
    return {f"p{i}": jax.random.normal(jax.random.key(seed + i), (size, 100)) for i in range(8)}


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_stays(tiny_disk, monkeypatch, capfd, foreseen):
    store = Checkpoints(tiny_disk / "checkpoints")
    first = noise(0, 10)
    store.save(1, first, wait=True)
    if not foreseen:
        usage = shutil.disk_usage(tiny_disk)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 40))
    capfd.readouterr()
    with pytest.raises(StorageError) as caught:
        store.save(2, noise(9, 1000), wait=True)
    text = str(caught.value)
    assert ("free" in text) and len(text) < 1000 and caught.value.exit_code == 4
    captured = capfd.readouterr()
    assert len((captured.out + captured.err).splitlines()) < 5, captured.err
    assert sorted(entry.name for entry in store.root.iterdir()) == ["step_00000001"]
    back = store.restore(store.newest_valid()[0], first)
    np.testing.assert_array_equal(back["p3"], first["p3"])
    monkeypatch.undo()
    store.save(3, noise(1, 10), wait=True)  # space again: the same object goes on
    assert store.committed() == [1, 3]
    store.close()


def test_a_save_returns_before_it_is_committed(tmp_path, monkeypatch):
    """The commit is held until steps were taken after the save: training does not wait for it."""
    store, held = Checkpoints(tmp_path / "c"), threading.Event()
    commit = store_module.write_manifest

    def late(*args):
        assert held.wait(TIMEOUT)
        return commit(*args)

    monkeypatch.setattr(store_module, "write_manifest", late)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(3)
    store.save(1, {"a": x})
    for _ in range(3):
        x = step(x)
    assert x.tolist() == [3, 3, 3] and store.committed() == []
    held.set()
    store.wait()
    assert store.committed() == [1] and store.restore(1, {"a": np.ones(3, np.float32)})["a"].tolist() == [0, 0, 0]
    store.close()


def test_an_error_of_the_background_save_comes_with_the_next_call(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path / "c")
    store.save(1, {"a": jnp.ones(3)}, wait=True)

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store_module, "write_manifest", fail)
    store.save(2, {"a": jnp.ones(3)})
    with pytest.raises(StorageError, match=r"checkpoint 2 .*Input/output error"):
        store.save(3, {"a": jnp.ones(3)})
    store.wait()
    assert store.committed() == [1] and not list(store.root.glob("*.tmp"))
    store.close()


def test_a_vanished_directory_is_not_recreated_silently(tmp_path):
    store = Checkpoints(tmp_path / "c")
    store.save(1, {"a": jnp.ones(3)}, wait=True)
    shutil.rmtree(store.root)
    with pytest.raises(StorageError, match="vanished"):
        store.save(2, {"a": jnp.ones(3)})
    with pytest.raises(StorageError, match="vanished"):
        Checkpoints(tmp_path / "gone" / "c").save(1, {"a": jnp.ones(3)})


def test_a_file_in_the_way_of_a_directory_is_not_blamed_on_the_disk(tmp_path):
    (tmp_path / "runs").touch()
    for place in (tmp_path / "runs", tmp_path / "runs" / "below"):
        with pytest.raises(StorageError, match="choose another path"), storage("cannot create the directory"):
            place.mkdir(parents=True, exist_ok=True)


def test_a_read_only_directory_is_a_storage_error(tmp_path):
    root = tmp_path / "c"
    root.mkdir()
    mounted = os.geteuid() == 0
    if mounted:  # root ignores permission bits; a read-only bind mount binds it too
        bind = subprocess.run(["mount", "--bind", str(root), str(root)], capture_output=True)
        if bind.returncode:
            pytest.skip("needs the right to mount")
        subprocess.run(["mount", "-o", "remount,ro,bind", str(root)], check=True)
    else:
        root.chmod(0o555)
    try:
        with pytest.raises(StorageError, match=r"read-only|Permission denied"):
            Checkpoints(root).save(1, {"a": jnp.ones(3)})
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(root)], check=True)
        else:
            root.chmod(0o755)


def test_a_save_into_a_directory_deleted_meanwhile_is_never_committed(tmp_path, monkeypatch):
    """Deleted and made again by the writer of the arrays: what it had written before is missing, so it must fail."""
    store = Checkpoints(tmp_path / "c")
    finish = store._writer.finish

    def deleted():
        finish()
        temporary = tmp_path / "c/step_00000001.tmp"
        shutil.move(temporary / "state", tmp_path / "state")
        shutil.rmtree(tmp_path / "c")
        temporary.mkdir(parents=True)
        shutil.move(tmp_path / "state", temporary / "state")

    monkeypatch.setattr(store._writer, "finish", deleted)
    store.save(1, {"a": jnp.ones(3)})
    with pytest.raises(StorageError, match="vanished"):
        store.wait()
    assert store.committed() == [] and list(store.root.iterdir()) == []
    store.close()
