"""Atomic files and directories, locks, storage errors with a remedy, and the named artifacts of a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from bessemer.errors import InputError, StorageError

TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")
"""The temporary name that `atomic_file` and `atomic_directory` rename from; the group is the writer's process id."""

_REMEDIES = {
    errno.ENOSPC: "The disk is full: free space (or delete old runs) and continue with `bessemer resume`.",
    errno.EDQUOT: "The disk quota is used up: free space and continue with `bessemer resume`.",
    errno.EROFS: "The file system is read-only: choose another --runs directory or mount it writable.",
    errno.EACCES: "Permission denied: choose a --runs directory this user may write to.",
    errno.EPERM: "Not permitted: choose a --runs directory this user may write to.",
    errno.EEXIST: "A file of that name is in the way: choose another path, or move it.",
    errno.ENOTDIR: "A part of that path is a file: choose another path, or move it.",
    errno.ENOENT: "The directory has vanished: it was deleted, moved or unmounted while in use, or never made.",
    errno.ESTALE: "The network file system dropped the directory: check the mount, then `bessemer resume`.",
}


def storage_error(what: str, error: OSError) -> StorageError:
    """Return the StorageError that states what failed, where and why, with the remedy for the usual causes."""
    where = f" ({error.filename})" if error.filename else ""
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "Check the disk, then continue with `bessemer resume`.")
    return StorageError(f"{what}{where}: {reason}. {remedy}")


@contextmanager
def storage(what: str) -> Iterator[None]:
    """Turn an OSError inside into the StorageError that explains it."""
    try:
        yield
    except OSError as error:
        raise storage_error(what, error) from error


@contextmanager
def atomic_file(
    path: str | Path, *, sync: bool = False, overwrite: bool = True, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Yield a new neighbor of `path` to write to, and rename it over `path` when the block ends: readers see the old
    file or the new one, never a part.

    sync: survive a power cut, not only a killed process. overwrite=False: a file that is there already stays.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
            temporary.unlink()
    except BaseException:
        discard(temporary)
        raise
    if sync:
        sync_directory(path.parent)


def atomic_write(path: str | Path, data: str | bytes, *, sync: bool = False) -> None:
    """Write a whole file with `atomic_file`. Raise StorageError if the disk fails."""
    with storage(f"cannot write {path}"), atomic_file(path, sync=sync) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_directory(path: Path, *, exist_ok: bool = False) -> Iterator[Path]:
    """Yield a new neighbor of `path` and rename it when the block ends: `path` is whole or absent. If the block deletes
    the neighbor, nothing is renamed.

    exist_ok: a directory that another process has committed in the meantime is kept, and ours is deleted.
    """
    unique = uuid.uuid4().hex[:12]  # process ids repeat on shared disks
    temporary = path.with_name(f".{path.name}.{unique}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if temporary.is_dir():
            commit_directory(temporary, path, exist_ok=exist_ok)
    finally:
        discard(temporary)


def commit_directory(temporary: Path, path: Path, *, exist_ok: bool = False) -> None:
    """Rename a finished directory to its final name, durably. exist_ok: see `atomic_directory`."""
    try:
        os.rename(temporary, path)
    except OSError:
        if not (exist_ok and path.is_dir()):
            raise
        discard(temporary)
    sync_directory(path.parent)


def remove_leftovers(directory: str | Path) -> None:
    """Delete what processes killed inside `atomic_file` left. Only the holder of the directory's lock may call it."""
    for path in Path(directory).glob(".*.tmp"):
        owner = TEMPORARY.fullmatch(path.name)
        if path.is_dir() or owner is None:
            continue  # a directory belongs to `atomic_directory`
        if int(owner.group(1)) != os.getpid():  # our own may be the heartbeat's, at this moment
            with storage("cannot remove a file that a killed process left"):
                path.unlink(missing_ok=True)


def discard(path: str | Path) -> None:
    """Delete a directory, file or link as far as possible; a link is removed, not what it points to."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def sync_directory(path: str | Path) -> None:
    """Make renames inside `path` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def home() -> Path:
    """Return the user's directory for prepared data, compiled programs and the secret that marks runs as started here:
    BESSEMER_HOME, or the user's cache directory. The environment is read on every call."""
    given = os.environ.get("BESSEMER_HOME")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "bessemer"


# Locks: one writer per directory.

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def try_lock(handle: int, shared: bool = False) -> bool | None:
    """Lock an open file without waiting. True: locked. False: another process holds it. None: this file system has no
    locks. An exclusive lock is tried for 0.6 s, because whoever asks for the owner holds a shared one for a moment."""
    for attempt in range(3):
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if shared:
                return False
            time.sleep(0.1 * (attempt + 1))
    return False


@contextmanager
def exclusive(
    directory: Path, what: str, *, name: str = ".lock", wait: bool = False, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock file `name` in `directory`. The kernel releases it when its owner dies.

    If another process has it: wait (`on_wait` gets the owner, once) or raise InputError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write to '{directory}': {error.strerror}.") from error
    try:
        while not (locked := try_lock(file)):
            if locked is None:
                raise StorageError(f"the file system of '{directory}' has no locks: choose a directory on another.")
            owner = os.pread(file, 200, 0).decode(errors="replace") or "another process"
            if wait and on_wait is not None:
                on_wait(owner)
                on_wait = None
            if not wait:
                raise InputError(
                    f"{what} '{directory}' is already running ({owner}): wait for it, or choose another directory."
                )
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(file)


class Lifetime(Enum):
    CHECKPOINT = "in each checkpoint, and deleted with it"
    RUN = "written once per run, before the first step that uses it"
    SHARED = "written once for all runs that agree on its key"


@dataclass(frozen=True)
class Artifact:
    """A file or folder; a `*` in its name stands for the key of its content."""

    name: str
    lifetime: Lifetime

    def path(self, root: Path, key: str = "") -> Path:
        """Return its path. root: the checkpoint, the run directory or the data root, by the lifetime."""
        folder = root / "reference" if self.lifetime is Lifetime.RUN else root
        return folder / self.name.replace("*", key)

    def all(self, root: Path) -> list[Path]:
        """Return those that are there, whatever their key, sorted."""
        return sorted(self.path(root).parent.glob(Path(self.name).name))

    def write(self, root: Path, text: str, key: str = "") -> None:
        """Write a small file atomically. Raise StorageError if the disk fails."""
        path = self.path(root, key)
        with storage(f"cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)


ALLOCATION = Artifact("lookup.json", Lifetime.CHECKPOINT)
ROLLOUT = Artifact("rollout.safetensors", Lifetime.CHECKPOINT)
PASS_RATES = Artifact("pass-rates.safetensors", Lifetime.CHECKPOINT)
ROLLOUT_AHEAD = Artifact("rollout-ahead.safetensors", Lifetime.CHECKPOINT)
REFERENCE_WEIGHTS = Artifact("", Lifetime.RUN)  # step_N of each reference taken
REFERENCE_LOGPS = Artifact("logps-*.safetensors", Lifetime.RUN)
TEACHER_RECORD = Artifact("teacher.json", Lifetime.RUN)
TEACHER_TARGETS = Artifact("taught/*", Lifetime.SHARED)
