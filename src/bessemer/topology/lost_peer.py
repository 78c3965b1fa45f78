"""Ends this process with exit code 4 and a message when another process of the run is lost.

A collective that fails raises in the main thread, which reports (`absent_processes`). One that hangs (on accelerators,
or with a frozen peer) never does: there JAX's coordination service counts heartbeats (topology.peer_timeout), and its
client aborts the process, at once if process 0 is gone. The abort comes from a native thread, where Python's signal
handlers never run, so the handler is a C function that calls back. JAX's own callback argument cannot be used from
Python (0.10: its argument is not converted).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bessemer.errors import StorageError
from bessemer.topology.distributed import client, coordinator, first_line, process_count, process_index, read_key

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
