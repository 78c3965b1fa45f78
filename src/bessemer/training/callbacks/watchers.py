"""Numbers about parameters as they train: norms by pattern, or any function of yours.

callbacks=[watchers] logging.watch=['blocks_0/.*', 'embed']      from the command line: root mean squares
Watchers({"head": lambda array: jnp.abs(array).max()})           from Python: any function per pattern
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.registry import callbacks
from bessemer.report.metrics import MetricsFile
from bessemer.storage.files import storage
from bessemer.storage.weights import flatten_names
from bessemer.training.callbacks.base import Callback
from bessemer.training.feed import fetch

if TYPE_CHECKING:
    from bessemer.training.callbacks.base import BaseTrainer, Loop


def root_mean_square(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32))))


def by_path(params: Any) -> dict[str, jax.Array]:
    return dict(zip(flatten_names(params), jax.tree.leaves(params), strict=True))


def matching(params: Any, pattern: str) -> dict[str, jax.Array]:
    """Return the parameters whose path (joined by /) matches the regular expression from its start."""
    named = by_path(params)
    try:
        found = {name: leaf for name, leaf in named.items() if re.match(pattern, name)}
    except re.error as error:
        raise InputError(f"watch pattern '{pattern}' is not a regular expression: {error}.") from error
    if not found:
        examples = ", ".join(list(named)[:3])
        raise InputError(f"watch pattern '{pattern}' matches no parameter. Parameters are named like: {examples}.")
    return found


@callbacks.register("watchers")
@dataclass
class Watchers(Callback):
    """Adds watch/NAME rows at every report."""

    patterns: list[str] = field(
        "logging/watch", default_factory=list, help="regular expressions over parameter paths to watch"
    )
    functions: Mapping[str, Callable[[jax.Array], jax.Array]] = plain_field(default_factory=dict)

    def on_check(self, trainer: BaseTrainer) -> None:
        for pattern in (*self.patterns, *self.functions):
            matching(trainer.functions.abstract_state.params, pattern)

    def on_train_begin(self, loop: Loop) -> None:
        table = {**dict.fromkeys(self.patterns, root_mean_square), **self.functions}

        def measure(params: Any) -> dict[str, jax.Array]:
            return {
                f"watch/{name}": function(leaf)
                for pattern, function in table.items()
                for name, leaf in matching(params, pattern).items()
            }

        self.measure = jax.jit(measure)
        self.values: dict[int, dict[str, jax.Array]] = {}

    def on_rollback(self, loop: Loop) -> None:
        self.values.clear()

    def on_optimizer_step(self, loop: Loop) -> None:
        if loop.due(loop.trainer.logging.report_interval) or loop.step == loop.steps:
            self.values[loop.step] = self.measure(loop.trainer.state.params)

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        values = self.values.pop(row["step"], {})
        if values:
            row.update({name: float(value) for name, value in fetch(values).items()})


BINS = 32


@jax.jit
def distribution(arrays: dict[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
    """Return per array the mean, standard deviation, minimum, maximum, and a histogram between the last two."""

    def one(array: jax.Array) -> dict[str, jax.Array]:
        values = array.astype(jnp.float32).ravel()
        counts, _ = jnp.histogram(values, bins=BINS)
        return {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max(), "counts": counts}

    return {name: one(array) for name, array in arrays.items()}


@callbacks.register("weight_distribution")
class WeightDistribution(Callback):
    """Writes histograms of every parameter to RUN/weights.jsonl at each validation, and to trackers."""

    def on_train_begin(self, loop: Loop) -> None:
        trainer = loop.trainer
        if trainer.is_process_zero:
            # the validation after the last step follows its checkpoint, and is made again on resume
            again = loop.step == 0 or (trainer.done and loop.loop_state.last_validation != loop.step)
            MetricsFile(trainer.run_directory.weights).truncate_after(loop.step - 1 if again else loop.step)

    on_rollback = on_train_begin

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        rows = loop.trainer.log_weight_distribution(loop.trainer.state, row["step"])
        loop.callbacks.fire("on_weights", loop, rows)


def append_weights(path: Any, params: Any, step: int, write: bool = True) -> list[dict[str, Any]]:
    """Return one row per parameter, and append them to `path` on the process that writes (JSON has no NaN: null).
    Every process takes part in the measuring."""
    named = by_path(params)
    found = fetch(distribution(named))
    rows = [
        {"step": step, "name": name, **{key: value.tolist() for key, value in found[name].items()}} for name in named
    ]
    if write:
        with storage(f"cannot write {path}"), open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows)
    return rows


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
