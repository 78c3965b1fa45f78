"""Logical axes in use: constraints and shard counts under the ambient mesh and rule table.

Model code names axes ("batch", "vocab", …); which mesh axis they live on is the rule table's matter. Without a
mesh everything here does nothing, so the same code runs on one device.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax


def rule_axes(name: str | None, size: int | None = None) -> tuple[str, ...]:
    """The mesh axes of the logical axis `name`, those of one device included; none where they do not divide `size`.

    For the specs of `shard_map`: of an axis that no spec names it takes every input for a copy, and sums gradients
    over it, even of one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rules = nn.get_logical_axis_rules()
    if name is None or mesh.empty or not rules:
        return ()
    axes = dict(reversed([(rule[0], rule[1]) for rule in rules])).get(name)  # the first rule of a name wins
    names = (axes,) if isinstance(axes, str) else axes or ()
    found = tuple(axis for axis in names if axis in mesh.shape)
    return found if size is None or size % math.prod(mesh.shape[axis] for axis in found) == 0 else ()


def mesh_axes(name: str | None, size: int | None = None) -> tuple[str, ...]:
    """The mesh axes that split the logical axis `name`; none without a mesh, or where they do not divide `size`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in rule_axes(name, size) if mesh.shape[axis] > 1)


def shards(name: str | None) -> int:
    """Over how many devices the ambient rules split the logical axis `name` (1 without a mesh)."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh_axes(name))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Ask for `x` to be laid out by its logical axes.

    A dimension that its mesh axes do not divide (a batch of one prompt, say) is left free: jax 0.10 would
    replicate it silently and 0.11 may fail.
    """
    divisible = tuple(
        name if size % shards(name) == 0 else None for name, size in zip(names, x.shape, strict=True)
    )
    return nn.with_logical_constraint(x, divisible)
