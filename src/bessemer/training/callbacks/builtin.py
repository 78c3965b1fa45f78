"""The small callbacks: those of every run first, then those that the setting `callbacks` asks for.

`watchers` logs numbers about parameters as they train: norms by pattern, or any function of yours.

    callbacks=[watchers] logging.watch=['blocks_0/.*', 'embed']      from the command line: root mean squares
    Watchers({"head": lambda array: jnp.abs(array).max()})           from Python: any function per pattern
"""

from __future__ import annotations

import gc
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from bessemer.config import field
from bessemer.console import with_error
from bessemer.errors import InputError, runnable
from bessemer.registry import callbacks
from bessemer.report.metrics import MetricsFile
from bessemer.storage.files import storage
from bessemer.storage.weights import flatten_names
from bessemer.topology import StepAgreement
from bessemer.training.callbacks.base import Callback
from bessemer.training.display import ShowsActivity
from bessemer.training.feed import fetch

if TYPE_CHECKING:
    from bessemer.training.callbacks.base import BaseTrainer, Loop


@callbacks.register("metric_logger")
class MetricLogger(Callback):
    """Writes metrics.jsonl and status.json on process 0. Rows after the step that a run continues from are removed."""

    PATIENCE = 10.0  # seconds after which status.json gets the step, although no row is due

    def on_train_begin(self, loop: Loop) -> None:
        self.file: MetricsFile | None = None
        self._written = time.monotonic()
        self.validated: set[int] = set()
        if loop.trainer.is_process_zero:
            self.file = MetricsFile(loop.trainer.run_directory.metrics)
            self.file.truncate_after(loop.step if loop.step > 0 else -1)
            self.validated = {row["step"] for row in self.file.rows() if "val_loss" in row or "val_reward" in row}

    def on_rollback(self, loop: Loop) -> None:
        self.on_train_begin(loop)
        if self.file is not None:
            loop.trainer.run_directory.write_status(step=loop.step, rollbacks=loop.loop_state.rollbacks)

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.append(row)
            self._write_step(loop, row["step"])

    on_evaluation = on_metrics

    def on_batch_end(self, loop: Loop) -> None:
        if self.file is not None and time.monotonic() - self._written >= self.PATIENCE:
            loop.check_directory()
            self._write_step(loop, loop.step)

    def _write_step(self, loop: Loop, step: int) -> None:
        self._written = time.monotonic()
        loop.trainer.run_directory.write_status(step=step)

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        # a run killed after its last validation is validated again on resume: same numbers, no second row
        if self.file is not None and row["step"] not in self.validated:
            self.validated.add(row["step"])
            self.file.append(row)


@callbacks.register("progress_bar")
class ProgressBarCallback(Callback):
    """Shows loss, tokens per second, MFU, memory and the time left."""

    bar: Any = None

    def on_train_begin(self, loop: Loop) -> None:
        trainer = loop.trainer
        self.bar = trainer.create_progress_bar(loop.steps, "step", disabled=not trainer.is_process_zero)
        self.bar.update(loop.step, {})

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        loop.trainer.log_metrics(row, self.bar, row["step"])

    def on_batch_end(self, loop: Loop) -> None:
        self.bar.update(loop.step, {})

    def on_progress(self, loop: Loop, text: str) -> None:
        if isinstance(self.bar, ShowsActivity):
            self.bar.note(text)

    def on_error(self, loop: Loop, error: BaseException | None = None) -> None:
        if self.bar is not None:
            self.bar.close()

    on_train_end = on_error


@callbacks.register("start_up")
class StartUpCallback(Callback):
    """Waits for the first step of the process, and prints one line: how long start-up took, and why."""

    def on_train_begin(self, loop: Loop) -> None:
        jax.block_until_ready(loop.trainer.state.step)
        loop.trainer.startup.lap("state")

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        loop.trainer.startup.lap("validation")

    def on_optimizer_step(self, loop: Loop) -> None:
        trainer = loop.trainer
        if trainer.startup.done:
            return
        jax.block_until_ready(trainer.state.step)
        trainer.startup.lap("first step")
        trainer.startup.done = True
        trainer.say(trainer.startup.line())
        forecast = trainer.startup.forecast(loop.steps - loop.step)
        # elsewhere the first step also loads kernels, so it predicts little
        if forecast is not None and trainer.topology.platform == "cpu":
            trainer.say(runnable(f"note       {forecast}"))
        if trainer.is_process_zero:
            trainer.write_facts()


@callbacks.register("validation")
class Validation(Callback):
    """Prints a line per validation: loss or reward, bits per byte, pairs ranked right, and whether it is the best."""

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        name = "val_loss" if "val_loss" in row else "val_reward"
        line = f"step {row['step']:>6}  {name.replace('_', ' ')} {row[name]:.4f}"
        if "val_loss" in row and "val_reward" in row:
            line += f"  reward {row['val_reward']:.4f}"
        if row.get("val_bpb") is not None:
            line += f"  bits/byte {with_error(row['val_bpb'], row.get('val_bpb_se'))}"
        if "val_pref_acc" in row:
            line += f"  right {row['val_pref_acc']:.1%}  margin {row['val_margin']:.3f}"
        best = loop.loop_state.best_step == row["step"] and row["step"] > 0
        loop.trainer.say(line + ("  (best)" if best else ""))


@callbacks.register("checkpoint")
@dataclass
class Checkpoint(Callback):
    """Also saves if the last checkpoint is logging.checkpoint_minutes old, and records the newest in status.json.

    Process 0 looks at the clock, and all save at the step that they agree on. A save only reads the state, and a
    rollback never goes back to one of these, so the run's results do not depend on when it happens.
    """

    minutes: float = field(
        "logging/checkpoint_minutes",
        default=0.0,
        minimum=0,
        help="also save when the last checkpoint is this many minutes old; 0 = off",
    )

    def on_train_begin(self, loop: Loop) -> None:
        self.agreement = StepAgreement("save")
        self.saved = time.monotonic()

    on_rollback = on_train_begin

    def on_batch_end(self, loop: Loop) -> None:
        if self.minutes == 0:
            return
        if loop.trainer.is_process_zero and time.monotonic() - self.saved >= 60 * self.minutes:
            self.agreement.propose(loop.step)
        if self.agreement.due(loop.step):
            self.agreement = StepAgreement("save")
            loop.request_checkpoint()

    def on_checkpoint(self, loop: Loop, step: int) -> None:
        self.saved = time.monotonic()
        if loop.trainer.is_process_zero:
            loop.trainer.run_directory.write_status(step=step, checkpoint=step)


@callbacks.register("time_limit")
class TimeLimit(Callback):
    """Stops with a checkpoint after training.time_limit, counted from the start of data preparation and compilation;
    exit 75. A resume gets a fresh limit."""

    def on_train_begin(self, loop: Loop) -> None:
        limit = loop.trainer.time_limit
        self.deadline = None if limit is None else loop.trainer.started + limit

    def on_batch_end(self, loop: Loop) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            loop.request_stop(f"training.time_limit={loop.trainer.settings.time_limit} reached")
            self.deadline = None


INTERVAL = 5000


@callbacks.register("garbage_collector")
class GarbageCollector(Callback):
    """Collects garbage every 5,000 steps only: over jax's object graph it takes tens of milliseconds at any moment."""

    active = False

    def on_batch_end(self, loop: Loop) -> None:
        if not self.active:
            self.active = True
            gc.collect()
            gc.freeze()
            gc.disable()
        elif loop.step % INTERVAL == 0:
            gc.collect()

    def on_error(self, loop: Loop, error: BaseException | None = None) -> None:
        if self.active:
            gc.enable()
            gc.unfreeze()

    on_train_end = on_error


OFTEN = 0.9
SETTLED = 200


@callbacks.register("gradient_clipping")
class GradientClipping(Callback):
    """Warns once if nearly all of many steps were clipped, which happens inside the compiled step."""

    warned = False

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        if not self.warned and row["step"] >= SETTLED and row["clip_share"] > OFTEN:
            self.warned = True
            limit = loop.trainer.settings.max_grad_norm
            loop.trainer.say(
                f"note: {row['clip_share']:.0%} of the steps so far were clipped at training.max_grad_norm={limit:g}; "
                "the effective rate is lower than optimization.lr"
            )


# --- only if the setting `callbacks` asks for them ---
@callbacks.register("best_checkpoint")
class BestCheckpoint(Callback):
    """Saves a checkpoint whenever validation improves, besides the regular ones."""

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        if row["step"] > 0 and loop.loop_state.best_step == row["step"]:
            loop.request_checkpoint()


@callbacks.register("early_stopping")
@dataclass
class EarlyStopping(Callback):
    """Ends the run as done after `patience` validations in a row without a new best. The count survives a restart."""

    patience: int = field(
        "training/patience", default=5, minimum=1, help="validations without a new best after which the run ends"
    )

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        stale = loop.loop_state.stale_validations
        if stale >= self.patience and row["step"] < loop.steps:
            loop.request_finish(f"no better validation loss in {stale} validations")


@callbacks.register("gradient_checkpointing")
class GradientCheckpointing(Callback):
    """Known from other libraries. Raises InputError without architecture.remat: no callback changes a compiled step."""

    def on_check(self, trainer: BaseTrainer) -> None:
        if trainer.config.get("architecture/remat") in (None, ["none"], "none"):
            raise InputError(
                "callbacks=[gradient_checkpointing]: gradient checkpointing is part of the compiled model here. Set "
                "architecture.remat=block (or a list of tensor names), and leave the callback out."
            )


@callbacks.register("profiler")
@dataclass
class Profiler(Callback):
    """Traces `steps` steps after `start` more have passed, into RUN/profile, for TensorBoard or Perfetto."""

    start: int = field("logging/profile_start", default=10, minimum=1, help="steps before the trace begins")
    steps: int = field("logging/profile_steps", default=5, minimum=1, help="steps in the trace")

    tracing = False

    def on_train_begin(self, loop: Loop) -> None:
        self.begin = loop.step + self.start

    def on_rollback(self, loop: Loop) -> None:
        self._stop()
        self.begin = -1  # one trace per process

    def on_batch_begin(self, loop: Loop) -> None:
        if loop.step == self.begin and loop.trainer.is_process_zero:
            jax.profiler.start_trace(str(loop.trainer.run_directory.path / "profile"))
            self.tracing = True

    def on_batch_end(self, loop: Loop) -> None:
        if self.tracing and loop.step == self.begin + self.steps:
            jax.block_until_ready(loop.trainer.state.params)
            self._stop()

    def _stop(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False

    def on_error(self, loop: Loop, error: BaseException | None = None) -> None:
        self._stop()

    on_train_end = on_error


# --- numbers about parameters ---


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
