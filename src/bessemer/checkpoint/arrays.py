"""The only module that imports Orbax: start a save, wait for it, restore."""

from __future__ import annotations

import errno
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bessemer.errors import StorageError
from bessemer.storage.files import storage_error
from bessemer.storage.weights import Leaves, signature
from bessemer.topology import absent_processes, process_count

# What Orbax and TensorStore raise when the disk, not the program, is at fault.
STORAGE_FAILURES = (OSError, ValueError, TypeError, KeyError, RuntimeError)

LOST_PEER = ("Gloo", "Connection closed by peer", "Connection reset by peer", "unhealthy", "arrier")
"""Words of a failed collective or barrier between processes: then no disk is at fault."""


class ArrayWriter:
    """One asynchronous Orbax checkpointer, made on first use and dropped after a failure."""

    def __init__(self, timeout: int):
        self._timeout = timeout
        self._orbax: Any = None

    def start(self, path: Path, leaves: Leaves) -> None:
        """Copy the arrays off the devices and start writing them; they may be donated afterwards."""
        import orbax.checkpoint as ocp

        # A failed computation surfaces here as itself, and is not mistaken for a failed disk.
        jax.block_until_ready([leaf for leaf in leaves.values() if isinstance(leaf, jax.Array)])
        if self._orbax is None:
            # In the background, a directory that cannot be made keeps a thread, and the process, waiting for minutes.
            at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
            self._orbax = ocp.AsyncCheckpointer(
                ocp.PyTreeCheckpointHandler(), timeout_secs=self._timeout, async_options=at_once
            )
        # Orbax refuses arrays without elements; the manifest alone records those.
        full = {name: leaf for name, leaf in leaves.items() if leaf.size}
        try:
            self._orbax.save(path, args=ocp.args.PyTreeSave(full or {"empty": np.zeros(1, np.int8)}))
        except STORAGE_FAILURES:
            self._orbax = None
            raise

    def finish(self) -> None:
        """Wait until every process has written its part."""
        try:
            self._orbax.wait_until_finished()
        except STORAGE_FAILURES:
            self._orbax = None
            raise

    def close(self) -> None:
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None


def read_arrays(path: Path, wanted: Leaves, names: dict[str, str]) -> Leaves:
    """Read `wanted` (name -> abstract array) from `path`; `names` gives each one's name in the checkpoint.

    An abstract array with a sharding comes back as a jax.Array with it; without one as numpy.
    """
    import orbax.checkpoint as ocp

    item, args, found = {}, {}, {}
    for name, leaf in wanted.items():
        sharding = getattr(leaf, "sharding", None)
        dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
        if 0 in shape:
            empty = np.zeros(shape, dtype)
            found[name] = empty if sharding is None else jax.device_put(empty, sharding)
            continue
        item[names[name]] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        args[names[name]] = (
            ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
            if sharding is None
            else ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype, strict=True)
        )
    if item:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            request = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
            read = reader.restore(path, args=request)
        found |= {name: read[names[name]] for name in wanted if name not in found}
    wrong = [name for name, entry in signature(found).items() if entry != signature(wanted)[name]]
    if wrong:
        raise StorageError(f"{path}: restored '{wrong[0]}' with a shape or dtype other than saved.")
    return found


def explain(what: str, error: BaseException) -> StorageError:
    """Return the StorageError for a failure in Orbax or the file system, with a remedy."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno:
        return storage_error(what, error)
    text = str(error)
    if process_count() > 1 and any(sign in text for sign in LOST_PEER):
        absent = ", ".join(map(str, absent_processes()))
        lost = f"process {absent} is not responding" if absent else "the processes lost each other"
        return StorageError(f"{what}: {lost} ({_brief(text)}). Start all processes again with `bessemer resume`.")
    for sign, number in (
        ("No space left", errno.ENOSPC),
        ("RESOURCE_EXHAUSTED", errno.ENOSPC),
        ("Read-only file system", errno.EROFS),
        ("PERMISSION_DENIED", errno.EACCES),
        ("NOT_FOUND", errno.ENOENT),
        ("No such file", errno.ENOENT),
    ):
        if sign in text:
            return storage_error(what, OSError(number, _brief(text)))
    return StorageError(f"{what}: {_brief(text) or type(error).__name__}. Check the disk, then `bessemer resume`.")


def _brief(text: str) -> str:
    return " ".join(text.split())[:300]


# Orbax's and TensorStore's own messages are muted while they work for us.


class _AbandonedTasks(logging.Filter):
    """Drops asyncio's traceback of each task of a failed save. It may come as late as the end of the process, so this
    filter stays once it is set."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not text.startswith(("Task exception was never", "Future exception was never")):
            return True
        if record.exc_info and record.exc_info[1] is not None:  # whose it is shows in the text or in the frames
            text += "".join(traceback.format_exception(record.exc_info[1]))
        return not any(name in text for name in ("orbax", "OCDBT", "zarr"))


class _Silence:
    """Counts the saves and restores in progress: the first mutes, the last unmutes.

    Orbax logs each failure with full tracebacks through absl, and TensorStore's threads print one per array through the
    unraisable hook once the event loop is closed. The failure itself reaches us once, as an exception.
    """

    _ECHOES = ("Event loop is closed", "cannot schedule new futures after shutdown")

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._tasks = _AbandonedTasks()
        self._users = 0

    def enter(self) -> None:
        with self._guard:
            self._users += 1
            if self._users > 1:
                return
            logging.getLogger("asyncio").addFilter(self._tasks)
            logger = logging.getLogger("absl")
            self._level, self._hook = logger.level, sys.unraisablehook
            logger.setLevel(logging.CRITICAL + 1)
            sys.unraisablehook = self._on_error

    def leave(self) -> None:
        with self._guard:
            self._users -= 1
            if self._users == 0:
                logging.getLogger("absl").setLevel(self._level)
                sys.unraisablehook = self._hook

    def _on_error(self, args: Any) -> None:
        error = args.exc_value
        if not (isinstance(error, RuntimeError) and str(error).startswith(self._ECHOES)):
            self._hook(args)


SILENCE = _Silence()


@contextmanager
def quiet() -> Iterator[None]:
    SILENCE.enter()
    try:
        yield
    finally:
        SILENCE.leave()
