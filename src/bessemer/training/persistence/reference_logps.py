"""Cached reference log-probabilities: log π_ref of every answer, computed once with the starting weights.

They are written to RUN/reference/logps-DATA.safetensors before the first step and read from there after any restart, so
no reference weights are in memory while training. An objective asks for them with the trait `reference_logps`; its
rows then carry one field more:

| field | shape | meaning |
|---|---|---|
| reference_logps | (n, P, 2) float32 | log π_ref of the chosen and the rejected answer of pair p, 0 for none |
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.config import configure
from bessemer.data import Batch, Rows
from bessemer.data.rows.preference import most_pairs
from bessemer.data.rows.rows import Fields
from bessemer.errors import InputError, StorageError
from bessemer.objectives.pairs import answer_logps
from bessemer.registry import objectives
from bessemer.storage.files import storage
from bessemer.topology import CompiledTogether, share
from bessemer.training.feed import device_batch, fetch

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


NAME = "reference_logps"
IN_FLIGHT = 8
"""Micro-batches on their way before the first of them is read."""


def wanted(trainer: BaseTrainer) -> bool:
    """The objective's trait, True or a function of its settings."""
    entry = objectives.entry(trainer.settings.objective)
    trait = entry.traits.get(NAME, False)
    return bool(trait(configure(entry.settings[0])) if callable(trait) else trait)


def logps_fields(block_size: int) -> Fields:
    return {NAME: ((most_pairs(block_size), 2), np.dtype(np.float32))}


class ReferencedRows:
    """Pair rows with their reference log-probabilities. Until those are filled in they are NaN, so that a step taken
    without them is not finite rather than wrong."""

    def __init__(self, rows: Any) -> None:
        if not hasattr(rows, "pairs"):
            raise InputError(
                "this objective compares answers, so its rows must hold pairs: give preference data in the style "
                "CONTRASTIVE, as in training.dataset=pairs.jsonl:CONTRASTIVE."
            )
        self.rows: Rows = rows
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
        return {**batch, NAME: np.where(numbers[..., None] >= 0, found, np.float32(0))}

    def fill(self, table: np.ndarray) -> None:
        self.table, self.complete = table, True


def attach(trainer: BaseTrainer, rows: Any) -> Any:
    """The rows as the objective wants them."""
    return ReferencedRows(rows) if wanted(trainer) else rows


def ensure(trainer: BaseTrainer) -> None:
    """Before the first step: fill in what is not there yet, from the disk or by a pass over the data."""
    plan = trainer.data.plan
    held_out = [] if plan.validation is None else plan.validation.rows
    logps = functools.partial(_logps, trainer.model_parts.apply)
    program = CompiledTogether(jax.jit(logps, out_shardings=trainer.topology.replicated), "log-probabilities")
    for rows in dict.fromkeys([*plan.sources, *held_out]):
        if not isinstance(rows, ReferencedRows) or rows.complete:
            continue
        path = place(trainer, rows)
        table = None
        if _is_there(path):
            table = read(path, rows, None if trainer.step else weights_key(trainer.full_params()))
        rows.fill(make(trainer, program, rows, path) if table is None else table)


def _is_there(path: Path) -> bool:
    """As process 0 sees it."""
    return share(f"look for {path.name}", lambda: "yes" if path.is_file() else "no") == "yes"


def place(trainer: BaseTrainer, rows: ReferencedRows) -> Path:
    return trainer.run_directory.path / "reference" / f"logps-{rows.fingerprint[:16]}.safetensors"


def make(trainer: BaseTrainer, program: Any, rows: ReferencedRows, path: Path) -> np.ndarray:
    """Compute with the weights as they are, which must be those the run starts from, and write."""
    if trainer.step > 0:
        raise StorageError(
            f"{path} is gone: it held the log-probabilities of the starting weights, which the first {trainer.step} "
            "steps were trained against. Put it back from a copy, or start a new run with init=."
        )
    trainer.say(f"reference  log-probabilities of {rows.stats['pairs']:,} pairs, computed once")
    params = trainer.full_params()
    table = compute(trainer, functools.partial(program, params), rows)
    facts = {"rows": rows.fingerprint, "weights": weights_key(params), "sha256": digest(table)}
    if trainer.is_process_zero:
        write(path, table, facts)
    return table


def _logps(apply: Any, params: Any, batch: Any) -> jax.Array:
    """One micro-batch, leaves (1, B, …)."""
    return answer_logps(apply, params, jax.tree.map(lambda leaf: leaf[0], batch))


def compute(trainer: BaseTrainer, logps: Any, rows: ReferencedRows) -> np.ndarray:
    """(pairs, 2): one pass over all rows."""
    micro, sharding = trainer.functions.micro, trainer.topology.batch_sharding(1)
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
    """One uint32 a leaf: Σ bits · (2i + 1) mod 2³², the same whatever the sharding."""

    def of(leaf: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
        order = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
        return (bits * (2 * order + 1)).sum(dtype=jnp.uint32)

    return jnp.stack([of(leaf) for leaf in leaves])


def weights_key(params: Any) -> str:
    """Names weights by their content, without bringing them to the host."""
    sums = fetch(_checksums(jax.tree.leaves(params)))
    return hashlib.sha256(repr(jax.tree.structure(params)).encode() + sums.tobytes()).hexdigest()


def digest(table: np.ndarray) -> str:
    return hashlib.sha256(table.tobytes()).hexdigest()


def write(path: Path, table: np.ndarray, facts: dict[str, str]) -> None:
    from safetensors.numpy import save_file

    with storage(f"cannot write {path}"):
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        save_file({NAME: table}, temporary, metadata=facts)
        temporary.replace(path)


def read(path: Path, rows: ReferencedRows, weights: str | None) -> np.ndarray | None:
    """What was written, or None if it is of other weights (`weights` given: a run that starts again)."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        facts, table = facts_of(path), load_file(path)[NAME]
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise StorageError(f"{path} cannot be read ({error}). {BACK}") from error
    if facts.get("rows") != rows.fingerprint or facts.get("sha256") != digest(table):
        raise StorageError(f"{path} is damaged: its content is not what was written. {BACK}")
    return None if weights not in (None, facts.get("weights")) else table


BACK = "Put it back from a copy; before the first step it can be deleted, and is then computed again."


def facts_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file: a length, then that many bytes of JSON."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size))["__metadata__"]


def identity(trainer: BaseTrainer) -> dict[str, str] | None:
    """Which tables are in force, for meta.json: their names and hashes."""
    found = sorted((trainer.run_directory.path / "reference").glob("logps-*.safetensors"))
    return {path.name: facts_of(path)["sha256"] for path in found} or None
