"""The processes of a run: connected at the start, and ended when another one is lost.

They are connected once, by the command line, never on import. When another process is lost, this one ends with exit
code 4 and a message. A collective that fails raises in the main thread, which reports (`absent_processes`). One that
hangs (on accelerators, or with a frozen peer) never does: there JAX's coordination service counts heartbeats
(topology.peer_timeout), and its client aborts the process, at once if process 0 is gone. The abort comes from a native
thread, where Python's signal handlers never run, so the handler is a C function that calls back. JAX's own callback
argument cannot be used from Python (0.10: its argument is not converted).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import importlib.util
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bessemer.errors import InputError, StorageError
from bessemer.topology.distributed import client, coordinator, first_line, process_count, process_index, read_key
from bessemer.topology.mesh import TopologySettings

# --- connecting ---


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


# --- a lost process ---


ANSWER_SECONDS = 3.0
POLL_SECONDS = 2.0  # between two looks at whether somebody asks
ASKED, ALIVE, LOST = "bessemer/roll-call", "bessemer/alive", "bessemer/lost"

_record: Callable[[str], str] | None = None
_kept: list[Any] = []  # the C function must live as long as the process
_known: list[int] = []  # whom process 0 has declared lost


@contextlib.contextmanager
def farewell(record: Callable[[str], str]) -> Iterator[None]:
    """Call `record(what happened)`, in another thread, before a lost peer ends this process; it returns the message."""
    global _record
    before, _record = _record, record
    try:
        yield
    finally:
        _record = before


def catch_aborts() -> None:
    """From now on, turn an abort caused by a lost process into exit code 4; any other abort stays 134."""
    if not _kept:
        _kept.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(_aborted))
        install = ctypes.CDLL(None).signal
        install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        install(signal.SIGABRT, ctypes.cast(_kept[0], ctypes.c_void_p))


def _aborted(number: int) -> None:
    """Called by C in the aborting thread; when it returns, the abort continues."""
    if (gone := _who_is_gone()) is not None:
        _end(gone)


def _silent(absent: list[int]) -> str:
    return f"process {', '.join(map(str, absent))} is not responding"


def _end(gone: str) -> None:
    what = f"process {process_index()} cannot continue: {gone}."
    words = f"{what} `bessemer resume` continues from the last checkpoint."
    try:
        if _record is not None:
            words = _record(what)
    except BaseException as error:  # noqa: BLE001 -- the process ends in any case; the message includes the error
        words = f"{words} It could not be written down: {first_line(error)}."
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {words}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(StorageError.exit_code)


def _who_is_gone() -> str | None:
    """Say which process is gone, as far as the coordination service knows; None if the others are well."""
    if _known:
        return _silent(_known)
    if process_index() != 0 and not _listens(coordinator()):
        return "process 0, which leads the others, is not responding"
    if _is_well():  # the service knows nothing yet: gloo may have aborted because of a cut connection
        absent = absent_processes()
        return _silent(absent) if absent else None
    return "another process is not responding (JAX's own lines, above or on process 0, name it)"


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS):
            return True
    except OSError:
        return False


def _is_well() -> bool:
    """Ask the service from a new thread: the aborting one may hold a lock of the client, which then never answers."""
    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            answers.append(read_key(client(), "bessemer/well") is None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers == [True]


# --- roll call ---
# When one of many processes is lost, only its neighbors' collectives fail at once; the others wait for those. So a
# thread of every process answers, whatever its main thread waits in. Process 0, which hosts the service, leaves last:
# it declares who is lost, waits until the others have read it, and its own end ends the rest.


def absent_processes() -> list[int]:
    """Return who does not answer within four polls; without the service, the known lost, or process 0."""
    service = client()
    if service is None:
        return []
    everyone = set(range(process_count()))
    absent = everyone - {process_index()}
    deadline = time.monotonic() + 4 * POLL_SECONDS
    try:
        service.key_value_set(ASKED, "who is there?", allow_overwrite=True)
        service.key_value_set(f"{ALIVE}/{process_index()}", "here", allow_overwrite=True)
        while absent and time.monotonic() < deadline:
            time.sleep(0.1)
            absent = everyone - {int(name.rpartition("/")[2]) for name, _ in service.key_value_dir_get(ALIVE)}
        if process_index() == 0 and 0 < len(absent) < len(everyone) - 1:
            service.key_value_set(LOST, ",".join(map(str, sorted(absent))), allow_overwrite=True)
            time.sleep(6 * POLL_SECONDS)  # the others read it, report and leave
    except (RuntimeError, ValueError):
        return list(_known) or [0]
    return sorted(absent)


def answer_roll_calls() -> None:
    """Start the thread that answers until the program ends. Process 0 leaves when somebody is missing.

    It ends before the interpreter is taken apart: before Python 3.14 a thread that is in a call of the service then
    ends the process with an abort.
    """
    service: Any = client()
    over = threading.Event()

    def answer() -> None:
        try:
            while read_key(service, ASKED) is None:
                if over.wait(POLL_SECONDS):
                    return
            service.key_value_set(f"{ALIVE}/{process_index()}", "here", allow_overwrite=True)
            if process_index() == 0:
                if absent := absent_processes():
                    _end(_silent(absent))
                return
            while (lost := read_key(service, LOST)) is None:
                if over.wait(POLL_SECONDS / 4):
                    return
            _known.extend(int(number) for number in lost.split(","))
        except (RuntimeError, ValueError, AttributeError):  # the service has ended, with the run or with process 0
            return

    thread = threading.Thread(target=answer, name="bessemer-roll-call", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(ANSWER_SECONDS)

    atexit.register(end)  # later than jax's own exit function, hence run before it
