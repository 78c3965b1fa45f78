"""Stop and resume, as in a terminal: SIGTERM to the process that trains, `bessemer resume` for a new one."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bessemer.dash.files import Folder
from bessemer.dash.runs import short
from bessemer.errors import InputError, Stopped
from bessemer.job import RunDirectory, RunLock
from bessemer.job.process import module_command, module_environment


@dataclass
class Resumed:
    """A process that was started here; it lives on when the page's server ends."""

    process: subprocess.Popen[bytes]
    output: Path
    begun: float = field(default_factory=time.time)

    def document(self) -> dict[str, Any]:
        code = self.process.poll()
        try:
            said = self.output.read_bytes()[-2000:].decode("utf-8", errors="replace")
        except OSError:
            said = ""
        failed = code not in (
            None,
            0,
            Stopped.exit_code,
        )  # a run that was stopped has saved: nothing went wrong
        return {
            "pid": self.process.pid,
            "exit_code": code,
            "failed": failed,
            "said": said.strip(),
            "begun": self.begun,
        }


class Actions:
    """What may be done to runs; `logs` holds what resumed processes say."""

    def __init__(self, folder: Folder, logs: Path):
        self.folder, self.logs = folder, logs
        self._resumed: dict[str, Resumed] = {}
        self._lock = threading.Lock()

    def stop(self, name: str) -> dict[str, Any]:
        """Ask the run to stop after its step, with a checkpoint."""
        run = self.folder.run(name)
        pid = self._owner(run)
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise InputError(f"pid {pid} cannot be stopped ({error.strerror}).") from error
        return {"pid": pid, "message": f"SIGTERM sent to pid {pid}: it stops after its step and saves."}

    def _owner(self, run: RunDirectory) -> int:
        """The process that holds the run's lock, on this host, with the lock open: nothing that a file claims."""
        owner = self._holder(run)
        if owner is None:
            raise InputError(f"no process is running in '{run.name}'.")
        if owner.get("host") != socket.gethostname():
            raise InputError(f"'{run.name}' runs on host {short(owner.get('host'), 100)}; stop it there.")
        pid = owner.get("pid")
        if not isinstance(pid, int) or pid <= 1 or not _has_open(pid, run.lock):
            raise InputError(
                f"the process that trains '{run.name}' cannot be identified; stop it in its terminal."
            )
        return pid

    def _holder(self, run: RunDirectory) -> dict[str, Any] | None:
        """Who holds the lock, as its file says; a file that makes no sense is nobody's."""
        try:
            return RunLock.owner(run) if self.folder.signature(run.lock) else None
        except (ValueError, TypeError, OverflowError):
            return None

    def resume(self, name: str) -> dict[str, Any]:
        """`bessemer resume` as a process of its own. Code that a foreign configuration names is not imported."""
        run = self.folder.run(name)
        if "/" in name:
            raise InputError("a phase goes on with the run it belongs to: resume that.")
        with self._lock:
            before = self._resumed.get(name)
            if before is not None and before.process.poll() is None:
                raise InputError(f"'{name}' is being resumed by pid {before.process.pid}.")
            if (owner := self._holder(run)) is not None:
                who = f"pid {short(owner.get('pid'), 20)} on host {short(owner.get('host'), 100)}"
                raise InputError(f"'{name}' is in use by {who}; it cannot be resumed while that lasts.")
            self.logs.mkdir(parents=True, exist_ok=True)
            output = self._log_of(run)
            with open(output, "wb") as file:
                self._resumed[name] = Resumed(self._start(run, file), output)
            return self._resumed[name].document()

    def _start(self, run: RunDirectory, output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            module_command("bessemer", "resume", str(run.path), "logging.progress=none"),
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _log_of(self, run: RunDirectory) -> Path:
        """Where a resumed process writes. Keyed by the whole path: runs of equal names in two directories are two."""
        return self.logs / f"{run.name}-{hashlib.sha256(bytes(run.path)).hexdigest()[:16]}.txt"

    def known(self, name: str) -> dict[str, Any] | None:
        """How the last resume from here went."""
        found = self._resumed.get(name)
        return None if found is None else found.document()


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has this file open."""
    wanted = os.stat(path)
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for handle in handles:
        try:
            found = os.stat(f"/proc/{pid}/fd/{handle}")
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
