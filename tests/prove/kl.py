"""The recipe `kl` at four weights: the divergence falls with β, and what was learned first is kept.

    python -m tests.prove.kl [--runs DIR] [--plot FILE]

Code first, then English about it. All figures are of held-out text, after the second stage: the exact KL to the
model of the first stage in float64, and the loss on the new and on the old text. Fails unless the KL falls from each
weight to the next.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import bessemer as bm
from bessemer.data import DataSettings, Validation, open_dataset
from bessemer.generate import load_model
from bessemer.report.plots import COLORS, finish, new_figure, save

BETAS = (0.0, 0.1, 1.0, 10.0)
OLD, NEW = "python-stdlib", "python-reference"
SMALLER = {
    "model.depth": 2,
    "model.width": 96,
    "model.head_dim": 48,
    "architecture.block_size": 64,
    "data.tokenizer": "train:1024",
    "training.tokens": [400 * 1024, 150 * 1024],
    "logging.report_interval": 5,
    "logging.preview_interval": -1,
    "logging.progress": "none",
}
ROWS = 64
"""Held-out sequences of each text."""


def log_probabilities(loaded: Any, ids: np.ndarray) -> np.ndarray:
    logits = np.asarray(loaded.model.apply({"params": loaded.params}, ids), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def held_out(loaded: Any, name: str) -> dict[str, np.ndarray]:
    data = loaded.config["data"]
    settings = DataSettings(tokenizer=data["tokenizer"], val_fraction=data["val_fraction"])
    block = loaded.model.block_size
    rows = open_dataset(bm.Sampling(name), loaded.tokenizer, split="val", block_size=block, settings=settings)
    return Validation([(bm.Sampling(name), rows)], ROWS).batch(0, ROWS)


def measure(run: bm.Run) -> dict[str, float]:
    """KL to the end of the first stage on the new text; losses on both texts, and that of the start of stage two."""
    stages = json.loads((run.path / "stages.json").read_text())
    first, last = (load_model(run.directory, stage["end"]) for stage in stages)
    found: dict[str, float] = {}
    for name, text in (("new", NEW), ("old", OLD)):
        rows = held_out(last, text)
        p, q = (log_probabilities(loaded, rows["input_ids"]) for loaded in (last, first))
        targets = rows["target_ids"]
        real = targets >= 0
        for label, logs in ((f"{name} loss", p), (f"{name} loss before", q)):
            picked = np.take_along_axis(logs, np.maximum(targets, 0)[..., None], -1)[..., 0]
            found[label] = float(-picked[real].mean())
        if name == "new":
            found["kl"] = float((np.exp(p) * (p - q)).sum(-1)[real].mean())
    return found


def plot(results: dict[float, dict[str, float]], curves: dict[float, list[Any]], path: Path) -> None:
    figure, (above, below) = new_figure(panels=2)
    for place, (beta, rows) in enumerate(curves.items()):
        colour = COLORS[place]
        if rows:
            above.plot([row["step"] for row in rows], [row["kl"] for row in rows], color=colour, label=f"β {beta:g}")
        else:
            above.axhline(results[beta]["kl"], color=colour, linestyle="--", label="β 0, at the end")
    finish(above, "KL to the model of the first stage (nats per token), second stage")
    ticks = range(len(results))
    for place, name in enumerate(("new loss", "old loss")):
        below.plot(ticks, [found[name] for found in results.values()], "o-", color=COLORS[place], label=name)
        start = next(iter(results.values()))[f"{name} before"]
        below.axhline(start, color=COLORS[place], linestyle=":", linewidth=1)
    finish(below, "held-out loss at the end (nats per token); dotted: before the second stage")
    below.set_xticks(list(ticks), [f"β {beta:g}" for beta in results])
    below.set_xlabel("")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="where the runs go (default: a temporary directory)")
    parser.add_argument("--plot", type=Path, help="also draw the curves into this file")
    options = parser.parse_args()
    started = time.monotonic()
    results, curves = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        root = options.runs or Path(temporary)
        for beta in BETAS:
            settings: dict[str, Any] = {**SMALLER, "optimization.kl.beta": [0.0, beta]}
            run = bm.train("kl", name=f"kl-beta-{beta:g}", runs=root, **settings)
            results[beta] = measure(run)
            curves[beta] = [row for row in run.metrics() if "kl" in row]
    print(f"{'β':>5} {'KL':>9} {'new loss':>9} {'old loss':>9}    (nats per token, held-out text)")
    before = results[0.0]
    print(f"{'start':>5} {0:9.4f} {before['new loss before']:9.4f} {before['old loss before']:9.4f}")
    for beta, found in results.items():
        print(f"{beta:5g} {found['kl']:9.4f} {found['new loss']:9.4f} {found['old loss']:9.4f}")
    print(f"{time.monotonic() - started:.0f} s")
    if options.plot:
        plot(results, curves, options.plot)
    falling = [found["kl"] for found in results.values()]
    assert all(looser > tighter for looser, tighter in pairwise(falling)), f"the KL does not fall: {falling}"


if __name__ == "__main__":
    main()
