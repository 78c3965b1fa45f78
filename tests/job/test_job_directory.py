"""Run directories: names, finding, status; and the lock, with a real second process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import InputError, StorageError
from bessemer.job import ExecutionSpec, RunDirectory, RunLock, check_run_name, find_run
from bessemer.job import directory as directory_module
from bessemer.storage.files import atomic_write, remove_leftovers


@given(st.text(max_size=90))
def test_a_run_name_is_one_safe_path_component(name):
    good = 0 < len(name) <= 80 and all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if good and name not in (".", ".."):
        assert check_run_name(name) == name
    else:
        with pytest.raises(InputError, match="run name"):
            check_run_name(name)


def test_a_path_as_a_word_of_a_command(tmp_path):
    assert RunDirectory(tmp_path / "a").word == str(tmp_path / "a")
    assert RunDirectory(tmp_path / "my runs/a").word == f"'{tmp_path}/my runs/a'"


def test_create_refuses_an_existing_run_and_names_resume(tmp_path):
    run = RunDirectory(tmp_path / "mine").create()
    assert run.checkpoints.is_dir() and run.eval.is_dir() and run.exists()
    with pytest.raises(InputError, match="bessemer resume mine"):
        RunDirectory(tmp_path / "mine").create()
    run.create(exist_ok=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_find_run_by_name_or_path_with_a_hint(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "quick-1").create()
    assert find_run("quick-1", tmp_path / "runs").path == run.path
    assert find_run(str(run.path)).path == run.path
    (tmp_path / "runs" / "empty").mkdir()
    with pytest.raises(InputError, match="Did you mean 'quick-1'"):
        find_run("quick1", tmp_path / "runs")
    with pytest.raises(InputError, match="no run 'empty'"):
        find_run("empty", tmp_path / "runs")


def test_a_folder_of_weights_is_no_run_and_says_what_to_do_with_it(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError, match=rf"bessemer import {folder} {tmp_path / 'runs' / 'llama'}.*init={folder}"):
        find_run(str(folder), tmp_path / "runs")


def test_status_merges_and_is_always_whole(tmp_path):
    run = RunDirectory(tmp_path / "r").create()
    assert run.read_status() == {}
    run.write_status(state="running", step=3)
    before = run.read_status()
    run.write_status()
    status = run.read_status()
    assert (status["state"], status["step"], status["host"]) == ("running", 3, socket.gethostname())
    assert status["heartbeat"] >= before["heartbeat"]
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "eval", "status.json"]


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path):
    atomic_write(tmp_path / "a", "one", sync=True)
    with pytest.raises(StorageError):
        atomic_write(tmp_path / "missing" / "a", "two")
    assert (tmp_path / "a").read_text() == "one"


def test_a_held_lock_names_its_owner_and_release_frees_it(tmp_path):
    run = RunDirectory(tmp_path / "r").create()
    with RunLock(run) as lock:
        assert lock.message is None
        owner = RunLock.owner(run)
        assert owner is not None and owner["host"] == socket.gethostname()
        with pytest.raises(InputError, match=rf"in use by pid {owner['pid']} on host"):
            RunLock(run).acquire()
    assert RunLock.owner(run) is None
    with RunLock(run) as again:
        assert again.message is None


HOLD = """
import sys, time
from bessemer.job import RunLock
RunLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_owner_is_taken_over_with_a_message(tmp_path):
    run = RunDirectory(tmp_path / "r").create()
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"pid {owner.pid}"):
            RunLock(run).acquire()
    finally:
        owner.kill()
        owner.wait()
    with RunLock(run) as lock:
        assert lock.message is not None and f"pid {owner.pid}" in lock.message


@pytest.mark.parametrize(("age", "held"), [(10, True), (100, False)])
def test_another_host_is_believed_while_its_heartbeat_is_fresh(tmp_path, age, held):
    run = RunDirectory(tmp_path / "r").create()
    run.lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "heartbeat": time.time() - age}))
    if held:
        with pytest.raises(InputError, match="pid 1 on host elsewhere"):
            RunLock(run).acquire()
    else:
        with RunLock(run) as lock:
            assert "elsewhere" in str(lock.message)


@pytest.mark.parametrize("alive", [True, False])
def test_without_kernel_locks_pid_and_start_time_decide(tmp_path, monkeypatch, alive):
    monkeypatch.setattr(directory_module, "try_lock", lambda *args, **kw: None)
    run = RunDirectory(tmp_path / "r").create()
    first = RunLock(run).acquire()
    try:
        if alive:
            with pytest.raises(InputError, match="in use"):
                RunLock(run).acquire()
        else:
            monkeypatch.setattr(directory_module, "_process_start", lambda pid: 1)
            RunLock(run).acquire().release()
    finally:
        first.release()


def test_the_heartbeat_refreshes_lock_and_status(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_module, "BEAT_SECONDS", 0.02)
    run = RunDirectory(tmp_path / "r").create()
    before = run.write_status(state="running", step=1)["heartbeat"]
    with RunLock(run):
        deadline = time.monotonic() + 120
        while run.read_status()["heartbeat"] == before and time.monotonic() < deadline:
            time.sleep(0.01)
    assert run.read_status()["heartbeat"] > before and run.read_status()["state"] == "running"


def test_local_spec_makes_the_root_and_finds_the_devices(tmp_path):
    spec = ExecutionSpec.local(tmp_path / "new" / "runs", name="mine")
    assert spec.root.is_dir() and spec.topology is not None and spec.topology.device_count == 8
    assert spec.run_directory.path == tmp_path / "new" / "runs" / "mine"
    assert ExecutionSpec.local(tmp_path).name.startswith("run-2")
    with pytest.raises(InputError):
        ExecutionSpec(name="../up")


def test_leftovers_of_killed_writers_are_removed_and_directories_stay(tmp_path):
    """A directory with a temporary name may be one that another process is still filling."""
    (tmp_path / ".status.json.1.tmp").touch()
    (tmp_path / f".status.json.{os.getpid()}.tmp").touch()
    (tmp_path / ".model.0123456789ab.1.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f".status.json.{os.getpid()}.tmp",
        ".model.0123456789ab.1.tmp",
    }
