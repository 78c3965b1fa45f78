"""What a teacher says about every training row, stored once: its k likeliest tokens at each position.

    $BESSEMER_HOME/taught/HASH/ids.npy       (rows, T, K) int32
                              /logprobs.npy  (rows, T, K) float32, at the run's temperature
                              /about.json    written last: which rows, which teacher, K, τ

8·K bytes a token. The hash is of the rows, the teacher's weights, K and τ, so runs that agree on those share it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bessemer.checkpoint.manifest import COMMIT
from bessemer.config import configure
from bessemer.data import data_root
from bessemer.data.rows import Batch, Fields, Rows, fields_of
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


def taught_fields(block_size: int, k: int) -> Fields:
    return {name: ((block_size, k), np.dtype(kind)) for name, (_, kind) in FILES.items()}


class TaughtRows:
    """Rows with the teacher's likeliest tokens as two more columns, (n, T, K) each. Their order stays the same."""

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.rows, self.block_size, self.stats = rows, rows.block_size, rows.stats
        self.fingerprint = rows.fingerprint
        self.columns = {name: np.load(folder / file, mmap_mode="r") for name, (file, _) in FILES.items()}
        self.fields = rows.fields | fields_of(self.columns)

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, indices: np.ndarray) -> Batch:
        return {**self.rows.get(indices), **{name: column[indices] for name, column in self.columns.items()}}


def stored_tokens(trainer: BaseTrainer) -> int | None:
    """Return K if the run trains on a stored teacher, else None."""
    if trainer.teacher is None or trainer.teacher.live:
        return None
    return min(configure(DistillSettings).top_k, trainer.model.vocab_size)


def taught(trainer: BaseTrainer, rows: Rows) -> Rows:
    """The rows as the objective needs them: those of a stored teacher with its columns, all others as they are."""
    teacher = trainer.teacher
    if teacher is None or teacher.live:
        return rows
    settings = configure(DistillSettings)
    weights = hashlib.sha256((teacher.place / COMMIT).read_bytes()).hexdigest()
    about = {
        "rows": rows.fingerprint,
        "teacher": weights,
        "k": min(settings.top_k, trainer.model.vocab_size),
        "temperature": settings.temperature,
    }
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    folder = data_root(trainer.config["data/root"]) / "taught" / name
    if share(f"taught {name}", lambda: str((folder / ABOUT).is_file())) != "True":
        write(trainer, teacher, rows, folder, about)
    return TaughtRows(rows, folder)


def write(
    trainer: BaseTrainer, teacher: teachers.Teacher, rows: Rows, folder: Path, about: dict[str, Any]
) -> None:
    """Run the teacher over all rows. Every process takes part; process 0 writes, and renames when all is there."""
    k, block, begun = about["k"], rows.block_size, time.monotonic()
    trainer.say(f"teacher    its {k} likeliest tokens for {len(rows):,} rows are stored first: {folder}")
    params = teachers.read_params(trainer, teacher)
    replicated = trainer.topology.replicated

    @jax.jit
    def score(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = top_tokens(teacher.apply(params, batch, method="projection"), k, about["temperature"])
        return jax.lax.with_sharding_constraint(tuple(found), replicated)

    size = max(1, TOKENS // block // trainer.topology.data_parallel) * trainer.topology.data_parallel
    partial = folder.with_name(f"{folder.name}.tmp")
    outputs = open_outputs(partial, (len(rows), block, k)) if trainer.is_process_zero else {}
    with trainer.topology.scope():
        for first in range(0, len(rows), size):
            chosen = np.minimum(np.arange(first, first + size), len(rows) - 1)
            batch = {name: column for name, column in rows.get(chosen).items() if column.ndim == 2}
            placed = {name: put(trainer, column) for name, column in batch.items()}
            for name, values in zip(FILES, fetch(score(params, placed)), strict=True):
                if name in outputs:
                    outputs[name][first : first + size] = values[: len(rows) - first]
    share(f"written {folder.name}", lambda: finish(partial, folder, outputs, about))
    trainer.say(f"teacher    stored in {time.monotonic() - begun:.1f} s")


def open_outputs(partial: Path, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    with storage("cannot store what the teacher says"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return {
            name: np.lib.format.open_memmap(partial / file, mode="w+", dtype=kind, shape=shape)
            for name, (file, kind) in FILES.items()
        }


def finish(partial: Path, folder: Path, outputs: dict[str, Any], about: dict[str, Any]) -> str:
    with storage("cannot store what the teacher says"):
        for output in outputs.values():
            output.flush()
        (partial / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return "written"


def put(trainer: BaseTrainer, column: np.ndarray) -> jax.Array:
    """Rows over the mesh's batch axes; every process has read all of them."""
    sharding = trainer.topology.batch_sharding()
    return jax.make_array_from_callback(column.shape, sharding, lambda index: column[index])
