"""The run directory: the files of a run, its status, and the lock that lets one process write.

On one host the kernel's lock on the file decides: it ends with the process, even after kill -9. Between hosts a file
system may not share locks, so the file also holds the owner and a heartbeat, which other hosts check.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bessemer.config.bounded import parse_json, read_json
from bessemer.errors import InputError, StorageError
from bessemer.storage.files import atomic_write, storage, try_lock
from bessemer.storage.remote import refuse_remote

GIVEN = "given from Python"
"""The row of derived.json with the parts that the caller passed from Python, such as dataset_train."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
_STEP = re.compile(r"step_(\d{8,})")
_status_writes = threading.Lock()  # the loop and the heartbeat thread both read, change and write the status


def check_run_name(name: str) -> str:
    """Return `name` when it can be a directory name anywhere: [A-Za-z0-9._-], at most 80, not `.` or `..`."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(f"'{name}' cannot be a run name: use 1 to 80 letters, digits, dots, dashes and underscores.")
    return name


def default_run_name(prefix: str = "run") -> str:
    """`prefix`-YYYYmmdd-HHMMSS."""
    return check_run_name(f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}")


def recipe_label(recipe: Any) -> str:
    """Return the part of a run's name that comes from its recipe: a name, a file, or neither."""
    label = Path(recipe).stem if isinstance(recipe, str | Path) else "run"
    return re.sub(r"[^A-Za-z0-9._-]", "-", label)[:60]


def new_run(recipe: Any, name: str | None, root: str | Path, resume: str = "bessemer resume") -> RunDirectory:
    """Return the directory of a new run, by its name or else recipe and time.

    Raise InputError if a run is there, with `resume`, the command that continues it.
    """
    directory = RunDirectory(Path(root) / (check_run_name(name) if name else default_run_name(recipe_label(recipe))))
    if directory.exists():
        raise InputError(
            f"a run named '{directory.name}' already exists at {directory.path}. Continue it with "
            f"`{resume} {directory.word}`, or choose another --name."
        )
    return directory


def step_name(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of_name(name: str) -> int | None:
    """Return the step of a final directory name; None for anything else (a `.tmp`, a stray file)."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


class _Inside:
    """A path in the run directory, by its name; `about` says what is there (docs/reference/run-directory.md)."""

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self.about = about

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, which scripts depend on, and its status.json."""

    path: Path

    config = _Inside("config.yaml", "The resolved configuration: every setting, with the origin of its value.")
    derived = _Inside("derived.json", "What the program derived or chose, with the reason.")
    branches = _Inside("branches.json", "Steps after which the run continued with other settings (`resume --change`).")
    stages = _Inside("stages.json", "The last step of each stage, for runs with several.")
    facts = _Inside(
        "facts.json", "Counts of parameters and tokens, FLOPs, devices, versions and start-up times, for the report."
    )
    status = _Inside(
        "status.json", "State (running, done, stopped, failed), step, process, heartbeat, exit code, message."
    )
    origin = _Inside(
        "origin.json", "Signature of the user who started the run; `resume` checks it before it runs code."
    )
    lock = _Inside("lock", "Held by the process that writes the run.")
    log = _Inside("log.txt", "Everything that was printed, and tracebacks.")
    metrics = _Inside("metrics.jsonl", "One row per report, validation and evaluation.")
    samples = _Inside("samples.jsonl", "Text that the model generated during training.")
    weights = _Inside("weights.jsonl", "Histograms of parameters, with `callbacks=[weight_distribution]`.")
    eval = _Inside("eval", "Results of `bessemer eval`, one JSON file each.")
    checkpoints = _Inside("checkpoints", "One directory per checkpoint: state, loop state, configuration, tokenizer.")
    reference = _Inside("reference", "Frozen reference weights or their log-probabilities, written once.")
    report = _Inside("report.md", "Results, curves, settings, and how to reproduce the run.")
    plots = _Inside("plots", "The report's curves as PNG files.")
    model = _Inside("model", "The final weights (safetensors), with their configuration and tokenizer.")

    def __post_init__(self) -> None:
        refuse_remote(
            self.path,
            "a run directory is locked, renamed and appended to, so it must be on a disk",
            "keep --runs local and set logging.mirror=s3://…, which copies checkpoints there; "
            "`bessemer resume URL/NAME` continues from the copy anywhere",
        )
        object.__setattr__(self, "path", Path(self.path).absolute())

    @staticmethod
    def names() -> set[str]:
        """Return the names of all of these paths."""
        return {value.name for value in vars(RunDirectory).values() if isinstance(value, _Inside)}

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def word(self) -> str:
        """Return the path quoted for a shell, for printed commands."""
        return shlex.quote(str(self.path))

    def given_parts(self) -> set[str]:
        """Return the names of the parts that the caller passed from Python when the run was started."""
        if not self.derived.is_file():
            return set()
        try:
            return set(read_json(self.derived).get(GIVEN, {}).get("value", []))
        except (ValueError, AttributeError, TypeError) as error:
            raise InputError(
                f"{self.derived} is damaged ({error}). Delete it; it is written again on resume."
            ) from error

    def step_of_stage(self, name: str) -> int:
        """Return the last step of the stage of that name (stage-1, …), whose checkpoint is kept."""
        try:
            listed = read_json(self.stages) if self.stages.is_file() else []
            ends = {str(stage["name"]): int(stage["end"]) for stage in listed}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.stages} cannot be read ({error}). Give --step as a number.") from error
        if name not in ends:
            known = f"it has {', '.join(ends)}" if ends else "it has one stage only; give a number"
            raise InputError(f"{self.path} has no stage '{name}': {known}.")
        return ends[name]

    def exists(self) -> bool:
        """Return whether a run was ever created here: an empty directory is not one."""
        return self.config.is_file() or self.status.is_file() or self.checkpoints.is_dir()

    def create(self, exist_ok: bool = False) -> RunDirectory:
        """Make the directory. Raise InputError if a run is there already: it must not silently continue as this one."""
        check_run_name(self.name)
        if self.exists() and not exist_ok:
            raise InputError(
                f"the run '{self.name}' already exists at {self.path}. Continue it with "
                f"`bessemer resume {self.name}`, or choose another --name."
            )
        with storage("cannot create the run directory"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.eval.mkdir(exist_ok=True)
        return self

    def write_status(self, **fields: Any) -> dict[str, Any]:
        """Merge `fields` (state, step, exit_code, message) into status.json, with a new heartbeat."""
        with _status_writes:
            status = {**self.read_status(), **fields}
            status.update(pid=os.getpid(), host=socket.gethostname(), heartbeat=time.time())
            atomic_write(self.status, json.dumps(status, indent=1) + "\n")
            return status

    def read_status(self) -> dict[str, Any]:
        """Return the status; {} before the first one."""
        try:
            found = read_json(self.status)
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            raise InputError(f"{self.status} is not valid JSON ({error}). Delete it; it is rebuilt.") from error
        return found if isinstance(found, dict) else {}


# --- one writer per run directory ---


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
