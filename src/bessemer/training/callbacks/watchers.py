"""Numbers about parameters as they train: norms by pattern, or any function of yours.

callbacks=[watchers] logging.watch=['blocks_0/.*', 'embed']      from the command line: root mean squares
Watchers({"head": lambda array: jnp.abs(array).max()})           from Python: any function per pattern
"""

from __future__ import annotations

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
from bessemer.training.callback import Callback
from bessemer.training.fetch import fetch
from bessemer.training.loop import Loop

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


def root_mean_square(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32))))


def matching(params: Any, pattern: str) -> dict[str, jax.Array]:
    """Parameters whose path (joined by /) matches the regular expression from its start."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {"/".join(str(part.key) for part in path): leaf for path, leaf in flat}
    try:
        found = {name: leaf for name, leaf in named.items() if re.match(pattern, name)}
    except re.error as error:
        raise InputError(f"watch pattern '{pattern}' is no regular expression: {error}.") from error
    if not found:
        examples = ", ".join(list(named)[:3])
        raise InputError(
            f"watch pattern '{pattern}' matches no parameter. Parameters are named like: {examples}."
        )
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
        if loop.due(loop.trainer.logging.report_interval):
            self.values[loop.step] = self.measure(loop.trainer.state.params)

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        values = self.values.pop(row["step"], {})
        if values:
            row.update({name: float(value) for name, value in fetch(values).items()})
