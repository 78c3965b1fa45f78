"""Atomic files and directories, and storage errors with a remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer.errors import StorageError

TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")
"""The neighbor that `atomic_write` renames."""

_REMEDIES = {
    errno.ENOSPC: "The disk is full: free space (or delete old runs) and continue with `bessemer resume`.",
    errno.EDQUOT: "The disk quota is used up: free space and continue with `bessemer resume`.",
    errno.EROFS: "The file system is read-only: choose another --runs directory or mount it writable.",
    errno.EACCES: "Permission denied: choose a --runs directory this user may write to.",
    errno.EPERM: "Not permitted: choose a --runs directory this user may write to.",
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


def atomic_write(path: str | Path, data: str | bytes, *, sync: bool = False) -> None:
    """Write a neighbor and rename it over `path`: readers see the old file or the new one, never a part.

    `sync=True` also survives a power cut; without it only a killed process.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the disk that failed the write may fail this too
            temporary.unlink(missing_ok=True)
        raise storage_error(f"cannot write {path}", error) from error
    if sync:
        sync_directory(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new neighbor of `path` and rename it when the block ends: `path` is whole or absent.

    If another process has committed the same directory in the meantime, that one is kept and ours is deleted.
    """
    unique = uuid.uuid4().hex[:12]  # process ids repeat on shared disks
    temporary = path.with_name(f"{path.name}.{unique}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        try:
            os.rename(temporary, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        discard(temporary)


def remove_leftovers(directory: str | Path) -> None:
    """Delete what processes killed inside `atomic_write` left. Only the holder of the directory's lock may call it."""
    for path in Path(directory).glob(".*.tmp"):
        owner = TEMPORARY.fullmatch(path.name)
        if owner and int(owner.group(1)) != os.getpid():  # our own may be the heartbeat's, at this moment
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
