"""The teacher of a distillation: another run's model, of its own shape, frozen and laid over the same mesh.

Its parameters are the state's `reference`: read once, written to RUN/reference/step_0 with their configuration, and
from then on the run needs the teacher's own directory no more. With `distill.top_k` it is not held at all (taught.py):
RUN/reference/teacher.json names its weights, so that a run whose teacher is gone finds what was stored of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import jax
import numpy as np

from bessemer.checkpoint import Checkpoints
from bessemer.config import configure
from bessemer.config.bounded import read_json
from bessemer.data import data_root
from bessemer.data.rows.rows import Batch, Fields, Rows, fields_of
from bessemer.data.tokenize.tokenizer import FILE as TOKENIZER
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError, StorageError
from bessemer.generate import load
from bessemer.job import atomic_write
from bessemer.losses.distillation import top_tokens
from bessemer.models.allocation import FILE as ALLOCATION
from bessemer.objectives.distill import TOP_IDS, TOP_LOGPROBS, DistillSettings
from bessemer.registry import objectives
from bessemer.storage.checksums import ChunkSums, VerifiedFile, load_sums, save_sums
from bessemer.storage.files import storage
from bessemer.storage.lock import exclusive
from bessemer.topology import share
from bessemer.training.feed import fetch
from bessemer.training.setup.init_recipe import PREFIX, planned_recipe
from bessemer.training.setup.initial_weights import read_weights, tree_in, weights_digest
from bessemer.training.setup.model import make_apply

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


RECORD = "teacher.json"


class Teacher(NamedTuple):
    """`apply(params, batch, method="projection")`; `place` is the directory the parameters are read from. The model is
    None if that is gone and the run trains on what was stored of it."""

    model: Any
    apply: Callable[..., Any]
    boxed: Any
    config: dict[str, Any]
    place: Path
    live: bool  # held during training, not only stored from


def find_teacher(trainer: BaseTrainer) -> Teacher | None:
    """The teacher of an objective that has one (trait `teacher`), checked against the student; no array is read."""
    entry = objectives.entry(trainer.settings.objective)
    if not entry.traits.get("teacher"):
        return None
    settings: Any = configure(entry.settings[0])
    if settings.teacher is None:
        raise InputError(f"objective={entry.name} learns from another run: give distill.teacher=RUN.")
    place = kept_place(trainer) or Path(settings.teacher)
    if settings.top_k and not place.is_dir() and recorded(trainer) is not None:
        return Teacher(None, _gone, None, {}, place, live=False)
    config = config_of(trainer, place)
    model, _ = load.build_model(config, str(place))
    tokenizer = Tokenizer.load(place) if (place / TOKENIZER).is_file() else None
    model = load.allocated(model, place, tokenizer)
    check_teacher(trainer, model, tokenizer, place)
    boxed = load.boxed_params(model, trainer.topology)
    trainer.note_derived(
        "distill.teacher",
        place.parent.parent.name if place.name.startswith("step_") else str(place),
        f"{model.count_parameters()['total']:,} parameters, frozen; {trainer.model_parts.counts['total']:,} here",
    )
    return Teacher(model, make_apply(model), boxed, config, place, settings.top_k == 0)


def _gone(*_: Any, **__: Any) -> Any:
    raise AssertionError("a teacher that is gone cannot be applied")


def identity(trainer: BaseTrainer) -> str:
    """Return the SHA-256 that names the teacher's weights. Raise InputError if the run was begun with others."""
    teacher, known = trainer.teacher, recorded(trainer)
    assert teacher is not None
    if teacher.model is None:
        assert known is not None
        return known
    found = share("the teacher's weights", lambda: weights_digest(teacher.place))
    if known is not None and known != found:
        raise InputError(
            f"distill.teacher={teacher.place} holds other weights ({found[:12]}) than those this run began with "
            f"({known[:12]}). Put those back, or start a new run."
        )
    return found


def recorded(trainer: BaseTrainer) -> str | None:
    """Return the SHA-256 of the stored teacher's weights that the run began with; None before its first step."""
    path = trainer.run_directory.path / "reference" / RECORD
    try:
        return str(read_json(path)["sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error}): put it back from a copy.") from error


def record(trainer: BaseTrainer) -> None:
    """Before the first step: write which weights a stored teacher has."""
    teacher = trainer.teacher
    if teacher is None or teacher.live or recorded(trainer) is not None:
        return
    facts = {"teacher": str(teacher.place), "sha256": identity(trainer)}
    if trainer.is_process_zero:
        path = trainer.run_directory.path / "reference" / RECORD
        with storage("cannot record the teacher"):
            path.parent.mkdir(exist_ok=True)
        atomic_write(path, json.dumps(facts, indent=1))


def kept_place(trainer: BaseTrainer) -> Path | None:
    """The run's own copy of the teacher, once it is written."""
    store = Checkpoints(trainer.run_directory.path / "reference")
    return store.path(0) if 0 in store.committed() and (store.path(0) / "config.yaml").is_file() else None


def config_of(trainer: BaseTrainer, place: Path) -> dict[str, Any]:
    """The teacher's configuration; of one that a plan would train first, its recipe's."""
    if str(place).startswith(PREFIX):
        tree = planned_recipe(str(place).removeprefix(PREFIX)).tree()
        return {**tree, "model": {**tree["model"], "vocab_size": trainer.model.vocab_size}}
    if not place.is_dir():
        raise InputError(
            f"distill.teacher={place} is gone, and the run holds no copy of it yet. Put it back."
        )
    return tree_in(place)


def check_teacher(trainer: BaseTrainer, model: Any, tokenizer: Tokenizer | None, place: Path) -> None:
    """Both must mean the same by an id, and the teacher must be able to read the student's rows."""
    student, own = trainer.model, trainer.tokenizer
    if tokenizer is not None and own is not None and tokenizer.hash != own.hash:
        raise InputError(
            f"distill.teacher={place} was trained with another tokenizer, so its ids mean other words. Use that one: "
            f"data.tokenizer={place / TOKENIZER}"
        )
    if model.vocab_size != student.vocab_size:
        raise InputError(
            f"the teacher {place} has a vocabulary of {model.vocab_size} and this model one of {student.vocab_size}: "
            f"set model.vocab_size={model.vocab_size}."
        )
    if model.block_size < trainer.settings.block_size:
        raise InputError(
            f"the teacher {place} reads {model.block_size} tokens at most, and architecture.block_size is "
            f"{trainer.settings.block_size}. Use a shorter one here."
        )


def read_params(trainer: BaseTrainer, teacher: Teacher) -> Any:
    """The teacher's parameters where the mesh rests them; adapters merged."""
    manager = trainer.checkpoint_manager
    return read_weights(teacher.place, manager, teacher.model, teacher.boxed, trainer.topology)


def files_of(teacher: Teacher) -> dict[str, str]:
    """What is kept beside the parameters, so that they can be used without the teacher's run."""
    place, found = teacher.place, {}
    if (place / TOKENIZER).is_file():
        found = Tokenizer.load(place).files
    if (place / ALLOCATION).is_file():
        found = {**found, ALLOCATION: (place / ALLOCATION).read_text("utf-8")}
    return {**found, "config.yaml": whole_config(teacher.config)}


def whole_config(config: dict[str, Any]) -> str:
    """The teacher's configuration as that of a model whose parameters are all in one place."""
    from omegaconf import OmegaConf

    shape = {name: value for name, value in config.items() if name in load.SECTIONS}
    return OmegaConf.to_yaml(OmegaConf.create(shape))


# What a teacher says about every training row, stored once: its k likeliest tokens at each position.
#
#     $BESSEMER_HOME/taught/HASH/ids.npy       (rows, T, K) int32
#                               /logprobs.npy  (rows, T, K) float32, at the run's temperature
#                               /sums.bin      checksums of both, verified before a row is used
#                               /about.json    written last: which rows, which teacher, K, τ
#                               /.lock         held by the run that writes
#
# 8·K bytes a token. The hash is of the rows, the teacher's weights, K and τ, so runs that agree on those
# share it; of runs that start together, one writes and the others wait for it.


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
        "teacher": identity(trainer),
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
    params = read_params(trainer, teacher)
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
