"""One writer for a directory: an advisory lock that the system releases when its owner dies."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer.errors import InputError, StorageError


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
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                owner = os.pread(file, 200, 0).decode(errors="replace") or "another process"
                if wait and on_wait is not None:
                    on_wait(owner)
                    on_wait = None
                if not wait:
                    raise InputError(
                        f"{what} '{directory}' is already running ({owner}): wait for it, or choose another "
                        f"directory."
                    ) from None
                time.sleep(0.2)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(file)
