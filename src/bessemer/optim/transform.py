"""Building blocks of the optimizers: the rate driven by the step, decay by rule, and float32 arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bessemer.errors import InputError
from bessemer.optim.schedules import StepFunction, as_float

GroupOf = Callable[[tuple[str, ...]], str]
"""A model's word for the kind of a parameter; an optimizer's settings turn kinds into groups with own rates."""

KINDS = ("matrix", "gate", "embedding", "head", "value_embedding", "rho", "xi", "scalar")
DECAYED = ("matrix", "gate", "head")
"""Kinds that multiply activations. Embeddings are tables: decay would shrink the rows of rare tokens most."""


@dataclass(frozen=True)
class Group:
    """One group of parameters as it is trained: peak rate, decay, and betas (or momentum) as printed.

    warmup: steps over which the group's own rate rises linearly from 0, on top of the schedule.
    """

    name: str
    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    warmup: int = 0

    def rate(self, schedule: StepFunction) -> StepFunction:
        """Return step → lr · schedule(step) · min(step / warmup, 1). The first factor of a warmup is exactly 0."""
        if self.warmup == 0:
            return lambda step: self.lr * schedule(step)
        return lambda step: self.lr * schedule(step) * jnp.minimum(as_float(step) / self.warmup, 1.0)


@dataclass(frozen=True)
class GroupRow:
    """One line of the printed table."""

    group: str
    tensors: int
    parameters: int
    lr: float
    decay: float
    betas: tuple[float, ...]


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """jax's key path as plain names: ("blocks_0", "attention", "query")."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def kind_by_rule(path: tuple[str, ...], leaf: Any) -> str:
    """For a model without `group_of`: by the number of axes, then by names that hold "embed" or "head"."""
    if leaf.ndim < 2:
        return "scalar"
    names = [name.lower() for name in path]
    if any("embed" in name or name == "wte" for name in names):
        return "embedding"
    if any(name.endswith("head") or name in ("logits", "unembed") for name in names):
        return "head"
    return "matrix"


def kind_of(path: tuple[str, ...], leaf: Any, group_of: GroupOf | None) -> str:
    """Return the model's own word for a parameter, checked, or the rule's."""
    if group_of is None:
        return kind_by_rule(path, leaf)
    kind = group_of(path)
    if kind not in KINDS:
        raise InputError(f"group_of({'/'.join(path)}) returned '{kind}'; it must be one of {', '.join(KINDS)}.")
    return kind


def is_decayed(path: tuple[str, ...], leaf: Any, group_of: GroupOf | None) -> bool:
    """Decay on matrices only: at least two axes, and a kind that multiplies activations."""
    return leaf.ndim >= 2 and kind_of(path, leaf, group_of) in DECAYED


def describe_groups(
    groups: tuple[Group, ...], params: Any, label: Callable[[tuple[str, ...], Any], str]
) -> list[GroupRow]:
    """Tensors and parameters by group, in the optimizer's order; groups without parameters are left out."""
    found: dict[str, list[int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found.setdefault(label(path_names(path), leaf), []).append(int(np.prod(leaf.shape, dtype=np.int64)))
    return [
        GroupRow(g.name, len(found[g.name]), sum(found[g.name]), g.lr, g.weight_decay, g.betas)
        for g in groups
        if g.name in found
    ]


CAUTIOUS_HELP = "decay only the elements that the update moves toward 0 too (cautious decay): "

Decays = Callable[[tuple[str, ...], jax.Array], bool]
"""(path, parameter) -> does weight decay touch it?"""


def apply_rate(
    rate: StepFunction, weight_decay: float = 0.0, decays: Decays | None = None, cautious: bool = False
) -> optax.GradientTransformationExtraArgs:
    """u → -rate(step)·(u + wd·p), the decoupled decay only on the parameters `decays` names (None: all).

    cautious: only on the elements with u·p ≥ 0, which the update moves toward 0 as the decay does.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, step: jax.typing.ArrayLike, **_: Any
    ) -> tuple[Any, Any]:
        lr = rate(step)

        def one(path: Any, u: jax.Array, p: jax.Array) -> jax.Array:
            decayed = weight_decay != 0.0 and (decays is None or decays(path_names(path), p))
            if not decayed:
                return -lr * u
            decay = weight_decay * p
            return -lr * (u + (jnp.where(u * p >= 0.0, decay, 0.0) if cautious else decay))

        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with state and arithmetic in float32, whatever the parameters' dtype.

    A second moment kept in bf16 stops moving: 1 - β2 = .05 of a difference is below its rounding.
    """
    inner = optax.with_extra_args_support(inner)

    def up(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(up(updates), state, None if params is None else up(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(up(params)), update)


def mute_first_gradient(
    inner: optax.GradientTransformation, names: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with a gradient of exactly 0 at step 0 for the parameters of these names.

    Their true gradient is 0 in a fresh model. What is computed is rounding noise, different on every mesh, and an
    optimizer that normalizes gradients would make a full step of it.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Any, state: Any, params: Any = None, *, step: jax.typing.ArrayLike, **extra: Any
    ) -> tuple[Any, Any]:
        def one(path: Any, g: jax.Array) -> jax.Array:
            muted = path_names(path)[-1] in names
            return jnp.where(jnp.asarray(step) == 0, jnp.zeros_like(g), g) if muted else g

        heard = jax.tree_util.tree_map_with_path(one, updates)
        return inner.update(heard, state, params, step=step, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def wrap_optax(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return the optax transformation, made to accept (and ignore) the `step` argument of `update`."""
    if not isinstance(tx, optax.GradientTransformation):
        raise InputError(
            f"an optimizer must be a registered name or an optax.GradientTransformation, got "
            f"{type(tx).__name__}; return for example optax.adamw(3e-4) from `optimizer()`."
        )
    return optax.with_extra_args_support(tx)
