"""What a run carries from step to step: `TrainState` on the devices, `LoopState` on the host, `RunState` over both.

Everything else (stage, tokens seen, learning rate, random keys) follows from `step`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from flax.training import train_state

from bessemer.config.bounded import parse_json
from bessemer.errors import TrainingError
from bessemer.generate.base import BaseRecord
from bessemer.models.lora import Split
from bessemer.training.settings import GuardSettings
from bessemer.training.tied_head import tied_start

# --- bad steps, decided inside the compiled step -----------------------------------------------------------
# A step is bad if its loss or gradient is not finite, or, with guard.spike_sigma > 0, if its loss spikes:
#
#     loss > m + sigma · sqrt(v)
#
# m and v are the running mean and variance of the accepted losses: exact over the first `window` of them, then
# with weight 1/window for the newest. Nothing is a spike until `window` losses were accepted, counted again
# from the start of a stage with other data. The statistics are part of the state, so a resumed run decides as
# the uninterrupted one.

Statistics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class SpikeRule:
    """The rule as the compiled step applies it. `stages`: data steps at which other data begins."""

    sigma: float
    window: int
    skip: bool
    stages: tuple[int, ...] = ()


def spike_rule(settings: GuardSettings, stages: Sequence[int] = ()) -> SpikeRule | None:
    """None with guard.spike_sigma=0: nothing is added to the step or to the state.

    `rollback` skips the update too, so that nothing saved or shown before the spike is read is poisoned.
    """
    if settings.spike_sigma == 0:
        return None
    skip = settings.spike_action != "warn"
    return SpikeRule(settings.spike_sigma, settings.spike_window, skip, tuple(stages))


def fresh_statistics() -> Statistics:
    return {
        "mean": jnp.zeros((), jnp.float32),
        "variance": jnp.zeros((), jnp.float32),
        "count": jnp.zeros((), jnp.int32),
        "stage": jnp.zeros((), jnp.int32),
    }


def judge(
    rule: SpikeRule | None, statistics: Statistics | None, loss: jax.Array, finite: jax.Array, data_step: Any
) -> tuple[jax.Array, Statistics | None, dict[str, jax.Array]]:
    """Return (whether the update is applied, the statistics after this step, values for the log).

    A pure function of replicated scalars: every process decides the same at the same step.
    """
    if rule is None or statistics is None:
        return finite, None, {}
    stage = jnp.sum(data_step >= jnp.asarray(rule.stages, jnp.int32), dtype=jnp.int32)
    count = jnp.where(stage == statistics["stage"], statistics["count"], 0)
    mean, variance = statistics["mean"], statistics["variance"]
    limit = jnp.where(count >= rule.window, mean + rule.sigma * jnp.sqrt(variance), jnp.inf)
    spike = finite & (loss > limit)
    applied = finite & ~spike if rule.skip else finite
    weight = 1.0 / jnp.minimum(count + 1, rule.window)
    distance = loss - mean
    learned = {
        "mean": mean + weight * distance,
        "variance": (1 - weight) * (variance + weight * distance**2),
        "count": jnp.minimum(count + 1, rule.window),
    }
    known = {"mean": mean, "variance": variance, "count": count}
    after = {name: jnp.where(applied, learned[name], known[name]) for name in known}
    return applied, {**after, "stage": stage}, {"spike": spike, "spike_limit": limit}


WEIGHTS_FINITE = "weights_finite"
"""In a step's meta: whether the weights after the step are finite. A finite loss and gradient do not guarantee it (an
update can overflow), and the next loss may not show the damage: a token's embedding matters when it occurs."""


def all_finite(tree: Any) -> jax.Array:
    """Return one replicated scalar: whether no floating-point leaf holds NaN or infinity."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all() if leaves else jnp.ones((), bool)


class Unstable(TrainingError):
    """The run cannot continue from `step`. `rows` are the reports of the steps before it."""

    def __init__(self, step: int, what: str, rows: Sequence[dict[str, Any]] = ()):
        self.step = step
        self.rows = list(rows)
        super().__init__(what)


def final_problem(non_finite_steps: int, validation: float | None) -> str | None:
    """Return why a final model with finite weights cannot be accepted, or None.

    Finite weights can be so large that computing with them overflows. The final validation (its loss or reward; None:
    there was none) decides; without one, the last step does.
    """
    if validation is not None:
        return None if math.isfinite(validation) else f"the final validation gave {validation}"
    if non_finite_steps == 0:
        return None
    steps = "step" if non_finite_steps == 1 else f"{non_finite_steps} steps"
    return f"the last {steps} had no finite loss and gradient, and there is no validation to judge the weights by"


def described(loss: float, finite: bool, limit: float | None) -> str:
    """Return what is wrong with a bad step's loss, to follow "the loss is"."""
    if math.isnan(loss):
        return "not a number"
    if math.isinf(loss):
        return "infinite"
    if not finite:
        return f"{loss:.5g}, but its gradient is not finite"
    return f"{loss:.5g}, a spike above {limit:.5g} (guard.spike_sigma)"


# --- the state on the devices ------------------------------------------------------------------------------
class TrainState(train_state.TrainState):
    """flax's TrainState, extended.

    step:      optimizer steps taken; drives schedules and random keys (int32 from the start, or jit compiles twice)
    data_step: argument of `batch`; equal to step until a rollback moves it past poisoned data
    ema:       optional running average of the parameters, in float32
    guard:     running mean and variance of the loss, with spike detection
    tied:      whether the embedding still follows the head, () int32 (tied_head.py); None: it never does
    frozen:    the parameters that are not trained; `rules.complete` merges both
    reference: earlier `params` that the objective compares with, or a teacher's parameters. Like `frozen` they are
               written once (persistence/), not in each checkpoint
    """

    data_step: jax.Array = struct.field(default=None)
    ema: Any = None
    guard: Statistics | None = None
    tied: jax.Array | None = None
    frozen: Any = None
    reference: Any = None
    loss_fn: Callable = struct.field(pytree_node=False, default=None)
    rules: StepRules = struct.field(pytree_node=False, default=None)

    def whole(self, params: Any = None) -> Any:
        """Return all parameters of the model: the trained ones (or `params` in their place) and the frozen ones, with
        adapters beside their matrices (`lora.Adapted`)."""
        return self.rules.complete(self.params if params is None else params, self.frozen)

    def objective(self, params: Any, rows: Any, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Any]:
        """Return (Σ loss, Σ weight, sums) of the objective for `params` in place of the trained ones."""
        result = self.loss_fn(self.apply_fn, self.whole(params), rows, key, **self.against())
        if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping)):
            what = "an array" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
            what += f" of {len(result)} values" if isinstance(result, tuple) else ""
            raise TrainingError(
                "an objective must return (Σ loss, Σ weight, {name: Σ}), sums over the tokens of one micro-batch; this "
                f"one returned {what}. docs/extending.md has an example."
            )
        return result

    def against(self) -> dict[str, Any]:
        """Return the keywords that give the objective its reference, if there is one."""
        if self.reference is None:
            return {}
        return {"reference": self.reference if self.rules.teacher else self.whole(self.reference)}


@dataclasses.dataclass(frozen=True)
class StepRules:
    """What the compiled step depends on and never changes during a run."""

    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    spikes: SpikeRule | None = None
    place_gradients: Callable[[Any], Any] = lambda grads: grads
    rates: Callable[[jax.Array], dict[str, jax.Array]] = lambda step: {}
    split: Split | None = None  # None: every parameter is trained
    teacher: bool = False  # `reference` is another model's parameters
    rebalance: Callable[[Any, jax.Array], Any] | None = None  # (trained parameters, expert load) → parameters
    own_validation: bool = False  # held-out rows are measured by the objective, not by plain likelihood
    untied_from: int = 0  # the first step of a head that is tied before; 0: it never is
    steps: int = 0  # of the run, for an objective that follows its progress; 0: none does

    def complete(self, params: Any, frozen: Any) -> Any:
        """Return all parameters of the model, from the trained and the frozen ones."""
        return params if self.split is None else self.split.complete(params, frozen)


def added_fields(kind: type[TrainState]) -> tuple[str, ...]:
    """Return the fields that a subclass of TrainState adds: saved in checkpoints, replicated on every device."""
    known = {entry.name for entry in dataclasses.fields(TrainState)}
    return tuple(entry.name for entry in dataclasses.fields(kind) if entry.name not in known)


def create_state(
    apply_fn: Callable,
    loss_fn: Callable,
    params: Any,
    tx: Any,
    rules: StepRules,
    kind: type[TrainState] = TrainState,
    frozen: Any = None,
) -> TrainState:
    """Return the state of step 0. Call it under jit with out_shardings, so that arrays are created on their devices."""
    params = tied_start(params) if rules.untied_from else params
    return kind(
        step=jnp.zeros((), jnp.int32),
        data_step=jnp.zeros((), jnp.int32),
        apply_fn=apply_fn,
        loss_fn=loss_fn,
        params=params,
        tx=tx,
        opt_state=tx.init(params),
        ema=jax.tree.map(lambda p: p.astype(jnp.float32, copy=True), params) if rules.ema_decay > 0 else None,
        guard=None if rules.spikes is None else fresh_statistics(),
        tied=jnp.ones((), jnp.int32) if rules.untied_from else None,
        frozen=frozen,
        rules=rules,
    )


def widened(params: Any) -> Any:
    """Return the parameters with those in bf16 as float32; the others as they are."""
    return jax.tree.map(lambda p: p.astype(jnp.float32) if p.dtype == jnp.bfloat16 else p, params)


# --- the state on the host ---------------------------------------------------------------------------------
SMOOTHING = 0.9
"""Decay of the debiased running loss, loss_smooth."""


@dataclasses.dataclass
class LoopState:
    """The host's part of a run: small numbers that survive a restart exactly (loop.json)."""

    steps_counted: int = 0
    loss_average: float = 0.0
    target_tokens: int = 0
    skipped_steps: int = 0
    bad_steps_in_row: int = 0
    non_finite_in_row: int = 0
    clipped_steps: int = 0
    spikes: int = 0
    rollbacks: int = 0
    best_val_loss: float | None = None
    best_step: int | None = None
    best_checkpoint: int | None = None
    last_validation: int | None = None
    min_val_bpb: float | None = None
    stale_validations: int = 0
    training_seconds: float = 0.0  # without the first ten steps of each process
    all_seconds: float = 0.0
    useful_seconds: float = 0.0
    tracker_id: str | None = None
    finished: str | None = None

    def count(self, loss: float, target_tokens: float, updated: bool, clipped: bool, spike: bool = False) -> None:
        """Add one step's results. A skipped step changes the counters, not the averages."""
        self.spikes += int(spike)
        self.non_finite_in_row = 0 if updated or spike else self.non_finite_in_row + 1
        if not updated:
            self.skipped_steps += 1
            self.bad_steps_in_row += 1
            return
        self.bad_steps_in_row = 0
        self.steps_counted += 1
        self.target_tokens += int(target_tokens)
        self.clipped_steps += int(clipped)
        self.loss_average = SMOOTHING * self.loss_average + (1 - SMOOTHING) * loss

    def take_validation(self, score: float, step: int) -> None:
        """Record a validation: the lowest score is the best, and NaN never is."""
        best = self.best_val_loss
        if not math.isnan(score) and (best is None or math.isnan(best) or score < best):
            self.best_val_loss, self.best_step, self.stale_validations = score, step, 0
        elif self.best_step != step:  # the same step again, after a restart, is not a worse one
            self.stale_validations += 1
        self.last_validation = step

    def take_bits(self, bits: float) -> None:
        """Record bits per byte; NaN is never the lowest."""
        known = [value for value in (bits, self.min_val_bpb) if value is not None and not math.isnan(value)]
        self.min_val_bpb = min(known, default=None)

    def branch_off(self, other_data: bool) -> None:
        """Continue after a branch point: undo an early end, and forget results on other held-out data."""
        self.finished, self.stale_validations = None, 0
        if other_data:
            self.best_val_loss = self.best_step = self.min_val_bpb = self.last_validation = None

    def carry_over(self, before: LoopState) -> None:
        """After a rollback: keep what counts the whole run, from the loop state `before` it."""
        self.spikes, self.rollbacks = before.spikes, before.rollbacks + 1
        self.training_seconds, self.all_seconds = before.training_seconds, before.all_seconds
        self.tracker_id = before.tracker_id

    @property
    def loss_smooth(self) -> float | None:
        """Σ .9^(n-i) loss_i / Σ .9^(n-i): the running average without the bias toward its start at 0."""
        if self.steps_counted == 0:
            return None
        return self.loss_average / (1 - SMOOTHING**self.steps_counted)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> LoopState:
        loop = cls(**parse_json(text))
        loop.all_seconds = max(loop.all_seconds, loop.training_seconds)  # older checkpoints have the latter alone
        return loop


class Activity(NamedTuple):
    """What runs besides the steps, and what to change if it runs out of memory; None: the micro-batch."""

    what: str
    change: str | None = None


@dataclasses.dataclass
class RunState:
    """The mutable side of a run: what its loop advances, a checkpoint restores and a rollback resets."""

    create: Callable[[], TrainState]  # makes the state of step 0
    loop_state: LoopState = dataclasses.field(default_factory=LoopState)
    step: int = 0  # optimizer steps dispatched
    data_offset: int = 0  # number of the next batch − step; rollbacks move it past poisoned batches
    activity: Activity | None = None
    base: BaseRecord | None = None  # what names the frozen parameters, where they stay outside the run
    _state: TrainState | None = None

    @property
    def state(self) -> TrainState:
        """The train state; created at first use, so that a restore never allocates it twice."""
        if self._state is None:
            self._state = self.create()
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    @property
    def is_created(self) -> bool:
        return self._state is not None

    @property
    def position(self) -> int:
        """The number of the next batch."""
        return self.step + self.data_offset

    def start_over(self) -> None:
        """Return to step 0; the old state is released, and created again at its next use."""
        self._state, self.loop_state = None, LoopState()
        self.step = self.data_offset = 0
