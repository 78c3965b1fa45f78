"""The schedules of a run, step by step: as numbers, as a line of blocks in a terminal, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.errors import InputError
from bessemer.optim import Optimizer
from bessemer.report.plots import INK, finish, new_figure, save

POINTS = 201
BLOCKS = "▁▂▃▄▅▆▇█"
TITLES = {
    "lrm": "learning rate, as a share of its peak",
    "lr": "learning rate",
    "momentum": "momentum of Muon",
    "weight_decay": "weight decay",
}


def sample_curves(optimizer: Optimizer, steps: int, points: int = POINTS) -> dict[str, list[float]]:
    """`steps` (0 to the last, the schedule's corners among them) and every curve's value there."""
    at = set(np.linspace(0, steps - 1, min(points, steps)).round().astype(int).tolist())
    if optimizer.schedule is not None:
        at |= {corner for corner in optimizer.schedule.corners if corner < steps}
    where = sorted(at)
    traced = jnp.asarray(where, jnp.int32)
    curves = {name: np.asarray(jax.jit(curve)(traced)).tolist() for name, curve in optimizer.curves.items()}
    return {"steps": where, **curves}


def sparkline(steps: list[float], values: list[float], width: int = 48) -> str:
    """`width` blocks, evenly spaced over the steps; their height is from 0, or from the least when all are alike."""
    at = np.interp(np.linspace(steps[0], steps[-1], min(width, len(steps))), steps, values)
    low, high = (0.0 if at.min() < 0.5 * at.max() else float(at.min())), float(at.max())
    if high <= low:
        return BLOCKS[len(BLOCKS) // 2] * len(at)
    levels = ((at - low) / (high - low) * (len(BLOCKS) - 1)).round().astype(int)
    return "".join(BLOCKS[level] for level in levels)


def check_picture(path: Path) -> Path:
    """Refused before anything is compiled, not after."""
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot writes a PNG, but '{path}' does not end in .png.")
    return path


def write_curves(curves: dict[str, list[float]], path: Path) -> Path | None:
    """One panel a curve; None when there is none (an optax transformation keeps its rate to itself)."""
    names = [name for name in curves if name != "steps"]
    if not names:
        return None
    figure, panels = new_figure(panels=len(names))
    for name, axes in zip(names, np.atleast_1d(np.asarray(panels, dtype=object)), strict=True):
        draw(axes, curves["steps"], curves[name])
        finish(axes, TITLES.get(name, name))
    return save(figure, check_picture(path))


def draw(axes: Any, steps: list[float], values: list[float]) -> None:
    axes.plot(steps, values, color=INK, linewidth=1.6)
    if min(values) >= 0 and min(values) < 0.5 * max(values):
        axes.set_ylim(bottom=0)
