"""Building blocks of the optimizers: the rate driven by the step, decay by rule, and float32 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bessemer.errors import InputError
from bessemer.optim.groups import path_names
from bessemer.optim.schedule import StepFunction

Decays = Callable[[tuple[str, ...], jax.Array], bool]
"""(path, parameter) -> does weight decay touch it?"""


def apply_rate(
    rate: StepFunction, weight_decay: float = 0.0, decays: Decays | None = None
) -> optax.GradientTransformationExtraArgs:
    """u → -rate(step)·(u + wd·p), the decoupled decay only on the parameters `decays` names (None: all)."""

    def update(
        updates: Any, state: Any, params: Any = None, *, step: jax.typing.ArrayLike, **_: Any
    ) -> tuple[Any, Any]:
        lr = rate(step)

        def one(path: Any, u: jax.Array, p: jax.Array) -> jax.Array:
            decayed = weight_decay != 0.0 and (decays is None or decays(path_names(path), p))
            return -lr * (u + weight_decay * p) if decayed else -lr * u

        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same transformation with state and arithmetic in float32, whatever the parameters' dtype.

    A second moment kept in bf16 stops moving: 1 - β2 = .05 of a difference is below its rounding.
    """
    inner = optax.with_extra_args_support(inner)

    def up(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(up(updates), state, None if params is None else up(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(up(params)), update)


def wrap_optax(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Any optax transformation, made to accept (and ignore) the `step` argument of `update`."""
    if not isinstance(tx, optax.GradientTransformation):
        raise InputError(
            f"an optimizer must be a registered name or an optax.GradientTransformation, got "
            f"{type(tx).__name__}; return for example optax.adamw(3e-4) from `optimizer()`."
        )
    return optax.with_extra_args_support(tx)


def freeze(
    tx: optax.GradientTransformation, trainable: Callable[[tuple[str, ...]], bool]
) -> optax.GradientTransformationExtraArgs:
    """Train only the parameters whose path `trainable` accepts; the others get zero updates and no state
    (LoRA)."""

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "trained" if trainable(path_names(path)) else "frozen", params
        )

    return optax.partition({"trained": wrap_optax(tx), "frozen": optax.set_to_zero()}, labels)
