"""The files of a checkpoint: its arrays, and the COMMIT file, which makes a directory a checkpoint.

This is the only module that imports Orbax: it starts a save, waits for it, and restores. Orbax keeps no checksums, so
COMMIT lists size and sha256 of every file, the names, shapes and dtypes of the arrays, and a checksum of itself. A
directory is committed when it has its final name, a sound COMMIT, and every listed file in its full length.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bessemer.config.bounded import read_json
from bessemer.console import Advance
from bessemer.errors import StorageError
from bessemer.job.directory import step_of_name
from bessemer.storage.checksums import json_digest
from bessemer.storage.files import storage_error, sync_directory
from bessemer.storage.weights import Leaves, signature
from bessemer.topology import absent_processes, process_count

# --- arrays ---


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


# --- COMMIT ---


COMMIT = "COMMIT"
META = "meta.json"
FORMAT = 1
MOST_BYTES = 1 << 28  # of COMMIT: about a million files
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """A parsed COMMIT. `files`: relative path -> (size, sha256); `tree`: array name -> (dtype, shape)."""

    step: int
    files: dict[str, tuple[int, str]]
    tree: dict[str, tuple[str, tuple[int, ...]]]


def write_manifest(directory: Path, step: int, tree: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Hash and sync every file under `directory`, write COMMIT, sync the directories, innermost first."""
    paths = [path for path in _walk(directory) if path != COMMIT]
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="bessemer-hash") as pool:
        digests = list(pool.map(lambda name: _digest(directory / name, sync=True), paths))
    body = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"size": size, "sha256": sha} for name, (size, sha) in zip(paths, digests, strict=True)},
        "tree": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tree.items()},
    }
    with open(directory / COMMIT, "w", encoding="utf-8") as file:
        json.dump({**body, "sha256": json_digest(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(directory, topdown=False):
        sync_directory(folder)


def read_manifest(directory: Path) -> Manifest:
    """Return the parsed COMMIT. Raise StorageError that names the file if it is missing, damaged or newer."""
    path = directory / COMMIT
    try:
        body = read_json(path, MOST_BYTES)
        expected = body.pop("sha256")
        if body["format"] != FORMAT:
            raise StorageError(
                f"{path}: format {body['format']} is not known to this version of Bessemer (it reads "
                f"{FORMAT}). Use the version that wrote the checkpoint."
            )
        if json_digest(body) != expected:
            raise StorageError(f"{path} is damaged: its own checksum does not match.")
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in body["files"].items()}
        tree = {name: (str(a["dtype"]), tuple(map(int, a["shape"]))) for name, a in body["tree"].items()}
        return Manifest(int(body["step"]), files, tree)
    except FileNotFoundError as error:
        raise StorageError(f"{path} is missing: the checkpoint was never committed.") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is damaged: it is not a manifest ({error}).") from error


def structure_problems(directory: Path) -> list[str]:
    """Return what keeps a directory from being committed, from COMMIT, names and sizes alone."""
    try:
        manifest = read_manifest(directory)
    except StorageError as error:
        return [str(error)]
    problems = []
    if step_of_name(directory.name) not in (None, manifest.step):
        problems.append(f"COMMIT is of step {manifest.step}, not of {directory.name}")
    for name, (size, _) in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            problems.append(f"{name} {reason}")
            continue
        if found != size:
            problems.append(f"{name} has {found} bytes instead of {size}")
    return problems


def content_problems(directory: Path, progress: Advance | None = None) -> list[str]:
    """Return `structure_problems`, or every file whose bytes are not the ones that were saved.

    `progress` gets the bytes of each block that was read, from several threads.
    """
    problems = structure_problems(directory)
    if problems:
        return problems
    manifest = read_manifest(directory)
    files = manifest.files

    def check(name: str) -> str | None:
        try:
            _, sha = _digest(directory / name, progress=progress)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if sha == files[name][1] else f"{name} has changed since it was saved (sha256 differs)"

    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="bessemer-hash") as pool:
        problems = [problem for problem in pool.map(check, files) if problem]
    return problems or _meta_problems(directory, manifest.step)


def _meta_problems(directory: Path, step: int) -> list[str]:
    """Return a problem if meta.json is of another step: the directory was put together by hand."""
    try:
        found = read_json(directory / META).get("step")
    except (OSError, ValueError, AttributeError) as error:
        return [f"{META} cannot be read ({error})"]
    return [] if found == step else [f"{META} is of step {found}, and COMMIT of step {step}"]


def unlisted_files(directory: Path) -> list[str]:
    """Return files that COMMIT does not list, which somebody added later. They are never read."""
    known = {COMMIT, *read_manifest(directory).files}
    return [name for name in _walk(directory) if name not in known]


def _walk(directory: Path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _digest(path: Path, sync: bool = False, progress: Advance | None = None) -> tuple[int, str]:
    size, sha = 0, hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
            size += len(block)
            if progress is not None:
                progress(len(block))
        if sync:
            os.fsync(file.fileno())
    return size, sha.hexdigest()
