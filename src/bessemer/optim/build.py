"""From a name in the configuration to a transformation, its rates for the log, and its table of groups."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from bessemer.errors import InputError
from bessemer.optim.schedules import Schedule, StepFunction, check_steps
from bessemer.optim.state import Spread
from bessemer.optim.transform import (
    Group,
    GroupOf,
    GroupRow,
    describe_groups,
    in_float32,
    mute_first_gradient,
    path_names,
    wrap_optax,
)
from bessemer.registry import optimizers, schedules

Configure = Callable[[type], Any]
"""Turns a settings class into an instance: `bessemer.config.configure`; `lambda cls: cls()` for defaults."""

AUTO = "auto"
"""Schedule name that stands for the optimizer's own default."""


# What the settings of an optimizer may provide besides its fields; each is optional and asked for with isinstance.


@runtime_checkable
class NamesSchedule(Protocol):
    """Names the schedule that runs where the configuration names none; "constant" without it."""

    default_schedule: str


@runtime_checkable
class HasRate(Protocol):
    """Has one peak learning rate; 1 without it."""

    lr: float


@runtime_checkable
class HasGroups(Protocol):
    """Divides the parameters into groups with rates of their own; one group "all" without it."""

    def groups(self, width: int | None) -> tuple[Group, ...]: ...


@runtime_checkable
class LabelsParameters(Protocol):
    """Names the group of a parameter; the first one without it."""

    def label(self, path: tuple[str, ...], leaf: Any, group_of: GroupOf | None) -> str: ...


@runtime_checkable
class HasCurves(Protocol):
    """Adds to what is logged and plotted by step."""

    def curves(self, schedule: Schedule, steps: int) -> dict[str, StepFunction]: ...


@runtime_checkable
class CountsFlops(Protocol):
    """Counts the matrix FLOPs of one update of a parameter; 0 without it."""

    def update_flops(self, label: str, shape: tuple[int, ...]) -> float: ...


@dataclass(frozen=True)
class Optimizer:
    """`tx.update(grads, state, params, step=step)` takes the 0-based number of the step being taken.

    `rates(step)` is pure: call it inside the compiled step and return it with the metrics, so that nothing waits.
    """

    tx: optax.GradientTransformationExtraArgs
    rates: Callable[[jax.typing.ArrayLike], dict[str, jax.Array]]
    describe: Callable[[Any], list[GroupRow]]
    schedule: Schedule | None
    groups: tuple[Group, ...]
    curves: Mapping[str, StepFunction] = field(default_factory=dict)  # all that changes with the step, by name
    update_flops: Callable[[Any], float] = lambda params: 0.0  # matrix FLOPs of one update, beside the model's


def default_schedule(optimizer: str) -> str:
    """Return the schedule an optimizer runs with when none is named: trapezoid with muon, otherwise wsd."""
    for settings in optimizers.entry(optimizer).settings:
        if isinstance(settings, NamesSchedule):
            return settings.default_schedule
    return "constant"


def settings_classes(optimizer: str | None, schedule: str | None = AUTO) -> tuple[type, ...]:
    """Return the dataclasses whose fields become settings once these are selected; for `config.gather`."""
    chosen: tuple[type, ...] = () if optimizer is None else optimizers.entry(optimizer).settings
    if schedule == AUTO:
        schedule = None if optimizer is None else default_schedule(optimizer)
    return chosen if schedule is None else (*chosen, *schedules.entry(schedule).settings)


def _offer(function: Callable[..., Any], *args: Any, **extras: Any) -> Any:
    """Call with those extras the function names in its signature."""
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in extras.items() if name in known})


def _settings(entry: Any, configure: Configure) -> Any:
    """Return the one settings object an entry is called with; None when it has none."""
    if len(entry.settings) > 1:
        raise InputError(f"'{entry.name}' registers {len(entry.settings)} settings classes; merge them into one.")
    return configure(entry.settings[0]) if entry.settings else None


def build_schedule(
    name: str | Schedule | StepFunction | None,
    configure: Configure,
    steps: int,
    *,
    boundaries: Sequence[int] = (0,),
    peak: float = 1.0,
) -> Schedule:
    """Return a schedule by name (None: constant), with the first step of each stage for those that ask.

    A bare callable is an optax schedule: it gives the rate itself, so it is divided by `peak`.
    """
    steps = check_steps(steps)
    if isinstance(name, Schedule):
        return name
    if callable(name):
        if peak == 0.0:
            raise InputError(
                "an optax schedule gives the rate itself and needs a peak rate above 0; set optimization.lr."
            )
        given = name
        return Schedule(lambda step: jnp.asarray(given(step), jnp.float32) / peak, steps, steps)
    entry = schedules.entry(name or "constant")
    made = _offer(entry.value, _settings(entry, configure), steps, boundaries=boundaries)
    return made if isinstance(made, Schedule) else Schedule(made, steps, steps)


def _rates(schedule: Schedule, groups: tuple[Group, ...]) -> Callable[[jax.typing.ArrayLike], dict[str, jax.Array]]:
    """lr of the first group, the multiplier, and one lr/GROUP each where the groups' rates differ."""
    several = len({group.lr for group in groups}) > 1

    def rates(step: jax.typing.ArrayLike) -> dict[str, jax.Array]:
        multiplier = schedule(step)
        logged = {"lr": groups[0].lr * multiplier, "lrm": multiplier}
        if several:
            logged |= {f"lr/{group.name}": group.rate(schedule)(step) for group in groups}
        return logged

    return rates


def _curves(settings: Any, groups: tuple[Group, ...], schedule: Schedule, steps: int) -> dict[str, StepFunction]:
    """Return the rates' multiplier, the weight decay, and what the optimizer's settings add under `curves`."""
    decay = groups[0].weight_decay
    curves: dict[str, StepFunction] = {"lrm": schedule}
    curves["weight_decay"] = lambda step: jnp.full(jnp.shape(step), decay, jnp.float32)
    return curves | (settings.curves(schedule, steps) if isinstance(settings, HasCurves) else {})


def _from_optax(tx: Any, schedule: Any) -> Optimizer:
    """Return a user's transformation: its own rate is inside it, so only a schedule that was given can be logged."""
    rate = schedule if callable(schedule) else None

    def rates(step: jax.typing.ArrayLike) -> dict[str, jax.Array]:
        return {} if rate is None else {"lr": jnp.asarray(rate(step), jnp.float32)}

    def describe(params: Any) -> list[GroupRow]:
        return describe_groups((Group("optax", math.nan),), params, lambda path, leaf: "optax")

    return Optimizer(in_float32(wrap_optax(tx)), rates, describe, None, (), {} if rate is None else {"lr": rate})


def build_optimizer(
    name: str | optax.GradientTransformation,
    configure: Configure,
    steps: int,
    group_of: GroupOf | None = None,
    *,
    schedule: str | Schedule | StepFunction | None = AUTO,
    boundaries: Sequence[int] = (0,),
    width: int | None = None,
    spread: Spread | None = None,
    compute_dtype: jnp.dtype | None = None,
    silent: Sequence[str] = (),
    seed: int = 0,
) -> Optimizer:
    """Return the optimizer of that registry name, or a wrapped optax transformation.

    steps: the horizon, for the schedules. group_of: the model's word for a parameter's path. schedule: a
    name, "auto" (the optimizer's own), None (constant), a Schedule, or an optax schedule (rate by step).
    width, spread, compute_dtype: see `muon`; an optimizer that does not name them is not given them.
    silent: names of parameters whose gradient is only rounding noise at step 0 (`mute_first_gradient`). Muon's own
    warmup of these groups takes care of them with a first rate of 0.
    seed: for the rounding of moments that are stored narrow.
    """
    if not isinstance(name, str):
        given = _from_optax(name, None if schedule == AUTO else schedule)
        return replace(given, tx=mute_first_gradient(given.tx, silent)) if silent else given
    entry = optimizers.entry(name)
    settings = _settings(entry, configure)
    if isinstance(settings, HasGroups):
        groups = settings.groups(width)
    else:
        groups = (Group("all", settings.lr if isinstance(settings, HasRate) else 1.0),)
    by_step = build_schedule(
        default_schedule(name) if schedule == AUTO else schedule,
        configure,
        steps,
        boundaries=boundaries,
        peak=groups[0].lr,
    )
    extras = {"width": width, "spread": spread, "compute_dtype": compute_dtype, "seed": seed}
    tx = _offer(entry.value, settings, by_step, steps, group_of, **extras)

    if silent and not any(group.warmup for group in groups):
        tx = mute_first_gradient(wrap_optax(tx), silent)

    def label(path: tuple[str, ...], leaf: Any) -> str:
        return settings.label(path, leaf, group_of) if isinstance(settings, LabelsParameters) else groups[0].name

    def update_flops(params: Any) -> float:
        if not isinstance(settings, CountsFlops):
            return 0.0
        leaves = [(path_names(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
        return sum(settings.update_flops(label(names, leaf), leaf.shape) for names, leaf in leaves)

    return Optimizer(
        wrap_optax(tx),
        _rates(by_step, groups),
        lambda params: describe_groups(groups, params, label),
        by_step,
        groups,
        _curves(settings, groups, by_step, steps),
        update_flops,
    )
