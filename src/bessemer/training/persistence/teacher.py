"""The teacher of a distillation: another run's model, with its own shape, frozen and sharded over the same mesh.

Its parameters are the state's `reference`: read once and written to RUN/reference/step_0 with their configuration, so
the run does not need the teacher's own directory again. With `distill.top_k` the teacher is not in memory at all:
its most likely tokens are stored once, and RUN/reference/teacher.json names its weights, so that a run whose teacher is
gone finds what was stored of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from bessemer.checkpoint import Checkpoints
from bessemer.config.bounded import read_json
from bessemer.data import data_root
from bessemer.data.rows.rows import Batch, Fields, Rows, fields_of
from bessemer.data.tokenize.tokenizer import FILE as TOKENIZER
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError, StorageError
from bessemer.generate import load
from bessemer.job import RunDirectory
from bessemer.losses.distillation import top_tokens
from bessemer.objectives.distill import TOP_IDS, TOP_LOGPROBS, DistillSettings, OnPolicySettings
from bessemer.registry import objectives
from bessemer.storage.checksums import ChunkSums, VerifiedFile, json_digest, load_sums, save_sums
from bessemer.storage.files import (
    ALLOCATION,
    REFERENCE_WEIGHTS,
    TEACHER_RECORD,
    TEACHER_TARGETS,
    atomic_write,
    exclusive,
    storage,
)
from bessemer.topology import Topology, broadcast
from bessemer.training.feed import fetch, place_rows
from bessemer.training.settings import RunContext
from bessemer.training.setup.init_recipe import PREFIX, planned_recipe
from bessemer.training.setup.initial_weights import read_weights, tree_in, weights_digest
from bessemer.training.setup.model import ModelParts, Teacher, make_apply


def find_teacher(context: RunContext, student: ModelParts) -> Teacher | None:
    """Return the teacher of an objective with the trait `teacher`, checked against the student; no array is read."""
    entry = objectives.entry(context.settings.objective)
    if not entry.traits.get("teacher"):
        return None
    settings: DistillSettings | OnPolicySettings = context.config.make(entry.settings[0])
    if settings.teacher is None:
        raise InputError(f"objective={entry.name} learns from another run: give distill.teacher=RUN.")
    vocabulary: int = student.model.vocab_size
    top_k = min(settings.top_k, vocabulary)
    place = own_copy(context.directory) or Path(settings.teacher)
    if top_k and not place.is_dir() and recorded(context.directory) is not None:
        return Teacher(None, _gone, None, {}, place, top_k)
    config = teacher_config(place, vocabulary)
    model, _ = load.build_model(config, str(place))
    tokenizer = Tokenizer.load(place) if (place / TOKENIZER).is_file() else None
    model = load.allocated(model, place, tokenizer)
    if tokenizer is not None and student.tokenizer is not None and tokenizer.hash != student.tokenizer.hash:
        raise InputError(
            f"distill.teacher={place} was trained with another tokenizer, so its ids mean other words. Use that one: "
            f"data.tokenizer={place / TOKENIZER}"
        )
    if model.vocab_size != vocabulary:
        raise InputError(
            f"the teacher {place} has a vocabulary of {model.vocab_size} and this model one of {vocabulary}: "
            f"set model.vocab_size={model.vocab_size}."
        )
    if model.block_size < (block_size := context.settings.block_size):
        raise InputError(
            f"the teacher {place} reads {model.block_size} tokens at most, and architecture.block_size is "
            f"{block_size}. Use a shorter one here."
        )
    context.notes.derive(
        "distill.teacher",
        place.parent.parent.name if place.name.startswith("step_") else str(place),
        f"{model.count_parameters()['total']:,} parameters, frozen; {student.counts['total']:,} here",
    )
    boxed = load.boxed_params(model, context.topology)
    return Teacher(model, make_apply(model), boxed, config, place, top_k)


def _gone(*_: Any, **__: Any) -> Any:
    raise AssertionError("a teacher that is gone cannot be applied")


def identity(teacher: Teacher, directory: RunDirectory) -> str:
    """Return the SHA-256 of the teacher's weights. Raise InputError if the run was started with others."""
    known = recorded(directory)
    if teacher.model is None:
        assert known is not None
        return known
    found = broadcast("the teacher's weights", lambda: weights_digest(teacher.place))
    if known is not None and known != found:
        raise InputError(
            f"distill.teacher={teacher.place} holds other weights ({found[:12]}) than those this run began with "
            f"({known[:12]}). Put those back, or start a new run."
        )
    return found


def recorded(directory: RunDirectory) -> str | None:
    """Return the SHA-256 of the stored teacher's weights that the run began with; None before its first step."""
    path = TEACHER_RECORD.path(directory.path)
    try:
        return str(read_json(path)["sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error}): put it back from a copy.") from error


def record(teacher: Teacher | None, directory: RunDirectory, process_zero: bool) -> None:
    """Record before the first step which weights a stored teacher has."""
    if teacher is None or teacher.live or recorded(directory) is not None:
        return
    facts = {"teacher": str(teacher.place), "sha256": identity(teacher, directory)}
    if process_zero:
        TEACHER_RECORD.write(directory.path, json.dumps(facts, indent=1))


def own_copy(directory: RunDirectory) -> Path | None:
    """Return the run's own copy of the teacher, once it is written."""
    store = Checkpoints(REFERENCE_WEIGHTS.path(directory.path))
    return store.path(0) if 0 in store.committed() and (store.path(0) / "config.yaml").is_file() else None


def teacher_config(place: Path, vocabulary: int) -> dict[str, Any]:
    """Return the teacher's configuration; its recipe's for a teacher that a plan would train first."""
    if str(place).startswith(PREFIX):
        tree = planned_recipe(str(place).removeprefix(PREFIX)).tree()
        return {**tree, "model": {**tree["model"], "vocab_size": vocabulary}}
    if not place.is_dir():
        raise InputError(f"distill.teacher={place} is gone, and the run holds no copy of it yet. Put it back.")
    return tree_in(place)


def read_params(teacher: Teacher, topology: Topology) -> Any:
    """Return the teacher's parameters, sharded over the mesh; adapters merged."""
    manager = Checkpoints(teacher.place.parent, process_zero=topology.is_process_zero)
    return read_weights(teacher.place, manager, teacher.model, teacher.boxed, topology)


def files_of(teacher: Teacher) -> dict[str, str]:
    """Return the files written beside the parameters, so that they can be used without the teacher's run."""
    from omegaconf import OmegaConf

    place = teacher.place
    shape = {name: value for name, value in teacher.config.items() if name in load.SECTIONS}
    found = Tokenizer.load(place).files if (place / TOKENIZER).is_file() else {}
    if (allocation := ALLOCATION.path(place)).is_file():
        found = {**found, ALLOCATION.name: allocation.read_text("utf-8")}
    return {**found, "config.yaml": OmegaConf.to_yaml(OmegaConf.create(shape))}


# --- stored targets ----------------------------------------------------------------------------------------
# A teacher's K most likely tokens at each position of every training row, stored once:
#
#     $BESSEMER_HOME/taught/HASH/ids.npy       (rows, T, K) int32
#                               /logprobs.npy  (rows, T, K) float32, at the run's temperature
#                               /sums.bin      checksums of both, verified before a row is used
#                               /about.json    written last: which rows, which teacher, K, τ
#                               /.lock         held by the run that writes
#
# 8·K bytes per token. The hash is of the rows, the teacher's weights, K and τ, so runs that agree on those
# share it; of runs that start together, one writes and the others wait for it.

TOKENS = 2**15  # positions in one forward pass of the teacher
FILES = {TOP_IDS: ("ids.npy", np.int32), TOP_LOGPROBS: ("logprobs.npy", np.float32)}
ABOUT = "about.json"
FORMAT = 2
"""Format 1 had no checksums, and two runs could write into one folder at the same time."""
WAIT = 7 * 24 * 3600.0  # seconds that processes of a run wait while another run writes


def target_fields(block_size: int, k: int) -> Fields:
    """Return the fields that a stored teacher adds to a row."""
    return {name: ((block_size, k), np.dtype(kind)) for name, (_, kind) in FILES.items()}


class TargetRows:
    """Rows with the teacher's most likely tokens as two more columns, (n, T, K) each. Their order stays the same."""

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.rows, self.block_size, self.stats = rows, rows.block_size, rows.stats
        self.fingerprint = rows.fingerprint
        with storage("cannot open the teacher's stored tokens"):
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


def with_targets(context: RunContext, teacher: Teacher | None, rows: Rows) -> Rows:
    """Return the rows as the objective needs them: with the columns of a stored teacher, otherwise unchanged."""
    if teacher is None or teacher.live:
        return rows
    about = {
        "rows": rows.fingerprint,
        "teacher": identity(teacher, context.directory),
        "k": teacher.top_k,
        "temperature": context.config.make(DistillSettings).temperature,
    }
    folder = TEACHER_TARGETS.path(data_root(context.config["data/root"]), json_digest(about)[:24])
    if stored(folder) != "yes":
        with written_by_one(context, folder):
            if (found := stored(folder)) == "older":
                context.notes.say(
                    f"note: {folder} was written by an older version, without checksums; it may lack rows and is "
                    "written again"
                )
            if found != "yes":
                write(context, teacher, rows, folder, about)
    return TargetRows(rows, folder)


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

    return broadcast(f"taught {folder.name}", look, WAIT)


@contextlib.contextmanager
def written_by_one(context: RunContext, folder: Path) -> Iterator[None]:
    """Hold the folder's lock in process 0, which writes; wait for another run that holds it."""
    if not context.topology.is_process_zero:
        yield
        return

    def say(owner: str) -> None:
        context.notes.say(f"teacher    {owner} is storing the same tokens in {folder}; waiting for it")

    with exclusive(folder, "storing a teacher's tokens in", wait=True, on_wait=say):
        yield


def write(context: RunContext, teacher: Teacher, rows: Rows, folder: Path, about: dict[str, Any]) -> None:
    """Run the teacher over all rows. Every process takes part; process 0 writes, and commits at the end."""
    k, block, begun, topology = teacher.top_k, rows.block_size, time.monotonic(), context.topology
    if teacher.model is None:
        raise StorageError(
            f"distill.teacher={teacher.place} is gone, and so are the tokens stored of it ({folder}). Put one of them "
            "back, or start a new run with init=."
        )
    context.notes.say(f"teacher    its {k} most likely tokens for {len(rows):,} rows are stored first: {folder}")
    params = read_params(teacher, topology)

    @jax.jit
    def score(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = top_tokens(teacher.apply(params, batch, method="projection"), k, about["temperature"])
        return jax.lax.with_sharding_constraint(tuple(found), topology.replicated)

    size = max(1, TOKENS // block // topology.data_parallel) * topology.data_parallel
    shape = (len(rows), block, k)
    with contextlib.ExitStack() as stack:
        outputs: dict[str, Column] = {}
        if topology.is_process_zero:
            outputs = {name: stack.enter_context(Column(folder, name, shape)) for name in FILES}
        with topology.scope():
            for first in range(0, len(rows), size):
                chosen = np.minimum(np.arange(first, first + size), len(rows) - 1)
                batch = {name: column for name, column in rows.get(chosen).items() if column.ndim == 2}
                placed = {name: place_rows(column, topology.batch_sharding()) for name, column in batch.items()}
                for name, values in zip(FILES, fetch(score(params, placed)), strict=True):
                    if name in outputs:
                        outputs[name].append(values[: len(rows) - first])
        broadcast(f"written {folder.name}", lambda: finish(folder, outputs, about))
    context.notes.say(f"teacher    stored in {time.monotonic() - begun:.1f} s")


class Column:
    """One file of a folder being written, row after row, under a temporary name."""

    def __init__(self, folder: Path, name: str, shape: tuple[int, ...]) -> None:
        file, kind = FILES[name]
        self.dtype, self.sums, self.shape = np.dtype(kind), ChunkSums(), shape
        self.path, self.temporary = folder / file, folder / f"{file}.tmp"
        self.file: BinaryIO

    def __enter__(self) -> Column:
        header = io.BytesIO()
        facts = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(header, facts)
        with storage("cannot store the teacher's tokens"):
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
        with storage("cannot store the teacher's tokens"):
            self.file.write(data)

    def commit(self) -> np.ndarray:
        """Give the file its name; return its checksums."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.replace(self.path)
        return self.sums.finish()


def finish(folder: Path, outputs: dict[str, Column], about: dict[str, Any]) -> str:
    with storage("cannot store the teacher's tokens"):
        (folder / ABOUT).unlink(missing_ok=True)  # of an older format
        sums = {column.path.name: column.commit() for column in outputs.values()}
        facts = {**about, "format": FORMAT, "checksums": save_sums(folder, sums)}
    atomic_write(folder / ABOUT, json.dumps(facts, indent=1), sync=True)
    return "written"
