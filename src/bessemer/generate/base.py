"""The base of a run that trains adapters: it stays where it is, named by path and hash, and is verified as it is read.

    RUN/reference/base.json    {"path": …, "near": …, "source": …, "sha256": …, "tensors": {name: sha256}}
    RUN/reference/base/        the run's own copy, in the dtype it came in, with lora.keep_base

A base is a Hugging Face folder, weights of ours (RUN/model, an export), or a checkpoint. Hashes are of the bytes as
they are stored, so a tensor is verified in the pass that reads it. `near` is the path seen from the run: it finds a
base that moved together with the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.files import STORAGE_FAILURES, explain, quiet, read_arrays
from bessemer.checkpoint.store import STATE
from bessemer.config.bounded import read_json
from bessemer.errors import InputError, StorageError
from bessemer.interop.folder import CONFIG, SINGLE, Folder, fetched, is_hub
from bessemer.job import RunDirectory, find_run
from bessemer.job.trust import FILE, Request, check_folder, is_harmful, is_marked
from bessemer.models.lora import Split, merge_adapters
from bessemer.storage.files import atomic_directory, atomic_write, discard, storage
from bessemer.storage.weights import OURS, Arrays, Signature, WeightFile, digest, select, write_file

RECORD, COPY = "base.json", "base"


@dataclasses.dataclass(frozen=True)
class BaseRecord:
    """Where a base lies, and the sha256 of each tensor that the run keeps frozen, by our name."""

    path: str
    tensors: dict[str, str]
    source: str | None = None  # hf:OWNER/NAME@COMMIT, for one of the hub's cache
    near: str | None = None  # the path, relative to the run directory

    @property
    def sha256(self) -> str:
        lines = (f"{name} {digest}\n" for name, digest in sorted(self.tensors.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @classmethod
    def of(cls, place: Path, tensors: Mapping[str, str], run: RunDirectory) -> BaseRecord:
        place = place.absolute()
        return cls(str(place), dict(tensors), hub_name(place), os.path.relpath(place, run.path.absolute()))

    def as_json(self) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in ("path", "near", "source", "sha256")}
        return {**about, "tensors": self.tensors}

    @classmethod
    def from_json(cls, tree: Any, where: str) -> BaseRecord:
        try:
            texts = {name: tree.get(name) for name in ("path", "source", "near")}
            record = cls(tensors={str(name): str(value) for name, value in tree["tensors"].items()}, **texts)
            if not isinstance(record.path, str) or not all(isinstance(v, str | None) for v in texts.values()):
                raise ValueError("a path is not a string")
            if record.sha256 != tree["sha256"]:
                raise ValueError("its sha256 is not that of its tensors")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{where} is damaged ({error}). Put it back from a copy.") from error
        return record


def hub_name(place: Path) -> str | None:
    """hf:OWNER/NAME@COMMIT of a snapshot in the hub's cache; None elsewhere."""
    named = re.fullmatch(r"models--(.+?)--(.+)", place.parent.parent.name)
    return f"hf:{named[1]}/{named[2]}@{place.name}" if named and place.parent.name == "snapshots" else None


def record_file(run: RunDirectory) -> Path:
    return run.path / "reference" / RECORD


def own_copy(run: RunDirectory) -> Path:
    return run.path / "reference" / COPY


def read_record(run: RunDirectory) -> BaseRecord | None:
    """Return what the run knows of its base; None if its frozen parameters are all its own."""
    path = record_file(run)
    try:
        return BaseRecord.from_json(read_json(path), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read ({error}). Put it back from a copy.") from error


def write_record(run: RunDirectory, record: BaseRecord) -> None:
    path = record_file(run)
    with storage("cannot record the base model"):
        path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps(record.as_json(), indent=1) + "\n", sync=True)


# --- finding it --------------------------------------------------------------------------------------------
def locate(run: RunDirectory, record: BaseRecord, given: str | Path | None = None) -> Path:
    """Return the directory that holds the base: the run's own copy, else what the user gives, else what it names.

    A path named by a run that was not started here is opened only where any of its files would be (job/trust.py).
    """
    if own_copy(run).is_dir():
        return own_copy(run)
    if given is not None:
        return given_place(given, record)
    places = [Path(record.path), *([run.path / record.near] if record.near else [])]
    for place in places:
        request = Request(FILE, "init", str(place))
        if is_harmful(request, run) and not is_marked(run, request):
            raise InputError(
                f"{run.path} was not started here, and its base model is {place}. If that is the one you want, give it "
                f"yourself with --base PATH, or trust the run from now on with: bessemer resume {run.word} --trust"
            )
        if place.is_dir():
            return place
    if record.source is not None and is_marked(run, Request(FILE, "init", record.path)):
        return fetched(record.source)
    named = f" ({record.source})" if record.source else ""
    raise StorageError(
        f"the base model of {run.path} is not at {record.path}{named} any more, and the run holds its adapters alone. "
        f"{how_to_point(run)}"
    )


def how_to_point(run: RunDirectory) -> str:
    return (
        f"Say where it is: bessemer resume {run.word} --base PATH, which also records the new path (sample, chat, "
        "serve, eval and export take --base as well). lora.keep_base=true makes a run keep a copy."
    )


def given_place(given: str | Path, record: BaseRecord, root: str | Path = "runs") -> Path:
    """Return the directory of the weights that --base names: a folder, a checkpoint, a run, or a model of the hub."""
    text = str(given)
    if is_hub(text):
        return fetched(text)
    path = Path(given)
    if (path / CONFIG).is_file():
        check_folder(path)
        return path.absolute()
    if re.fullmatch(r"step_\d+", path.name) and path.is_dir():
        return path.absolute()
    run = find_run(given, root)
    for place in (run.checkpoints / Path(record.path).name, run.model):
        if place.is_dir():
            return place.absolute()
    raise InputError(f"--base {text} holds neither a model nor the checkpoint {Path(record.path).name}.")


# --- reading it --------------------------------------------------------------------------------------------
class CheckpointArrays:
    """The parameters of a checkpoint, read from its files one at a time."""

    def __init__(self, checkpoints: Checkpoints, step: int):
        self.checkpoints, self.step = checkpoints, step
        self._signature = select(checkpoints.leaves(step), "params")
        self._one_at_a_time = threading.Lock()

    def signature(self) -> Signature:
        return self._signature

    def read(self, name: str) -> np.ndarray:
        dtype, shape = self._signature[name]
        wanted = {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype))}
        place = self.checkpoints.path(self.step) / STATE
        try:
            with self._one_at_a_time, quiet():
                return read_arrays(place, wanted, {name: f"params/{name}"})[name]
        except STORAGE_FAILURES as error:
            raise explain(f"cannot read '{name}' of {place}", error) from error


class MergedArrays:
    """A base with adapters merged into it, one matrix at a time and in the base's dtype."""

    def __init__(self, base: Arrays, trained: Arrays, split: Split):
        self.base, self.trained, self.split = base, trained, split
        self.whole, self.adapted = (
            {"/".join(path): path for path in paths} for paths in (split.trained, split.adapted)
        )

    def signature(self) -> Signature:
        base, trained = self.base.signature(), self.trained.signature()
        found = {"/".join(path): base["/".join(path)] for path in (*self.split.frozen, *self.split.adapted)}
        kinds = {dtype for dtype, _ in found.values()}
        usual = kinds.pop() if len(kinds) == 1 else "float32"
        return found | {name: (base[name][0] if name in base else usual, trained[name][1]) for name in self.whole}

    def read(self, name: str) -> np.ndarray:
        return self.read_hashed(name)[0]

    def read_hashed(self, name: str) -> tuple[np.ndarray, str]:
        """The hash is of the parts: what merging gives may differ in its last bit on another device."""
        if name in self.whole:
            return read_hashed(self.trained, name)
        array, own = read_hashed(self.base, name)
        if name not in self.adapted:
            return array, own
        path = self.adapted[name]
        added = sorted(key for key in self.trained.signature() if key.rpartition("/")[0] == name)
        parts = {tuple(key.split("/")): read_hashed(self.trained, key) for key in added}
        alone = dataclasses.replace(self.split, trained=(), adapted=(path,), frozen=())
        given = unflatten_dict({key: jnp.asarray(part) for key, (part, _) in parts.items()})
        merged = merge_adapters(alone.complete(given, unflatten_dict({path: jnp.asarray(array)})))
        hashes = " ".join([own, *(part for _, part in parts.values())])
        return np.asarray(flatten_dict(merged)[path]), hashlib.sha256(hashes.encode()).hexdigest()


class VerifiedArrays:
    """The arrays `names` of a base, hashed as they are read. One whose hash is not the `expected` is an error.

    `hashes` holds those of the arrays read so far.
    """

    def __init__(self, arrays: Arrays, names: Iterable[str], where: Path, record: BaseRecord | None, run: RunDirectory):
        self.arrays, self.where, self.run = arrays, where, run
        self.names = list(names)
        self.expected = {} if record is None else record.tensors
        self.hashes: dict[str, str] = {}

    def signature(self) -> Signature:
        held = self.arrays.signature()
        return {name: held[name] for name in self.names if name in held}

    def read(self, name: str) -> np.ndarray:
        array, found = read_hashed(self.arrays, name)
        wanted = self.expected.get(name, found)
        if wanted != found:
            raise StorageError(
                f"the base model {self.where} is not the one that {self.run.path} was trained with: '{name}' has the "
                f"sha256 {found[:12]}… and had {wanted[:12]}…. Put the original back, or point to a copy of it. "
                f"{how_to_point(self.run)}"
            )
        self.hashes[name] = found
        return array


def read_hashed(arrays: Arrays, name: str) -> tuple[np.ndarray, str]:
    """Return an array in our layout, and the sha256 of its dtype, shape and bytes as they are stored."""
    if isinstance(arrays, MergedArrays):
        return arrays.read_hashed(name)
    if isinstance(arrays, Folder):
        return _read_folder(arrays, name)
    if isinstance(arrays, WeightFile):
        return _read_file(arrays, name)
    array = arrays.read(name)
    return array, digest(array)


def _read_folder(folder: Folder, name: str) -> tuple[np.ndarray, str]:
    """A tensor in 4 bits and a stack of experts are stored as several: their hash is of all of them."""
    hashes: dict[str, str] = {}

    def read(theirs: str) -> np.ndarray:
        stored, hashes[theirs] = _read_file(folder.files[theirs], theirs)
        return stored

    array, stored = folder.read_parts(name, read), [tensor.theirs for tensor in folder.tensors[name]]
    packed = [theirs for theirs in stored if theirs in folder.quantized]
    if len(stored) == 1 and not packed:
        return array, hashes[stored[0]]
    for part in [part for theirs in packed for part in folder.quantized[theirs].parts]:
        if part not in hashes:
            read(part)
    return array, joined_hash(hashes)


def joined_hash(hashes: Mapping[str, str]) -> str:
    """Return the sha256 of several tensors, by their names."""
    lines = "".join(f"{part} {own}\n" for part, own in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _read_file(file: WeightFile, name: str) -> tuple[np.ndarray, str]:
    """A file with checksums has been verified against them by reading: they need no second pass."""
    array = file.read(name)
    return array, digest(array) if file.checksums is None else file.checksums.arrays[name]


def copy_base(arrays: Arrays, settings: Mapping[str, Any], run: RunDirectory) -> None:
    """Write the arrays to RUN/reference/base, each in the dtype it came in; memory holds one of them."""
    target = own_copy(run)
    with storage("cannot copy the base model"):
        for unfinished in target.parent.glob(f".{COPY}.*"):  # of a killed process: only the run's owner copies
            discard(unfinished)
        with atomic_directory(target) as partial:
            (partial / CONFIG).write_text(json.dumps(dict(settings), indent=1) + "\n", encoding="utf-8")
            about = {"format": OURS, "step": "0"}
            write_file(partial / SINGLE, arrays.signature(), arrays.read, about, beside=[CONFIG])
