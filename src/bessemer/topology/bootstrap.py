"""Connects the processes of a run. Called once, by the command line, never on import."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import sys
import threading
from typing import Any

import jax

from bessemer.errors import InputError, StorageError
from bessemer.topology.distributed import client, first_line, process_count
from bessemer.topology.lost_peer import answer_roll_calls, catch_aborts
from bessemer.topology.mesh import TopologySettings

# The first process to end waits this long for the last: process 0 writes the report and copies it to a store. Nobody
# waits for a dead one, which heartbeats reveal.
SHUTDOWN_SECONDS = 3600

_stdout_kept = False


def start_distributed(settings: TopologySettings | None = None) -> bool:
    """Join the other processes, if there are any; return whether this run has more than one.

    Settings (or BESSEMER_COORDINATOR, BESSEMER_PROCESSES, BESSEMER_PROCESS_ID) come first; otherwise JAX recognizes
    SLURM, Open MPI, Kubernetes jobs and TPU pods. Call it before any device is used; a second call does nothing.
    """
    settings = settings or TopologySettings()
    if settings.platform != "auto":
        jax.config.update("jax_platforms", "cuda" if settings.platform == "gpu" else settings.platform)
    if client() is not None:
        return process_count() > 1
    explicit = _explicit(settings)
    found = cluster()
    if explicit is None and found is None:
        return False
    if explicit is None and found == "Kubernetes":
        _check_kubernetes()
    keep_stdout_clean()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM in native code; our loop and StepAgreement handle stopping.
    jax.config.update("jax_enable_preemption_service", False)
    where = f"the coordinator {explicit['coordinator_address']}" if explicit else f"{found}'s coordinator"
    _connect(explicit or {"local_device_ids": slurm_local_devices()}, where, settings)
    catch_aborts()
    answer_roll_calls()
    return process_count() > 1


def keep_stdout_clean() -> None:
    """Send what native code prints on stdout to stderr, since gloo's messages would break `--json`.

    Python's `sys.stdout` still reaches the real stdout.
    """
    global _stdout_kept
    if _stdout_kept:
        return
    _stdout_kept = True
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(real, "w", buffering=1, encoding="utf-8", errors="replace")


def _connect(arguments: dict[str, Any], where: str, settings: TopologySettings) -> None:
    """Call `jax.distributed.initialize` in a thread, and raise StorageError after the time limit.

    At its own limit it would abort the process (134). The thread is left behind: the caller reports and exits.
    """
    failures: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                **arguments,
                initialization_timeout=settings.start_timeout + 60,
                heartbeat_timeout_seconds=settings.peer_timeout,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            failures.append(error)

    thread = threading.Thread(target=initialize, name="bessemer-connect", daemon=True)
    thread.start()
    thread.join(settings.start_timeout)
    if thread.is_alive() or failures:
        reason = first_line(failures[0]) if failures else f"nobody answered for {settings.start_timeout} s"
        raise StorageError(
            f"could not join the other processes through {where} ({reason}). Check that every process was "
            "started, with different process ids and the same number of processes, and that the address can "
            "be reached; or raise topology.start_timeout."
        ) from (failures[0] if failures else None)


def _check_kubernetes() -> None:
    """Raise InputError if JAX cannot ask the cluster for the peers: that needs a package and a permission."""
    if importlib.util.find_spec("kubernetes") is None:
        raise InputError(
            "this is a pod of an indexed Kubernetes job, and nothing says where process 0 is. Set BESSEMER_COORDINATOR "
            "(host:port of pod 0), BESSEMER_PROCESSES and BESSEMER_PROCESS_ID ($JOB_COMPLETION_INDEX) in its manifest, "
            "as `bessemer launch k8s` does; or install jax[k8s] and let the service account read pods and jobs."
        )


def _explicit(settings: TopologySettings) -> dict[str, Any] | None:
    """Return the arguments given by settings or environment: all three, or None, or an error."""
    coordinator = settings.coordinator or os.environ.get("BESSEMER_COORDINATOR") or None
    processes = settings.processes if settings.processes is not None else _number("BESSEMER_PROCESSES")
    process_id = settings.process_id if settings.process_id is not None else _number("BESSEMER_PROCESS_ID")
    given = {"coordinator": coordinator, "processes": processes, "process_id": process_id}
    missing = [f"topology.{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if coordinator is None or processes is None or process_id is None:
        raise InputError(
            f"{' and '.join(missing)} missing: a run of several processes needs topology.coordinator "
            "(host:port of process 0), topology.processes and topology.process_id together."
        )
    host, _, port = coordinator.rpartition(":")
    if not port.isdigit() or not host:
        raise InputError(f"topology.coordinator='{coordinator}' is not host:port.")
    if not 0 <= process_id < processes:
        raise InputError(f"topology.process_id={process_id} is not in 0..{processes - 1} (topology.processes).")
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process_id,
        "cluster_detection_method": "deactivate",
    }


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdigit():
        raise InputError(f"environment variable {variable}='{text}' is not a whole number.")
    return int(text)


def cluster() -> str | None:
    """Return the launcher (SLURM, Open MPI, Kubernetes, TPU pod) if this is one of several processes, else None.

    A batch script's shell or a notebook pod is inside a cluster too, but alone: it must not wait for peers.
    """
    env = os.environ
    tpu = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    if _count("SLURM_NTASKS") > 1 and "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env:
        return "SLURM"
    if _count("OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    listed = "," in env.get("TPU_WORKER_HOSTNAMES", "") or "," in env.get("TPU_PROCESS_ADDRESSES", "")
    if tpu and (listed or _count("MEGASCALE_NUM_SLICES") > 1):
        return "TPU pod"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return "Kubernetes"
    if tpu and "TPU_SKIP_MDS_QUERY" not in env and "TPU_WORKER_HOSTNAMES" not in env:
        return "TPU pod"  # a cloud TPU VM finds its peers through the metadata server, which JAX asks
    return None


def slurm_local_devices() -> list[int] | None:
    """Return the GPUs of this SLURM task where JAX's rule (local task number) is wrong; None where it is right.

    One task per node gets every GPU of the node; tasks that each see one GPU use number 0.
    """
    if "SLURM_PROCID" not in os.environ:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = len(visible.split(",")) if visible else _count("SLURM_GPUS_ON_NODE")
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if gpus == 0 or tasks is None:
        return None
    if int(tasks.group()) == 1:
        return list(range(gpus))
    return [0] if gpus == 1 else None


def _count(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0
