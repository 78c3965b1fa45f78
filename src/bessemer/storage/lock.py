"""One writer per directory: an advisory lock that the kernel releases when its owner dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer.errors import InputError, StorageError

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
    directory: Path, what: str, *, wait: bool = False, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold `directory/.lock`. If another process has it: wait (`on_wait` gets the owner, once) or raise InputError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write to '{directory}': {error.strerror}.") from error
    try:
        while not (locked := try_lock(file)):
            if locked is None:
                raise StorageError(
                    f"the file system of '{directory}' has no locks: choose a directory on another."
                )
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
