"""What the objective compares with: reference weights, or log-probabilities that were computed with them once.

Reference weights are the trained parameters at one step, or a teacher's. They stay on the devices as `state.reference`
and are written once to RUN/reference/step_N, before the first step that uses them. In force at step s is the newest
taken at a step ≤ s, so a restart finds the right one. A reference taken where a stage begins comes after that step's
checkpoint, whose state was still trained against the one before.

Reference log-probabilities are computed with the starting weights and written to RUN/reference/logps-DATA.safetensors
before the first step, so no reference weights are in memory while training. An objective asks for them with the trait
`reference_logps`; its rows then have the field reference_logps, (n, P, 2) float32: log π_ref of the chosen and the
rejected answer of pair p, 0 for none.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint import store as retention
from bessemer.config import Config
from bessemer.data import Batch, BatchPlan, Rows
from bessemer.data.rows.build import most_pairs
from bessemer.data.rows.rows import Fields
from bessemer.errors import InputError, StorageError
from bessemer.job import RunDirectory
from bessemer.objectives.preference import answer_logps
from bessemer.registry import objectives
from bessemer.storage.files import REFERENCE_LOGPS, REFERENCE_WEIGHTS, storage
from bessemer.storage.weights import WeightFile, write_file
from bessemer.topology import CompiledTogether, broadcast
from bessemer.training import stages
from bessemer.training.feed import device_batch, fetch
from bessemer.training.persistence import teacher
from bessemer.training.persistence.teacher import Teacher
from bessemer.training.settings import RunContext
from bessemer.training.stages import Stage
from bessemer.training.state import RunState

LOGPS = "reference_logps"
IN_FLIGHT = 8
"""Micro-batches dispatched before the first of them is read."""
UNLIMITED = 1 << 30  # only `_prune` deletes references


def _trait(config: Config, name: str) -> bool:
    """Return a trait of the objective: True, or a function of its settings."""
    entry = objectives.entry(config["objective"])
    trait = entry.traits.get(name, False)
    return bool(trait(config.make(entry.settings[0])) if callable(trait) else trait)


def wants_weights(config: Config) -> bool:
    return _trait(config, "reference")


def wants_logps(config: Config) -> bool:
    return _trait(config, LOGPS)


# --- weights -----------------------------------------------------------------------------------------------
def open_references(context: RunContext) -> Checkpoints:
    folder = REFERENCE_WEIGHTS.path(context.directory.path)
    return Checkpoints(folder, keep_last=UNLIMITED, process_zero=context.topology.is_process_zero)


def take(context: RunContext, run: RunState, abstract: Any, source: Teacher | None, manager: Checkpoints) -> None:
    """Make the trained parameters as they are (or those of the teacher `source`) the reference, placed as `abstract`,
    in the state and on disk. Every process calls it. `manager`: the run's checkpoints."""
    if source is not None:
        reference, files = teacher.read_params(source, context.topology), teacher.files_of(source)
    else:
        placed = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=placed)
        reference, files = copy(run.state.params), {}  # the frozen ones never change
    # Orbax counts its barriers per process, not per store: of two concurrent saves, one's could meet the other's.
    manager.wait()
    references = open_references(context)
    references.save(run.step, {"params": reference}, files=files, meta={"kind": "reference"}, wait=True)
    _prune(references, oldest=min(manager.committed(), default=0))
    references.close()
    run.state = run.state.replace(reference=reference)


def restore(context: RunContext, abstract: Any, planned: Sequence[Stage], step: int) -> Any:
    """Return the reference in force at `step`, in the shapes of `abstract`; None if the run has none."""
    if abstract is None:
        return None
    references = open_references(context)
    known = in_force(references, planned, step)
    if not known:
        return None  # stopped before the first one was taken: the loop takes it
    if problems := references.verify(known[-1]):
        raise StorageError(
            f"the reference weights {references.path(known[-1])} are damaged: {'; '.join(problems[:3])}. They are "
            "written once; put them back from a copy, or start a new run with init=."
        )
    return references.restore(known[-1], {"params": abstract})["params"]


def in_force(references: Checkpoints, planned: Sequence[Stage], step: int) -> list[int]:
    """Return the steps of the references that a state saved at `step` may have known; the last is the one it had."""
    last = step - 1 if stages.begins(planned, step) else step
    return [taken for taken in references.committed() if taken <= last]


def drop_after(context: RunContext, step: int) -> None:
    """Set aside references taken after `step`, from which the run continues: they are from an abandoned branch."""
    references = open_references(context)
    if any(taken > step for taken in references.committed()):
        references.set_aside_after(step)


def weights_identity(context: RunContext, planned: Sequence[Stage], step: int) -> dict[str, Any] | None:
    """Return step and manifest hash of the reference in force at `step`, for meta.json."""
    references = open_references(context)
    known = in_force(references, planned, step)
    if not known:
        return None
    return {"step": known[-1], "sha256": references.identity(known[-1])}


def _prune(references: Checkpoints, oldest: int) -> None:
    """Delete references that no remaining checkpoint needs, the `oldest` of them included."""
    needless = [taken for taken in references.committed() if taken <= oldest][:-1]
    if references.process_zero:
        with storage("cannot delete an old reference"):
            for taken in needless:
                retention.delete(references.root, taken)


# --- log-probabilities -------------------------------------------------------------------------------------
def logps_fields(block_size: int) -> Fields:
    return {LOGPS: ((most_pairs(block_size), 2), np.dtype(np.float32))}


@runtime_checkable
class PairRows(Rows, Protocol):
    """Rows of preference pairs. Pairs are numbered across rows."""

    pairs: int


class ReferencedRows:
    """Pair rows with their reference log-probabilities. They are NaN until filled in, so that a step taken without them
    is not finite rather than wrong."""

    def __init__(self, rows: Rows) -> None:
        if not isinstance(rows, PairRows):
            raise InputError(
                "this objective compares answers, so its rows must hold pairs: use preference data in the style "
                "CONTRASTIVE, as in training.dataset=pairs.jsonl:CONTRASTIVE."
            )
        self.rows = rows
        self.block_size, self.fingerprint, self.stats = rows.block_size, rows.fingerprint, rows.stats
        self.fields: Fields = rows.fields | logps_fields(rows.block_size)
        self.table = np.full((rows.pairs, 2), np.nan, np.float32)
        self.complete = False

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, indices: np.ndarray) -> Batch:
        batch = self.rows.get(indices)
        numbers = batch["pair_ids"]
        found = self.table[np.maximum(numbers, 0)]  # (n, P, 2)
        return {**batch, LOGPS: np.where(numbers[..., None] >= 0, found, np.float32(0))}

    def fill(self, table: np.ndarray) -> None:
        self.table, self.complete = table, True


def attach_logps(config: Config, rows: Any) -> Any:
    """Return the rows as the objective needs them."""
    return ReferencedRows(rows) if wants_logps(config) else rows


def ensure_logps(context: RunContext, run: RunState, plan: BatchPlan, apply: Any, micro: int) -> None:
    """Fill in the rows of `plan` before the first step, from disk or by a pass over the data with `apply`."""
    held_out = [] if plan.validation is None else plan.validation.rows
    logps = functools.partial(_logps, apply)
    program = CompiledTogether(jax.jit(logps, out_shardings=context.topology.replicated), "log-probabilities")
    for rows in dict.fromkeys([*plan.sources, *held_out]):
        if not isinstance(rows, ReferencedRows) or rows.complete:
            continue
        path = REFERENCE_LOGPS.path(context.directory.path, rows.fingerprint[:16])
        table = None
        if _is_there(path):
            table = read(path, rows, None if run.step else weights_key(run.state.whole()))
        if table is None:
            if run.step > 0:
                raise StorageError(
                    f"{path} is gone: it held the log-probabilities of the starting weights, which the first "
                    f"{run.step} steps were trained against. Put it back from a copy, or start a new run with init=."
                )
            context.notes.say(f"reference  log-probabilities of {rows.stats['pairs']:,} pairs, computed once")
            params = run.state.whole()
            table = compute(functools.partial(program, params), rows, micro, context.topology.batch_sharding(1))
            facts = {"rows": rows.fingerprint, "weights": weights_key(params), "sha256": digest(table)}
            if context.topology.is_process_zero:
                write(path, table, facts)
        rows.fill(table)


def _is_there(path: Path) -> bool:
    """Return whether process 0 sees the file."""
    return broadcast(f"look for {path.name}", lambda: "yes" if path.is_file() else "no") == "yes"


def _logps(apply: Any, params: Any, batch: Any) -> jax.Array:
    """One micro-batch, leaves (1, B, …)."""
    return answer_logps(apply, params, jax.tree.map(lambda leaf: leaf[0], batch))


def compute(logps: Any, rows: ReferencedRows, micro: int, sharding: NamedSharding) -> np.ndarray:
    """Return the table (pairs, 2), from one pass over all rows."""
    table = np.full_like(rows.table, np.nan)

    def read_rows(begin: int, first: int, end: int) -> Batch:
        return rows.rows.get(np.minimum(np.arange(begin + first, begin + end), len(rows) - 1))

    def take(waiting: list[tuple[int, jax.Array]]) -> None:
        begins, values = zip(*waiting, strict=True)
        for begin, found in zip(begins, fetch(list(values)), strict=True):
            numbers = read_rows(begin, 0, micro)["pair_ids"]
            table[numbers[numbers >= 0]] = found[numbers >= 0]

    waiting: list[tuple[int, jax.Array]] = []
    for begin in range(0, len(rows), micro):
        batch = device_batch(functools.partial(read_rows, begin), rows.rows.fields, micro, 1, sharding)
        waiting.append((begin, logps(batch)))
        if len(waiting) == IN_FLIGHT:
            take(waiting)
            waiting = []
    if waiting:
        take(waiting)
    return table


@jax.jit
def _checksums(leaves: list[jax.Array]) -> jax.Array:
    """Return one uint32 per leaf: Σ bits · (2i + 1) mod 2³², the same whatever the sharding."""

    def of(leaf: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
        order = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
        return (bits * (2 * order + 1)).sum(dtype=jnp.uint32)

    return jnp.stack([of(leaf) for leaf in leaves])


def weights_key(params: Any) -> str:
    """Return a hash of the weights' content, computed without copying them to the host."""
    sums = fetch(_checksums(jax.tree.leaves(params)))
    return hashlib.sha256(repr(jax.tree.structure(params)).encode() + sums.tobytes()).hexdigest()


def digest(table: np.ndarray) -> str:
    return hashlib.sha256(table.tobytes()).hexdigest()


def write(path: Path, table: np.ndarray, facts: dict[str, str]) -> None:
    with storage(f"cannot write {path}"):
        path.parent.mkdir(exist_ok=True)
    write_file(path, {LOGPS: ("float32", table.shape)}, lambda name: table, facts)


def read(path: Path, rows: ReferencedRows, weights: str | None) -> np.ndarray | None:
    """Return the table, or None if it was computed with other weights than `weights`."""
    try:
        file = WeightFile(path)
        facts, table = file.metadata, file.read(LOGPS)
    except (InputError, StorageError, KeyError) as error:
        raise StorageError(f"{path} cannot be read ({error}). {BACK}") from error
    if facts.get("rows") != rows.fingerprint or facts.get("sha256") != digest(table):
        raise StorageError(f"{path} is damaged: its content is not what was written. {BACK}")
    return None if weights not in (None, facts.get("weights")) else table


BACK = "Put it back from a copy; before the first step it can be deleted, and is then computed again."


def logps_identity(directory: RunDirectory) -> dict[str, str] | None:
    """Return names and hashes of the tables in force, for meta.json."""
    found = REFERENCE_LOGPS.all(directory.path)
    return {path.name: WeightFile(path).metadata["sha256"] for path in found} or None
