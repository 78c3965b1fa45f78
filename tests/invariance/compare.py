"""How far two finished runs are from each other: every array of the final state, every row of the metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tests.invariance.classes import Bound

from bessemer.checkpoint import Checkpoints

Arrays = dict[str, np.ndarray]
COMPARED = ("loss", "nll", "grad_norm", "val_loss", "val_bpb")
COUNTED = ("step", "target_tokens")
ENOUGH = 256
"""Elements of an array from which on its mean says something."""


class Worst(NamedTuple):
    """The value farthest from 0, and the array it was found in."""

    value: float = 0.0
    name: str = "nothing"

    def __str__(self) -> str:
        return f"{self.value:+.1e} ({self.name})"


@dataclass(frozen=True)
class Difference:
    most: Worst
    largest: Worst
    mean: Worst
    length: Worst
    losses: float

    def within(self, bound: Bound) -> bool:
        measures = ("most", "largest", "mean", "length")
        kept = all(abs(getattr(self, name).value) <= getattr(bound, name) for name in measures)
        return kept and self.losses <= bound.losses

    def __str__(self) -> str:
        return (
            f"most {self.most}, largest {self.largest}, mean signed {self.mean}, length {self.length}, "
            f"losses {self.losses:.1e}"
        )


def saved_arrays(run: Path, step: int | None = None) -> Arrays:
    """Every array of a checkpoint (the newest), by name, as numpy."""
    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.latest() if step is None else step
    assert step is not None and not checkpoints.verify(step)
    abstract = {
        name: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for name, (dtype, shape) in checkpoints.leaves(step).items()
    }
    return checkpoints.restore(step, abstract)


def meta(run: Path) -> dict:
    """The facts of the newest checkpoint: step, iteration, mesh, …"""
    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.latest()
    assert step is not None
    return json.loads(checkpoints.read(step, "meta.json"))


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def digests(run: Path) -> dict[int, str]:
    """Data step -> digest of its batch. A step taken again after a resume must have been given the same batch."""
    found: dict[int, str] = {}
    for line in (run / "batches.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert found.setdefault(entry["data_step"], entry["digest"]) == entry["digest"]
    return found


def difference(run: Path, baseline: Path, start: Arrays) -> Difference:
    """The measures of one run against its baseline, which began with the arrays `start`.

    For an array with final values x (baseline b, start a; a moment starts at 0), relative to m = max |b − a|: largest =
    max |x − b| / m; most, the same without the worst thousandth; mean = mean(x − b) / m; and since a mean over weights
    of both signs hides a step that is a little too long, length = ⟨x − b, b − a⟩ / ⟨b − a, b − a⟩.
    """
    mine, theirs = saved_arrays(run), saved_arrays(baseline)
    assert mine.keys() == theirs.keys()
    found: dict[str, list[Worst]] = {name: [Worst()] for name in ("most", "largest", "mean", "length")}
    for name, b in theirs.items():
        assert mine[name].dtype == b.dtype and mine[name].shape == b.shape
        if not np.issubdtype(b.dtype, np.floating):
            assert np.array_equal(mine[name], b), name
            continue
        moved = b.astype(np.float64) - start.get(name, np.zeros_like(b))
        scale = np.abs(moved).max()
        assert scale > 0, f"{name} did not move, so that comparing it shows nothing"
        off = mine[name].astype(np.float64) - b
        found["largest"].append(Worst(float(np.abs(off).max() / scale), name))
        found["most"].append(Worst(float(np.quantile(np.abs(off), 0.999, method="higher") / scale), name))
        if b.size >= ENOUGH:
            found["mean"].append(Worst(float(off.mean() / scale), name))
            found["length"].append(Worst(float((off * moved).sum() / np.square(moved).sum()), name))
    worst = {name: max(values, key=lambda worst: abs(worst.value)) for name, values in found.items()}
    return Difference(**worst, losses=loss_difference(rows(run), rows(baseline)))


def loss_difference(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Largest relative difference of any measured value of any row; what is counted must be equal."""
    assert len(mine) == len(theirs) > 0
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        for name in COUNTED:
            assert a.get(name) == b.get(name), (name, a, b)
        for name in COMPARED:
            if name in b:
                worst = max(worst, abs(a[name] - b[name]) / abs(b[name]))
    return worst
