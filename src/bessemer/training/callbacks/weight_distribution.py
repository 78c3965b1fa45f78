"""Histograms of every parameter at validation points (callbacks=[weight_distribution]): RUN/weights.jsonl, trackers."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp

from bessemer.job.files import storage
from bessemer.registry import callbacks
from bessemer.report.metrics import MetricsFile
from bessemer.training.callback import Callback
from bessemer.training.fetch import fetch
from bessemer.training.loop import Loop

BINS = 32


@jax.jit
def distribution(params: Any) -> Any:
    """Per leaf: mean, standard deviation, smallest, largest, and a histogram between the last two."""

    def one(array: jax.Array) -> dict[str, jax.Array]:
        values = array.astype(jnp.float32).ravel()
        counts, _ = jnp.histogram(values, bins=BINS)
        return {
            "mean": values.mean(),
            "std": values.std(),
            "min": values.min(),
            "max": values.max(),
            "counts": counts,
        }

    return jax.tree.map(one, params)


def weight_rows(params: Any, step: int) -> list[dict[str, Any]]:
    """One row a parameter, read in one fetch."""
    summary = fetch(distribution(params))
    flat = jax.tree_util.tree_flatten_with_path(
        summary, is_leaf=lambda node: isinstance(node, dict) and "counts" in node
    )
    return [
        {"step": step, "name": "/".join(str(part.key) for part in path)}
        | {name: value.tolist() for name, value in leaf.items()}
        for path, leaf in flat[0]
    ]


@callbacks.register("weight_distribution")
class WeightDistribution(Callback):
    def on_train_begin(self, loop: Loop) -> None:
        trainer = loop.trainer
        if trainer.is_process_zero:
            # the validation after the last step follows its checkpoint, and is made again on resume
            again = loop.step == 0 or (trainer.done and loop.loop_state.last_validation != loop.step)
            MetricsFile(trainer.run_directory.weights).truncate_after(loop.step - 1 if again else loop.step)

    def on_rollback(self, loop: Loop) -> None:
        self.on_train_begin(loop)

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        rows = loop.trainer.log_weight_distribution(loop.trainer.state, row["step"])
        loop.callbacks.fire("on_weights", loop, rows)


def append_weights(path: Any, params: Any, step: int, write: bool = True) -> list[dict[str, Any]]:
    """The rows. Every process takes part in the measuring; process 0 writes (JSON has no NaN: null)."""
    rows = weight_rows(params, step)
    if write:
        with storage(f"cannot write {path}"), open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows)
    return rows


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
