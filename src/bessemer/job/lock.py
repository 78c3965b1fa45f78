"""One writer per run directory.

On one host the kernel's lock on the file decides: it ends with the process, even after kill -9. Between hosts a file
system may not share locks, so the file also holds the owner and a heartbeat, which other hosts check.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from bessemer.config.bounded import parse_json
from bessemer.errors import InputError, StorageError
from bessemer.job.directory import RunDirectory
from bessemer.storage.files import storage, try_lock

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


class RunLock:
    """Context manager that owns a run directory; `message` says so when a stale lock was taken over.

    Held by someone alive: InputError. The heartbeat (lock, and status.json unless `status` is False) runs in a
    daemon thread.
    """

    def __init__(self, run: RunDirectory | str | Path, *, status: bool = True):
        self.run = run if isinstance(run, RunDirectory) else RunDirectory(Path(run))
        self._beats_status = status
        self.message: str | None = None
        self._handle: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> RunLock:
        with storage("cannot lock the run directory"):
            handle = os.open(self.run.lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locked = try_lock(handle)
            owner = _read(handle)
            if locked is False or _alive_elsewhere(owner) or (locked is None and _alive_here(owner)):
                raise InputError(_held(self.run, owner))
            if owner:
                self.message = (
                    f"took over the lock of pid {owner.get('pid')} on {owner.get('host')}, which ended "
                    f"without releasing it (last heartbeat {_ago(owner)})."
                )
            self._handle = handle
            self._write()
        except (InputError, OSError, StorageError):
            self._handle = None
            os.close(handle)
            raise
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="bessemer-heartbeat", daemon=True)
        self._thread.start()
        return self

    def release(self) -> None:
        """Stop the heartbeat and free the lock. The file stays: unlinking it would race with a newcomer."""
        if self._handle is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        handle, self._handle = self._handle, None
        try:
            os.ftruncate(handle, 0)
        finally:
            os.close(handle)

    def is_intact(self) -> bool:
        """Return whether the lock file in the directory is still the one that this process holds."""
        if self._handle is None:
            return False
        try:
            return os.path.samestat(os.stat(self.run.lock), os.fstat(self._handle))
        except OSError:
            return False

    def check_intact(self) -> None:
        """Raise StorageError if the directory was deleted, moved or replaced since it was locked.

        Some of its files may be there again, as `rm -rf` races with whoever writes: what it held is lost all the same.
        """
        if not self.is_intact():
            raise StorageError(
                f"the run directory {self.run.path} vanished: it was deleted, moved or replaced during the run, so "
                "what is there now is incomplete. Start the run again, or put the directory back and resume it."
            )

    @staticmethod
    def owner(run: RunDirectory | str | Path) -> dict[str, Any] | None:
        """Return the process that owns the run now, or None; tells a running run from a killed one."""
        path = run.lock if isinstance(run, RunDirectory) else Path(run) / "lock"
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            free = try_lock(handle, shared=True)
            owner = _read(handle)
        finally:
            os.close(handle)
        if free is False:
            return owner or {"pid": None, "host": None}
        alive = _alive_elsewhere(owner) or (free is None and _alive_here(owner))
        return owner if alive else None

    @staticmethod
    def check_free(run: RunDirectory) -> None:
        """Raise what `acquire` would, without taking the lock: for a look at the run before working in it."""
        owner = RunLock.owner(run)
        if owner is not None:
            raise InputError(_held(run, owner))

    def _write(self) -> None:
        assert self._handle is not None
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "process_start": _process_start(os.getpid()),
            "heartbeat": time.time(),
        }
        with storage("cannot write the run's lock"):
            # In place, never by rename: the kernel's lock is on this very file.
            os.pwrite(self._handle, json.dumps(owner).ljust(256).encode(), 0)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            if not self.is_intact():
                return  # a heartbeat would make files again in a directory that is being deleted
            try:
                self._write()
                if self._beats_status and self.run.status.is_file():
                    self.run.write_status()
            except (StorageError, InputError):
                # A full disk, or an edited status.json. The loop's next write reports it; the lock itself
                # is in the kernel.
                continue


def _held(run: RunDirectory, owner: dict[str, Any]) -> str:
    ahead = float(owner.get("heartbeat") or 0) - time.time()
    clocks = (
        f" Its clock is {ahead:.0f} s ahead of ours, so its age is unknown: if that process is gone, delete {run.lock}."
        if ahead > STALE_SECONDS and owner.get("host") != socket.gethostname()
        else ""
    )
    return (
        f"the run '{run.name}' is in use by pid {owner.get('pid', '?')} on host {owner.get('host', '?')} (last "
        f"heartbeat {_ago(owner)}; {run.lock}). Two processes cannot write one run: wait for it or stop it, "
        f"or start another run with --name.{clocks}"
    )


def _read(handle: int) -> dict[str, Any]:
    try:
        owner = parse_json(os.pread(handle, 4096, 0) or b"{}")
    except ValueError:
        return {}  # caught in the middle of a heartbeat, or damaged: the kernel's lock still decides
    return owner if isinstance(owner, dict) else {}


def _alive_elsewhere(owner: dict[str, Any]) -> bool:
    """Return whether an owner on another host counts as alive: while its heartbeat is fresh."""
    if not owner or owner.get("host") == socket.gethostname():
        return False
    return time.time() - float(owner.get("heartbeat", 0)) < STALE_SECONDS


def _alive_here(owner: dict[str, Any]) -> bool:
    """Return whether the same process (pid and start time) still runs here; used where there are no kernel locks."""
    if not owner or owner.get("host") != socket.gethostname():
        return False
    started = _process_start(int(owner.get("pid", 0)))
    return started is not None and started == owner.get("process_start")


def _process_start(pid: int) -> int | None:
    """Start time in clock ticks since boot; tells a process from a later one with the same pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def _ago(owner: dict[str, Any]) -> str:
    beat = owner.get("heartbeat")
    return f"{max(0.0, time.time() - float(beat)):.0f} s ago" if beat else "unknown"
