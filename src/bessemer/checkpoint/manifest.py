"""The COMMIT file: what makes a directory a checkpoint.

Orbax keeps no checksums, so COMMIT lists size and sha256 of every file, the names, shapes and dtypes of the arrays, and
a checksum of itself. A directory is committed when it has its final name, a sound COMMIT, and every listed file in its
full length.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bessemer.config.bounded import read_json
from bessemer.console import Advance
from bessemer.errors import StorageError
from bessemer.job.directory import step_of_name
from bessemer.storage.checksums import json_digest
from bessemer.storage.files import sync_directory

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
