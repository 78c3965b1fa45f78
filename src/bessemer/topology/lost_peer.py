"""A process that is lost ends the others: with exit code 4 and a word, whatever they are waiting in.

A collective that fails raises in the main thread, which reports (`absent_processes`). One that hangs, on GPUs and TPUs
or with a frozen peer, never does; there JAX's coordination service counts heartbeats (topology.peer_timeout), and its
client aborts the process, as it does at once when process 0 is gone. That abort is caught here. It comes from native
code in a thread of JAX's, where Python's own signal handlers never run, so the handler is one of C that calls back;
JAX has an argument for a callback of its own, which cannot be used from Python (0.10: its argument is not converted).
"""

from __future__ import annotations

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
from bessemer.topology.distributed import client, coordinator, first_line, process_count, process_index

ANSWER_SECONDS = 3.0
_record: Callable[[str], str] | None = None
_kept: list[Any] = []  # the C function must live as long as the process


@contextlib.contextmanager
def farewell(record: Callable[[str], str]) -> Iterator[None]:
    """`record(what happened)` is called, in another thread, before a loss ends this process; it gives the last
    words."""
    global _record
    before, _record = _record, record
    try:
        yield
    finally:
        _record = before


def catch_aborts() -> None:
    """From now on an abort because of a lost process is exit code 4; any other stays what it is (134)."""
    if not _kept:
        _kept.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(_aborted))
        install = ctypes.CDLL(None).signal
        install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        install(signal.SIGABRT, ctypes.cast(_kept[0], ctypes.c_void_p))


def _aborted(number: int) -> None:
    """Called by C in the thread that aborts; when it returns, the abort goes on."""
    gone = who_is_gone()
    if gone is not None:
        _end(gone)


def leave_without(absent: list[int]) -> None:
    """Leave because others are lost, from whatever thread."""
    _end(_silent(absent))


def _silent(absent: list[int]) -> str:
    return f"process {', '.join(map(str, absent))} gives no sign of life"


def _end(gone: str) -> None:
    what = f"process {process_index()} cannot go on: {gone}."
    words = f"{what} `bessemer resume` continues from the last checkpoint."
    try:
        if _record is not None:
            words = _record(what)
    except BaseException as error:  # noqa: BLE001 -- the end is certain; what hindered the record is said with it
        words = f"{words} It could not be written down: {first_line(error)}."
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {words}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(StorageError.exit_code)


def who_is_gone() -> str | None:
    """What the coordination service still says; None: all is well with the others."""
    if known := known_lost():
        return _silent(known)
    if process_index() != 0 and not _listens(coordinator()):
        return "process 0, which leads the others, gives no sign of life"
    if (
        _is_well()
    ):  # the service knows nothing yet: gloo may have aborted because of a connection that was cut
        absent = absent_processes()
        return _silent(absent) if absent else None
    return "another process gives no sign of life (JAX's own lines, above or on process 0, name it)"


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS):
            return True
    except OSError:
        return False


def _is_well() -> bool:
    """Asked in a thread: the one that aborts may hold a lock of the client, which then never answers."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            client().key_value_try_get("bessemer/well")  # type: ignore[union-attr]
        except (RuntimeError, ValueError) as error:
            answers.append("NOT_FOUND" in str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers == [True]


# Who is still there: asked by a process whose collective has failed, answered by a thread of every other.
#
# Of a collective between many, only the neighbours of a lost process hear at once; the others wait for those,
# and would be taken for lost themselves. So a thread answers, whatever the main thread waits in. Process 0,
# where the service lives, is the last to leave: it says who is lost, waits until the others have read it, and
# its own end ends the rest.


ASKED, ALIVE, LOST = "bessemer/roll-call", "bessemer/alive", "bessemer/lost"
SECONDS = 2.0
"""Between two looks of the thread at whether somebody asks."""

_known: list[int] = []


def absent_processes(patience: float = 4 * SECONDS) -> list[int]:
    """Who gives no sign of life within `patience` seconds; without the service, who was said to be, or process 0."""
    service = client()
    if service is None:
        return []
    everyone = set(range(process_count()))
    absent = everyone - {process_index()}
    deadline = time.monotonic() + patience
    try:
        service.key_value_set(ASKED, "who is there?", allow_overwrite=True)
        service.key_value_set(f"{ALIVE}/{process_index()}", "here", allow_overwrite=True)
        while absent and time.monotonic() < deadline:
            time.sleep(0.1)
            absent = everyone - {int(name.rpartition("/")[2]) for name, _ in service.key_value_dir_get(ALIVE)}
        if process_index() == 0 and 0 < len(absent) < len(everyone) - 1:
            service.key_value_set(LOST, ",".join(map(str, sorted(absent))), allow_overwrite=True)
            time.sleep(6 * SECONDS)  # the others read it, say so and leave
    except (RuntimeError, ValueError):
        return known_lost() or [0]
    return sorted(absent)


def known_lost() -> list[int]:
    """Whom process 0 has said to be lost."""
    return list(_known)


def answer_roll_calls(leave: Callable[[list[int]], None]) -> None:
    """Begin to answer, for the life of the process. `leave(absent)` is called on process 0 when somebody is missing."""
    service: Any = client()

    def answer() -> None:
        try:
            while _read(service, ASKED) is None:
                time.sleep(SECONDS)
            service.key_value_set(f"{ALIVE}/{process_index()}", "here", allow_overwrite=True)
            if process_index() == 0:
                if absent := absent_processes():
                    leave(absent)
                return
            while (said := _read(service, LOST)) is None:
                time.sleep(SECONDS / 4)
            _known.extend(int(number) for number in said.split(","))
        except (
            RuntimeError,
            ValueError,
            AttributeError,
        ):  # the service has ended, with the run or with process 0
            return

    threading.Thread(target=answer, name="bessemer-roll-call", daemon=True).start()


def _read(service: Any, key: str) -> str | None:
    try:
        return str(service.key_value_try_get(key))
    except (RuntimeError, ValueError) as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
