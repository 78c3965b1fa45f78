"""What a teacher says about every training row, stored once: its k likeliest tokens at each position.

    $BESSEMER_HOME/taught/HASH/ids.npy       (rows, T, K) int32
                              /logprobs.npy  (rows, T, K) float32, at the run's temperature
                              /sums.bin      checksums of both, verified before a row is used
                              /about.json    written last: which rows, which teacher, K, τ
                              /.lock         held by the run that writes

8·K bytes a token. The hash is of the rows, the teacher's weights, K and τ, so runs that agree on those share it; of
runs that start together, one writes and the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import jax
import numpy as np

from bessemer.config import configure
from bessemer.data import data_root
from bessemer.data.checksums import ChunkSums, VerifiedFile, load_sums, save_sums
from bessemer.data.lock import exclusive
from bessemer.data.rows import Batch, Fields, Rows, fields_of
from bessemer.errors import StorageError
from bessemer.job import atomic_write
from bessemer.job.files import storage
from bessemer.models.distillation import top_tokens
from bessemer.objectives.distill import TOP_IDS, TOP_LOGPROBS, DistillSettings
from bessemer.topology import share
from bessemer.training import teacher as teachers
from bessemer.training.fetch import fetch

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

TOKENS = 2**15  # positions in one forward pass of the teacher
FILES = {TOP_IDS: ("ids.npy", np.int32), TOP_LOGPROBS: ("logprobs.npy", np.float32)}
ABOUT = "about.json"
FORMAT = 2
"""Of the folder. Format 1 had no checksums, and two runs could write into one folder at the same time."""
WAIT = 7 * 24 * 3600.0  # seconds that processes of a run wait while another run writes


def taught_fields(block_size: int, k: int) -> Fields:
    """Return the fields that rows of a stored teacher have beside their own."""
    return {name: ((block_size, k), np.dtype(kind)) for name, (_, kind) in FILES.items()}


class TaughtRows:
    """Rows with the teacher's likeliest tokens as two more columns, (n, T, K) each. Their order stays the same."""

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.rows, self.block_size, self.stats = rows, rows.block_size, rows.stats
        self.fingerprint = rows.fingerprint
        with storage("cannot open what the teacher said"):
            sums = load_sums(folder, json.loads((folder / ABOUT).read_text("utf-8"))["checksums"])
            self.columns = {name: np.load(folder / file, mmap_mode="r") for name, (file, _) in FILES.items()}
            self.verified = {
                name: VerifiedFile(folder / file, np.memmap(folder / file, np.uint8, mode="r"), sums[file])
                for name, (file, _) in FILES.items()
            }
        for name, column in self.columns.items():
            if len(column) != len(rows):
                raise StorageError(
                    f"{folder / FILES[name][0]} has {len(column)} rows where the data has {len(rows)}: delete {folder}."
                )
        self.fields = rows.fields | fields_of(self.columns)

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, indices: np.ndarray) -> Batch:
        batch = dict(self.rows.get(indices))
        for name, column in self.columns.items():
            begins = column.offset + np.asarray(indices, np.int64) * column.strides[0]
            self.verified[name].require(begins, begins + column.strides[0])
            batch[name] = column[indices]
        return batch


def stored_tokens(trainer: BaseTrainer) -> int | None:
    """Return K if the run trains on a stored teacher, else None."""
    if trainer.teacher is None or trainer.teacher.live:
        return None
    return min(configure(DistillSettings).top_k, trainer.model.vocab_size)


def taught(trainer: BaseTrainer, rows: Rows) -> Rows:
    """Return the rows as the objective needs them: those of a stored teacher with its columns, all others as they
    are."""
    k = stored_tokens(trainer)
    if k is None:
        return rows
    about = {
        "rows": rows.fingerprint,
        "teacher": teachers.identity(trainer),
        "k": k,
        "temperature": configure(DistillSettings).temperature,
    }
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    folder = data_root(trainer.config["data/root"]) / "taught" / name
    if stored(folder) != "yes":
        with written_by_one(trainer, folder):
            if (found := stored(folder)) == "older":
                trainer.say(
                    f"note: {folder} was written by an older version, without checksums; it may lack rows and is "
                    "written again"
                )
            if found != "yes":
                write(trainer, rows, folder, about)
    return TaughtRows(rows, folder)


def stored(folder: Path) -> str:
    """Whether the folder holds all rows, as process 0 sees it: "yes", "no", or "older" for a format that may not."""

    def look() -> str:
        try:
            found = json.loads((folder / ABOUT).read_text("utf-8"))
        except FileNotFoundError:
            return "no"
        except (OSError, ValueError) as error:
            raise StorageError(f"{folder / ABOUT} is damaged ({error}): delete {folder}.") from error
        return "yes" if isinstance(found, dict) and found.get("format") == FORMAT else "older"

    return share(f"taught {folder.name}", look, WAIT)


@contextlib.contextmanager
def written_by_one(trainer: BaseTrainer, folder: Path) -> Iterator[None]:
    """Hold the folder's lock in process 0, which is the one that writes; wait for another run that holds it."""
    if not trainer.is_process_zero:
        yield
        return

    def say(owner: str) -> None:
        trainer.say(f"teacher    {owner} is storing the same tokens in {folder}; waiting for it")

    with exclusive(folder, "storing a teacher's tokens in", wait=True, on_wait=say):
        yield


def write(trainer: BaseTrainer, rows: Rows, folder: Path, about: dict[str, Any]) -> None:
    """Run the teacher over all rows. Every process takes part; process 0 writes, and commits when all is there."""
    k, block, begun, teacher = about["k"], rows.block_size, time.monotonic(), trainer.teacher
    assert teacher is not None
    if teacher.model is None:
        raise StorageError(
            f"distill.teacher={teacher.place} is gone, and so are the tokens stored of it ({folder}). Put one of them "
            "back, or start a new run with init=."
        )
    trainer.say(f"teacher    its {k} likeliest tokens for {len(rows):,} rows are stored first: {folder}")
    params = teachers.read_params(trainer, teacher)
    replicated = trainer.topology.replicated

    @jax.jit
    def score(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = top_tokens(teacher.apply(params, batch, method="projection"), k, about["temperature"])
        return jax.lax.with_sharding_constraint(tuple(found), replicated)

    size = max(1, TOKENS // block // trainer.topology.data_parallel) * trainer.topology.data_parallel
    shape = (len(rows), block, k)
    with contextlib.ExitStack() as stack:
        outputs: dict[str, Column] = {}
        if trainer.is_process_zero:
            outputs = {name: stack.enter_context(Column(folder, name, shape)) for name in FILES}
        with trainer.topology.scope():
            for first in range(0, len(rows), size):
                chosen = np.minimum(np.arange(first, first + size), len(rows) - 1)
                batch = {name: column for name, column in rows.get(chosen).items() if column.ndim == 2}
                placed = {name: put(trainer, column) for name, column in batch.items()}
                for name, values in zip(FILES, fetch(score(params, placed)), strict=True):
                    if name in outputs:
                        outputs[name].append(values[: len(rows) - first])
        share(f"written {folder.name}", lambda: finish(folder, outputs, about))
    trainer.say(f"teacher    stored in {time.monotonic() - begun:.1f} s")


class Column:
    """One file of a folder being written, row after row, under a temporary name."""

    def __init__(self, folder: Path, name: str, shape: tuple[int, ...]) -> None:
        file, kind = FILES[name]
        self.dtype, self.sums, self.shape = np.dtype(kind), ChunkSums(), shape
        self.path, self.temporary = folder / file, folder / f"{file}.tmp"
        self.file: BinaryIO

    def __enter__(self) -> Column:
        header = io.BytesIO()
        facts = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(header, facts)
        with storage("cannot store what the teacher says"):
            self.file = open(self.temporary, "wb")
        self._write(header.getvalue())
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)

    def append(self, rows: np.ndarray) -> None:
        self._write(np.ascontiguousarray(rows, self.dtype).tobytes())

    def _write(self, data: bytes) -> None:
        self.sums.update(data)
        with storage("cannot store what the teacher says"):
            self.file.write(data)

    def commit(self) -> np.ndarray:
        """Give the file its name; return its checksums."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.replace(self.path)
        return self.sums.finish()


def finish(folder: Path, outputs: dict[str, Column], about: dict[str, Any]) -> str:
    with storage("cannot store what the teacher says"):
        (folder / ABOUT).unlink(missing_ok=True)  # of an older format
        sums = {column.path.name: column.commit() for column in outputs.values()}
        facts = {**about, "format": FORMAT, "checksums": save_sums(folder, sums)}
    atomic_write(folder / ABOUT, json.dumps(facts, indent=1), sync=True)
    return "written"


def put(trainer: BaseTrainer, column: np.ndarray) -> jax.Array:
    """Rows over the mesh's batch axes; every process has read all of them."""
    sharding = trainer.topology.batch_sharding()
    return jax.make_array_from_callback(column.shape, sharding, lambda index: column[index])
