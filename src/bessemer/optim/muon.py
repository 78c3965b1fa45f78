"""Muon for the matrices inside blocks, AdamW groups for everything else.

Muon (Jordan 2024): the momentum of a matrix is replaced by its polar factor. With it: row equalisation,
rescaling to the exact norm, a second moment per output or input unit (NorMuon, arXiv 2510.05491), and
cautious decay. Matrices are stored (fan_in, fan_out). Same-shape matrices are stacked inside the update, one
batched polar step a shape; the state is kept per parameter, so its shardings follow the parameters'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bessemer.errors import InputError
from bessemer.optim.groups import GroupOf, path_names
from bessemer.optim.muon_schedules import decay_schedule, momentum_schedule
from bessemer.optim.muon_settings import MuonSettings
from bessemer.optim.polar import default_dtype, orthogonalise
from bessemer.optim.schedule import Schedule, StepFunction
from bessemer.optim.sharding import Spread
from bessemer.optim.transform import apply_rate, in_float32
from bessemer.registry import optimizers


class MuonState(NamedTuple):
    momentum: Any  # like the parameters
    second: Any  # like the parameters, with size one along the shorter axis


def _short_axis(shape: tuple[int, ...]) -> int:
    """The axis the second moment averages over; a square matrix keeps one value per output unit."""
    return -2 if shape[-1] >= shape[-2] else -1


def _second_like(p: jax.Array) -> jax.Array:
    shape = list(p.shape)
    shape[_short_axis(p.shape)] = 1
    return jnp.zeros(shape, jnp.float32)


def orthogonalise_stacked(
    leaves: list[jax.Array], dtype: jnp.dtype, spread: Spread | None = None
) -> list[jax.Array]:
    """`orthogonalise` of each (fan_in, fan_out) leaf, as one batched call a shape; float32 out."""
    shapes: dict[tuple[int, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        shapes.setdefault(leaf.shape, []).append(index)
    out = list(leaves)
    for members in shapes.values():
        matrices = [leaves[index].astype(dtype) for index in members]
        if spread is None:
            stack = orthogonalise(jnp.stack(matrices))  # (n, fan_in, fan_out)
        else:
            layout = spread.over(len(matrices))
            matrices = [spread.align(matrix) for matrix in matrices]
            matrices += [jnp.zeros_like(matrices[0])] * (-len(matrices) % layout.multiple)
            stack = layout.run(lambda x: orthogonalise(x).astype(dtype), jnp.stack(matrices))
            stack = stack.astype(jnp.float32)  # travels in the compute dtype
        for position, index in enumerate(members):
            out[index] = stack[position]
    return out


def _normalise(g: jax.Array, second: jax.Array, beta2: float) -> tuple[jax.Array, jax.Array]:
    """v ← lerp(v, mean g², 1-β2); g/√v, rescaled so that ‖g‖_F is kept. Returns (g, v)."""
    axis = _short_axis(g.shape)
    mean_square = jnp.mean(jnp.square(g), axis=axis, keepdims=True)
    second = second + (1.0 - beta2) * (mean_square - second)
    scale = jax.lax.rsqrt(jnp.maximum(second, 1e-10))
    before = jnp.sqrt(jnp.sum(mean_square))
    after = jnp.sqrt(jnp.sum(mean_square * jnp.square(scale)))
    return g * (scale * (before / jnp.maximum(after, 1e-10))), second


def scale_by_muon(
    momentum: StepFunction,
    beta2: float = 0.9,
    *,
    spread: Spread | None = None,
    compute_dtype: jnp.dtype | None = None,
) -> optax.GradientTransformationExtraArgs:
    """m ← lerp(m, g, 1-μ); Nesterov lerp(g, m, μ); orthogonalise; second moment. Every leaf must be a matrix.

    The polar step runs in `compute_dtype` (bf16 on accelerators, float32 on a CPU unless given).
    """
    dtype = default_dtype() if compute_dtype is None else jnp.dtype(compute_dtype)

    def init(params: Any) -> MuonState:
        def check(path: Any, p: Any) -> None:
            if p.ndim != 2:
                raise InputError(
                    f"Muon takes matrices (fan_in, fan_out), but {'/'.join(path_names(path))} has shape "
                    f"{p.shape}; store it as a matrix, or let group_of give it another group."
                )

        jax.tree_util.tree_map_with_path(check, params)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return MuonState(zeros, jax.tree.map(_second_like, params))

    def update(
        updates: Any, state: MuonState, params: Any = None, *, step: jax.typing.ArrayLike, **_: Any
    ) -> tuple[Any, MuonState]:
        mu = momentum(step)
        mean = jax.tree.map(lambda m, g: m + (1.0 - mu) * (g - m), state.momentum, updates)
        ahead, tree = jax.tree_util.tree_flatten(jax.tree.map(lambda g, m: g + mu * (m - g), updates, mean))
        polar = orthogonalise_stacked(ahead, dtype, spread)
        pairs = [_normalise(g, v, beta2) for g, v in zip(polar, jax.tree.leaves(state.second), strict=True)]
        scaled = jax.tree_util.tree_unflatten(tree, [g for g, _ in pairs])
        return scaled, MuonState(mean, jax.tree_util.tree_unflatten(tree, [v for _, v in pairs]))

    return optax.GradientTransformationExtraArgs(init, update)


def apply_cautious_rate(
    rate: StepFunction, weight_decay: StepFunction
) -> optax.GradientTransformationExtraArgs:
    """u → -lr·√max(1, fan_out/fan_in)·u - lr·wd·p, the second only where u·p ≥ 0 (cautious decay)."""

    def update(
        updates: Any, state: Any, params: Any = None, *, step: jax.typing.ArrayLike, **_: Any
    ) -> tuple[Any, Any]:
        lr, wd = rate(step), weight_decay(step)

        def one(u: jax.Array, p: jax.Array) -> jax.Array:
            stretch = max(1.0, p.shape[-1] / p.shape[-2]) ** 0.5
            return -lr * (stretch * u + jnp.where(u * p >= 0.0, wd * p, 0.0))

        return jax.tree.map(one, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@optimizers.register("muon", settings=(MuonSettings,))
def muon(
    settings: MuonSettings,
    schedule: Schedule,
    steps: int,
    group_of: GroupOf | None = None,
    *,
    width: int | None = None,
    spread: Spread | None = None,
    compute_dtype: jnp.dtype | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for matrices and gates; AdamW with its own rate, betas and decay for each other group.

    width: the model's; AdamW rates of head and embeddings go with (width/768)^-½. spread: how a stack of
    matrices is laid over the mesh for the polar step (`mesh_spread`).
    """
    groups = {group.name: group for group in settings.groups(width)}

    transforms: dict[str, optax.GradientTransformationExtraArgs] = {
        "matrix": optax.chain(
            scale_by_muon(
                momentum_schedule(settings, schedule, steps),
                settings.muon_beta2,
                spread=spread,
                compute_dtype=compute_dtype,
            ),
            apply_cautious_rate(groups["matrix"].rate(schedule), decay_schedule(settings, steps)),
        )
    }
    for name, group in groups.items():
        if name != "matrix":
            beta1, beta2 = group.betas
            transforms[name] = optax.chain(
                optax.scale_by_adam(beta1, beta2, settings.eps),
                apply_rate(group.rate(schedule), group.weight_decay),
            )

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: settings.label(path_names(path), leaf, group_of), params
        )

    return in_float32(optax.partition(transforms, labels))
