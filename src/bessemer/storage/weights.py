"""Weights in safetensors files, one array at a time: no file is ever whole in memory.

    8 bytes: length of the header | header: JSON {name: {dtype, shape, data_offsets}} | the arrays, one after the other

The library reads no bfloat16 as numpy and writes a file only from all of its arrays at once, so both are done here.
The header's metadata holds a sha256 of every array, which is verified as the array is read. On a core with SHA
instructions that takes 0.6 s per GB: 2.4 s for a model of 1B parameters in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import jax
import ml_dtypes
import numpy as np

from bessemer.console import Advance
from bessemer.errors import InputError, StorageError
from bessemer.storage.checksums import file_digest, json_digest
from bessemer.storage.files import atomic_file, storage

# Trees as flat tables of named arrays, and the strict comparison of two such tables.
#
# Flattened by us, any tree of states, named tuples and dicts has one stable name per array
# ("params/wte/embedding"), which is what error messages, the manifest and partial restores speak.


Leaves = dict[str, Any]
Signature = dict[str, tuple[str, tuple[int, ...]]]


class Packed(ABC):
    """An array that is kept in another form than it is stored in, such as quantized: one named leaf here, whatever
    arrays it is made of. `shape` and `dtype` are those of the array that it is made from."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]: ...

    @abstractmethod
    def source(self) -> jax.ShapeDtypeStruct:
        """Return what to read for an abstract array, and on which devices."""

    @abstractmethod
    def packed(self, array: jax.Array) -> Packed:
        """Return the real array of an abstract one, made from what was read."""


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed)


def flatten(tree: Any) -> Leaves:
    """Name -> array, in tree order. Leaves that are not arrays or numbers cannot be saved."""
    leaves: Leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_packed)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        if name in leaves:
            raise InputError(f"two arrays of the state have the same name '{name}'; rename one of the keys.")
        leaves[name] = _as_array(name, leaf)
    return leaves


def rebuild(abstract: Any, values: Leaves) -> Any:
    """Return the arrays in the structure of `abstract`, whose flattening gave the names."""
    names = flatten_names(abstract)
    return jax.tree.unflatten(jax.tree.structure(abstract, is_leaf=_is_packed), [values[name] for name in names])


def flatten_names(tree: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_packed)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "value" for path, _ in paths]


def signature(leaves: Leaves) -> Signature:
    """Name -> (dtype, shape)."""
    return {name: (str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for name, leaf in leaves.items()}


def check_same(saved: Signature, wanted: Signature, where: str) -> None:
    """Raise one error that names the arrays which differ: nothing is cast, dropped or left fresh."""
    problems = [f"'{name}' is not in the checkpoint" for name in wanted if name not in saved]
    problems += [f"'{name}' is in the checkpoint only" for name in saved if name not in wanted]
    for name in wanted:
        if name in saved and saved[name] != wanted[name]:
            (have_dtype, have_shape), (want_dtype, want_shape) = saved[name], wanted[name]
            if have_shape != want_shape:
                problems.append(f"'{name}' has shape {have_shape} there and {want_shape} here")
            if have_dtype != want_dtype:
                problems.append(f"'{name}' is {have_dtype} there and {want_dtype} here")
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise OtherModel(where, shown + more)


def select(saved: Signature, only: str | None) -> Signature:
    """Return the part of a signature under `only`, with that prefix removed; all of it for None."""
    if only is None:
        return saved
    prefix = only + "/"
    return {name[len(prefix) :]: entry for name, entry in saved.items() if name.startswith(prefix)}


def _as_array(name: str, leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float):
        return np.asarray(leaf)
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        raise InputError(f"the state's '{name}' is a {type(leaf).__name__}; only arrays and numbers can be saved.")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise InputError(f"the state's '{name}' is a typed random key; save jax.random.key_data of it.")
    return leaf


DTYPES: dict[str, Any] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("float32", "float16", "bfloat16")
LONGEST_HEADER = 100 * 2**20

OURS, CHECKSUMS = "bessemer", "checksums"
"""In the metadata: the format of files with our names, and `Checksums` as JSON."""


class DamagedFile(StorageError):
    """A weight file that differs from what was written, as opposed to one that holds another model."""


class OtherModel(StorageError):
    """Intact weights of a different model. `problem` names the arrays that differ."""

    def __init__(self, where: str, problem: str):
        self.problem = problem
        super().__init__(
            f"{where} does not fit this model and optimizer: {problem}. Use the configuration it was saved with; to "
            "start from other weights use init=RUN in a new run."
        )


class Arrays(Protocol):
    """Named arrays that are read when they are asked for."""

    def signature(self) -> Signature:
        """Name -> (dtype, shape)."""

    def read(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Entry:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFile:
    """One safetensors file; the header is read and checked against the file's length at once."""

    def __init__(self, path: Path):
        self.path = path
        try:
            length = path.stat().st_size
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if not 2 <= size <= min(LONGEST_HEADER, length):
                    raise ValueError("it does not begin with the length of a header")
                described = json.loads(file.read(size))
        except RecursionError:
            raise InputError(f"{path}: its header is nested too deeply for a safetensors file.") from None
        except (OSError, ValueError) as error:
            raise DamagedFile(f"{path} is not a readable safetensors file: {_words(error)}.") from error
        try:
            self.metadata: dict[str, str] = described.pop("__metadata__", {})
            if not isinstance(self.metadata, dict):
                raise ValueError("'__metadata__' is not an object")
            self.checksums = _checksums(self.metadata)
            self.entries = {name: _entry(name, about, 8 + size) for name, about in described.items()}
            _check_layout(self.entries)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} has a malformed safetensors header: {_words(error)}.") from error
        for name, entry in self.entries.items():
            if entry.start + entry.size > length:
                raise DamagedFile(
                    f"{path} is cut off: '{name}' would end at byte {entry.start + entry.size:,} and the file has "
                    f"{length:,}. Copy or download it again."
                )
        if self.checksums is not None:
            self._check_header(self.checksums)

    @property
    def notes(self) -> list[str]:
        """Return a line to show if a file of ours cannot be verified."""
        if self.checksums is not None or self.metadata.get("format") != OURS:
            return []
        return [f"{self.path} was written without checksums, by an older version: damage to it would not be noticed."]

    def _check_header(self, checksums: Checksums) -> None:
        if checksums.metadata != _metadata_digest(self.metadata) or set(checksums.arrays) != set(self.entries):
            raise self._damaged("its header")
        for name, digest in checksums.files.items():
            beside = self.path.with_name(name)
            if not beside.is_file():
                raise DamagedFile(
                    f"{beside} is missing: {self.path.name} was written with it. Put it back from a copy."
                )
            if _file_digest(beside) != digest:
                raise DamagedFile(
                    f"{beside} is damaged or was changed: it is not the file that {self.path.name} was written with. "
                    "Put both back from a copy, or write them again (bessemer export)."
                )

    def _damaged(self, what: str) -> StorageError:
        return DamagedFile(
            f"{self.path} is damaged: {what} does not match the checksum it was written with. Put the file back from "
            "a copy, or write it again (bessemer export)."
        )

    def signature(self) -> Signature:
        return {name: (str(entry.dtype), entry.shape) for name, entry in self.entries.items()}

    def read(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        with storage(f"cannot read '{name}' of {self.path}"), open(self.path, "rb") as file:
            file.seek(entry.start)
            flat = np.fromfile(file, np.uint8, entry.size)
        if flat.size != entry.size:
            raise StorageError(f"{self.path} was cut off while '{name}' was read. Copy or download it again.")
        if self.checksums is not None and self.checksums.arrays[name] != _digest(entry.dtype, entry.shape, flat):
            raise self._damaged(f"'{name}'")
        return flat.view(entry.dtype).reshape(entry.shape)


def _entry(name: str, about: Mapping[str, Any], offset: int) -> Entry:
    if about["dtype"] not in DTYPES:
        raise ValueError(f"'{name}' has dtype {about['dtype']}, which is not read here ({', '.join(DTYPES)} are)")
    begin, end = about["data_offsets"]
    numbers = [*about["shape"], begin, end]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ValueError(f"shape and data_offsets of '{name}' must be integers of at least 0")
    entry = Entry(DTYPES[about["dtype"]], tuple(about["shape"]), offset + begin)
    if entry.size != end - begin:
        raise ValueError(f"'{name}' of shape {entry.shape} takes {entry.size} bytes and has {end - begin}")
    return entry


def _check_layout(entries: Mapping[str, Entry]) -> None:
    """Raise ValueError if two arrays share bytes: each would be read as part of the other."""
    last, end = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.size and entry.start < end:
            raise ValueError(f"data_offsets of '{last}' and '{name}' overlap")
        last, end = name, max(end, entry.start + entry.size)


def _words(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")


def write_file(
    path: Path,
    entries: Signature,
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    progress: Advance = lambda size: None,
    *,
    beside: Iterable[str] = (),
) -> int:
    """Write arrays as they come from `read`, each in the dtype and shape of its entry, atomically. Return their bytes.

    The header holds a checksum of each array and of the files `beside` it, which must be there already.
    """
    files = {name: _file_digest(path.with_name(name)) for name in beside}
    with storage(f"cannot write {path}"), atomic_file(path, sync=True) as file:
        return _write(file, entries, read, metadata, files, progress)


def to_bytes(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file of a few arrays, with their checksums."""
    file = io.BytesIO()
    _write(file, signature(dict(arrays)), arrays.__getitem__, metadata, {}, lambda size: None)
    return file.getvalue()


def _write(
    file: BinaryIO,
    entries: Signature,
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    files: Mapping[str, str],
    progress: Advance,
) -> int:
    arrays = dict.fromkeys(entries, "0" * 64)  # as long as a digest: the header is written again when they are known
    header: dict[str, Any] = {"__metadata__": _with_checksums(metadata, arrays, files)}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [begin, end]}
    text = _header(header)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, (dtype, shape) in entries.items():
        array = read(name).astype(np.dtype(dtype), copy=False)
        assert array.shape == tuple(shape), (name, array.shape, shape)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        arrays[name] = _digest(np.dtype(dtype), tuple(shape), flat)
        file.write(flat.data)
        progress(array.nbytes)
    file.seek(8)
    file.write(_header(header | {"__metadata__": _with_checksums(metadata, arrays, files)}))
    return end


@dataclass(frozen=True)
class Checksums:
    """sha256 of each array with its dtype and shape, of the rest of the metadata, and of files in the same folder."""

    arrays: dict[str, str]
    metadata: str
    files: dict[str, str]


def _checksums(metadata: Mapping[str, str]) -> Checksums | None:
    """Return those in a file's metadata; None if it was written without."""
    if CHECKSUMS not in metadata:
        return None
    found = Checksums(**json.loads(metadata[CHECKSUMS]))
    if not isinstance(found.arrays, dict) or not isinstance(found.files, dict):
        raise ValueError("its checksums are not objects")
    if not all(0 < len(name.encode()) < 256 and "\0" not in name for name in found.files):
        raise ValueError("its checksums name a file that cannot be")
    if any(Path(name).name != name or name == ".." for name in found.files):
        raise ValueError("its checksums name a file outside the folder")
    return found


def _with_checksums(metadata: Mapping[str, str], arrays: Mapping[str, str], files: Mapping[str, str]) -> dict[str, str]:
    checksums = Checksums(dict(arrays), _metadata_digest(metadata), dict(files))
    return {**metadata, CHECKSUMS: json.dumps(dataclasses.asdict(checksums))}


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    rest = {name: value for name, value in metadata.items() if name != CHECKSUMS}
    return json_digest(rest)


def digest(array: np.ndarray) -> str:
    """Return the sha256 of an array with its dtype and shape, as a file's checksums hold it."""
    return _digest(array.dtype, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _digest(dtype: np.dtype[Any], shape: tuple[int, ...], flat: np.ndarray) -> str:
    digest = hashlib.sha256(f"{NAMES[dtype]} {list(shape)} ".encode())
    digest.update(flat.data)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with storage(f"cannot read {path}"):
        return file_digest(path)


def _header(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # arrays begin at a multiple of 8


def check_fits(arrays: Arrays, abstract: Any, where: str) -> None:
    """Raise the error that names what differs from `abstract`. Floats of one width fit those of another: frozen weights
    are kept in the dtype they are computed in, all others widened to float32."""
    wanted = signature(flatten(abstract))

    def fitting(name: str, dtype: str) -> str:
        asked = wanted[name][0] if name in wanted else dtype
        return asked if dtype in FLOATS and asked in FLOATS else dtype

    found = {name: (fitting(name, dtype), shape) for name, (dtype, shape) in arrays.signature().items()}
    check_same(found, wanted, where)


def place(arrays: Arrays, abstract: Any, where: str) -> Any:
    """Return the arrays in the structure, dtypes and on the devices of `abstract`; any other name or shape is an error.

    Threads read and verify ahead, so of the host's memory a few arrays are taken at a time, in the dtype they are
    stored in; each process puts its own part on its devices. A `Packed` leaf is packed there before the next array.
    """
    check_fits(arrays, abstract, where)
    placed: Leaves = {}
    waiting = iter(flatten(abstract).items())
    with ThreadPoolExecutor(READERS, thread_name_prefix="bessemer-read") as pool:
        reading = deque((name, leaf, pool.submit(arrays.read, name)) for name, leaf in islice(waiting, READERS))
        while reading:
            name, leaf, read = reading.popleft()
            if isinstance(leaf, Packed):
                placed[name] = leaf.packed(_put(read.result(), leaf.source()))
            else:
                placed[name] = _put(read.result(), leaf)
            del read
            reading.extend((name, leaf, pool.submit(arrays.read, name)) for name, leaf in islice(waiting, 1))
    return rebuild(abstract, placed)


READERS = 4
"""Arrays read ahead: sha256 runs at 0.7 to 2 GB/s on one core."""
TURNED_ON_DEVICE = 2**20
"""Bytes from which a transposed matrix is turned on its devices: numpy copies one at 0.1 GB/s, a CPU device at 0.3."""


def _put(array: np.ndarray, leaf: Any) -> jax.Array:
    turned = array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous
    if turned and array.nbytes >= TURNED_ON_DEVICE and (place := _turned_sharding(leaf.sharding)) is not None:
        stored = array.T
        there = jax.make_array_from_callback(stored.shape, place, lambda index: stored[index])
        return _turn(leaf.sharding, leaf.dtype)(there)
    wide = array.astype(leaf.dtype, copy=False)
    return jax.make_array_from_callback(wide.shape, leaf.sharding, lambda index: wide[index])


def _turned_sharding(sharding: Any) -> Any:
    """Return where the transpose of a matrix lies whose pieces `sharding` places; None if that is not known."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    rows, columns = (*sharding.spec, None, None)[:2]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(columns, rows))


@functools.lru_cache(64)
def _turn(sharding: Any, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda stored: stored.T.astype(dtype), out_shardings=sharding)


def total(entries: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Return the bytes of arrays with these dtypes and shapes."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in entries)
