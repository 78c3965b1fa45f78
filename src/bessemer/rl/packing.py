"""grpo.pack: several completions share a row, each in its own segment, so that padding is neither scored nor trained.

A rollout is stored one completion per row. What a pass reads is packed: rows with completions come first, blank ones
follow, so the shapes stay those of unpacked rows and one program serves all lengths. The field COMPLETIONS counts the
completions of each row; a pass ends after the last micro-batch that has one (training/step.py). Packing is a pure
function of the rows, so nothing of it is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bessemer.data.rows.build import best_fit
from bessemer.data.rows.rows import COMPLETIONS, Fields
from bessemer.errors import InputError
from bessemer.models.moe import EXPERT_IDS
from bessemer.models.transformer import Transformer
from bessemer.objectives.grpo import GrpoSettings, SampledSettings
from bessemer.rl.rollout import GRPOTrainerConfig

BLANK = {"target_ids": -1, EXPERT_IDS: -1}
"""What stands where no token is; 0 in other fields, and input_ids keep their own padding."""


@dataclass(frozen=True)
class Packed:
    """`rows`: arrays (n, T) and COMPLETIONS (n, 1); `used`: how many of them hold completions. Completion i of the
    unpacked rows is at columns starts[i] … starts[i] + lengths[i] − 1 of row places[i]; −1: it was left out."""

    rows: dict[str, np.ndarray]
    used: int
    places: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def unpacked(self, values: np.ndarray) -> np.ndarray:
        """Return one value per position of the unpacked rows, (N, T), from those of the packed ones, (n, T)."""
        out = np.zeros((len(self.places), values.shape[1]), values.dtype)
        for completion, (row, start, length) in enumerate(zip(self.places, self.starts, self.lengths, strict=True)):
            if row >= 0:
                out[completion, :length] = values[row, start : start + length]
        return out


def pack_rows(rows: Mapping[str, np.ndarray], wanted: np.ndarray) -> Packed:
    """Return the completions with a `wanted` token, (N, T) bool, in as few of the N rows as best fit finds.

    A completion that is left out is still counted, in the first row: the denominator `fixed` is over all of them.
    """
    count, block = rows["input_ids"].shape
    lengths = (rows["segment_ids"] > 0).sum(axis=1)
    chosen = np.flatnonzero(np.any(wanted, axis=1) & (lengths > 0))
    order, widths = best_fit(lengths[chosen], block)
    pad = rows["input_ids"][np.arange(count), np.minimum(lengths, block - 1)][lengths < block]
    fill = BLANK | {"input_ids": int(pad[0]) if len(pad) else 0}
    out = {name: np.full_like(array, fill.get(name, 0)) for name, array in rows.items()}
    out[COMPLETIONS] = np.zeros((count, 1), np.float32)
    out[COMPLETIONS][: len(widths), 0] = widths
    out[COMPLETIONS][0] += count - len(chosen)
    places, starts = np.full(count, -1), np.zeros(count, np.int64)
    left = iter(chosen[order].tolist())
    for row, width in enumerate(widths.tolist()):
        start = 0
        for segment in range(1, width + 1):
            completion = next(left)
            length = int(lengths[completion])
            for name, array in rows.items():
                out[name][row, start : start + length] = array[completion, :length]
            out["segment_ids"][row, start : start + length] = segment
            places[completion], starts[completion] = row, start
            start += length
    return Packed(out, len(widths), places, starts, lengths)


def pack_fields(settings: GRPOTrainerConfig) -> Fields:
    """Return the field that packed rows have beside those of a rollout."""
    return {COMPLETIONS: ((1,), np.dtype(np.float32))} if settings.pack else {}


def check_packing(settings: GRPOTrainerConfig, policy: SampledSettings, model: object) -> None:
    """Raise InputError where completions cannot share a row."""
    if not settings.pack:
        return
    if not isinstance(policy, GrpoSettings):
        raise InputError(
            "grpo.pack puts completions side by side, which a teacher without a document mask would read as one text: "
            "leave it out."
        )
    if policy.offline != "no":
        raise InputError(
            f"grpo.pack packs sampled completions, and with grpo.offline={policy.offline} they are stored one per row: "
            "leave it out."
        )
    if policy.exact:
        raise InputError(
            "grpo.pack puts a completion anywhere in a row, and grpo.exact=true promises bits that depend on its place "
            "at the row's beginning: use one of them."
        )
    if not isinstance(model, Transformer):
        raise InputError(
            f"grpo.pack needs completions of one row that do not see each other, and {type(model).__name__} has no "
            "document mask (architecture.document_mask): set grpo.pack=false."
        )
    if not model.document_mask:
        raise InputError(
            "grpo.pack needs completions of one row that do not see each other: set architecture.document_mask=true, "
            "or grpo.pack=false."
        )
