"""Many processes: settings, launchers, and two real processes that agree, wait and report the missing one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.processes import TIMEOUT, finish, free_port

from bessemer.errors import InputError
from bessemer.topology import StepAgreement, TopologySettings, agree, barrier, broadcast, forget, start_distributed
from bessemer.topology.bootstrap import cluster, slurm_local_devices

CLUSTER = ("SLURM", "OMPI", "KUBERNETES", "JOB_COMPLETION", "TPU_", "MEGASCALE", "BESSEMER_", "CUDA_VISIBLE")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(CLUSTER):
            monkeypatch.delenv(name)


def test_alone_everything_is_trivial():
    assert start_distributed() is False
    barrier("nothing")
    assert broadcast("value", lambda: "x") == "x"
    forget("value")
    agree("value", "x")
    stop = StepAgreement()
    assert not stop.due(7)
    stop.propose(7)
    stop.propose(9)
    assert stop.due(7) and not stop.due(6)


@pytest.mark.parametrize(
    ("env", "settings", "words"),
    [
        ({}, {"coordinator": "h:1"}, ["topology.processes", "topology.process_id"]),
        ({"BESSEMER_PROCESSES": "2"}, {}, ["topology.coordinator"]),
        ({"BESSEMER_PROCESSES": "two"}, {}, ["BESSEMER_PROCESSES='two'"]),
        ({}, {"coordinator": "h", "processes": 2, "process_id": 0}, ["host:port"]),
        ({"BESSEMER_PROCESS_ID": "2"}, {"coordinator": "h:1", "processes": 2}, ["process_id=2", "0..1"]),
    ],
)
def test_incomplete_process_settings_are_named(env, settings, words, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        start_distributed(TopologySettings(**settings))
    assert all(word in str(caught.value) for word in words)


def test_launchers_are_recognised_only_when_there_are_peers(monkeypatch):
    assert cluster() is None
    slurm = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert cluster() is None
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert cluster() == "SLURM"
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert slurm_local_devices() == list(range(8))
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2)")
    assert slurm_local_devices() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert slurm_local_devices() == [0]


def test_a_pod_that_does_not_know_its_peers_is_told_what_to_set(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert cluster() is None, "a pod of something else, a notebook"
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert cluster() == "Kubernetes"
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(InputError, match=r"BESSEMER_COORDINATOR.*bessemer launch k8s"):
        start_distributed()


WORKER = """
import os, sys
from bessemer.errors import BessemerError, Stopped, StorageError, TrainingError
from bessemer.topology import *
from bessemer.topology.distributed import client
index, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
settings = TopologySettings(coordinator=f"127.0.0.1:{port}", processes=2, process_id=index)
assert start_distributed(settings) and start_distributed(settings)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from bessemer.checkpoint import Checkpoints

topology = make_topology(TopologySettings(data=1, fsdp=2))
assert (process_index(), process_count(), topology.is_process_zero) == (index, 2, index == 0)
rows = NamedSharding(topology.mesh, P("fsdp"))
x = jax.make_array_from_callback((4,), rows, lambda i: np.arange(4.0)[i])
total = float(jax.jit(jnp.sum, out_shardings=topology.replicated)(x))

store = Checkpoints(folder, process_zero=topology.is_process_zero)
store.save(5, {"x": x}, files={"loop.json": "{}"}, wait=True)
store.save(5, {"x": x})
step, messages = store.newest_valid()
back = store.restore(step, {"x": x})["x"]
same = all(bool((np.asarray(a.data) == np.asarray(b.data)).all())
           for a, b in zip(x.addressable_shards, back.addressable_shards))

from bessemer.training.feed import device_batch
seen = []
def read(first, end):
    seen.extend(range(first, end))
    return {"x": np.zeros((end - first, 2), np.int32)}
device_batch(read, {"x": ((2,), np.int32)}, 4, 2, NamedSharding(topology.mesh, P(None, "fsdp")))
print("ROWS", sorted(seen), flush=True)

stop = StepAgreement()
last = 0
for step in range(1, 12):
    if step == 2 and index == 1:
        stop.propose(step)
    barrier(f"step {step}")
    last = step
    if stop.due(step):
        break
for number in range(3):  # alike twice, then not; what was read is not kept
    told = broadcast("draw", lambda: f"a:{number}")
    try:
        agree("the draw", f"draw {number if number < 2 else index}")
    except StorageError as error:
        print("DISAGREE", number, error, flush=True)
    forget("draw")
    assert told == f"a:{number}"
barrier("forgotten")
kept = [key for kind in ("broadcast", "agree") for key, _ in client().key_value_dir_get(f"bessemer/{kind}")]
print("KEPT", sum("draw" in key for key in kept), flush=True)

class Interrupted(Stopped):
    pass

for name, kind in (("lottery", TrainingError), ("pause", Interrupted)):
    def lose():
        raise kind("unlucky: again")
    try:
        broadcast(name, lose)
    except BessemerError as error:
        print("LOST", name, error.exit_code, error, flush=True)
print("RESULT", total, same, store.committed(), messages, last, flush=True)
if index == 0:
    try:
        barrier("nobody else comes", 1.0)
    except StorageError as error:
        print("ERROR", error, flush=True)
else:
    import time
    time.sleep(3)
os._exit(0)
"""


def test_two_processes_commit_together_and_stop_at_one_step(tmp_path):
    port = free_port()
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(index), str(port), str(tmp_path / "checkpoints")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for index in range(2)
    ]
    outputs = [worker.communicate(timeout=TIMEOUT) for worker in workers]
    for (out, err), rows in zip(outputs, ([0, 1, 4, 5], [2, 3, 6, 7]), strict=True):
        assert f"ROWS {rows}" in out, "of two micro-batches of four rows, each process reads its own half"
        results = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert results == ["RESULT 6.0 True [5] [] 5"], out + err
        assert "[Gloo]" not in out
        assert "DISAGREE 2 the processes do not agree on the draw: process 1 has draw 1, process 0 draw 0." in out
        assert out.count("DISAGREE") == 1
        lost = [line.split()[:3] for line in out.splitlines() if line.startswith("LOST") and "unlucky: again" in line]
        assert lost == [["LOST", "lottery", "3"], ["LOST", "pause", "75"]], "a subclass keeps its exit code, too"
        assert "KEPT 2" in out, "what the two said last, and nothing of what was shared"
    assert "missing: process 1" in outputs[0][0]


WAITING = """
import os, sys, time
from pathlib import Path
from bessemer.topology import *
index, port, folder, lost, how = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
settings = TopologySettings(coordinator=f"127.0.0.1:{port}", processes=2, process_id=index, peer_timeout=10)
start_distributed(settings)

def record(what):
    (folder / f"{index}.said").write_text(what)
    return what + " The record is written."

with farewell(record):
    (folder / f"{index}.ready").touch()
    if index == lost and how == "abort":
        os.abort()
    time.sleep(600)
"""


ABORTS = "abort"
LOSSES = [
    pytest.param(0, signal.SIGKILL, id="0 killed"),
    pytest.param(1, signal.SIGSTOP, id="1 frozen", marks=pytest.mark.slow),
    pytest.param(1, ABORTS, id="1 aborts by itself", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("lost", "how"), LOSSES)
def test_a_lost_process_ends_those_that_wait(tmp_path, lost, how):
    """Stuck where no error comes from, as in a collective between GPUs: the other records it and leaves with exit 4. An
    abort for another reason stays an abort."""
    port, env = free_port(), {**os.environ, "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, str(index), str(port), str(tmp_path), str(lost), str(how)],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for index in range(2)
    ]
    try:
        while len(list(tmp_path.glob("*.ready"))) < 2:
            assert all(worker.poll() is None for worker in workers)
            time.sleep(0.02)
        if how != ABORTS:
            workers[lost].send_signal(how)
        _, said = workers[1 - lost].communicate(timeout=TIMEOUT)
        assert workers[1 - lost].returncode == 4, said
        who = "process 0, which leads the others," if lost == 0 else "another process"
        assert f"error: process {1 - lost} cannot continue: {who} is not responding" in said
        assert "The record is written." in said and (tmp_path / f"{1 - lost}.said").exists()
        assert how != ABORTS or workers[lost].wait() == -signal.SIGABRT
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


LATE = """
import sys, time
from bessemer.topology import *
index, port = int(sys.argv[1]), sys.argv[2]
start_distributed(TopologySettings(coordinator=f"127.0.0.1:{port}", processes=2, process_id=index, peer_timeout=10))
if index == 0:
    time.sleep(20)
"""


@pytest.mark.slow
def test_the_first_to_end_waits_for_the_last(tmp_path):
    """Process 0 has a report to write, for longer than the time after which a silent process counts as lost."""
    port, env = free_port(), {**os.environ, "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [
        subprocess.Popen([sys.executable, "-c", LATE, str(index), str(port)], env=env, **pipes) for index in range(2)
    ]
    codes, outputs = finish(workers)
    assert codes == [0, 0], outputs
