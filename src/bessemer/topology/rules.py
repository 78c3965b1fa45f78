"""From logical axis names to shardings, strictly.

Flax silently accepts a misspelled logical name (the axis stays unsharded), one mesh axis used twice in an array (the
second use is dropped), and a dimension the mesh does not divide (it is replicated). Here each is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bessemer.errors import InputError, did_you_mean

MeshAxes = str | tuple[str, ...] | None
Rules = Sequence[tuple[str, MeshAxes]]

# Rows of the batch. The expert axis exchanges tokens only in expert layers; the pipeline axis passes sequences on
# between its stages only inside the stack of layers, so embedding, head and loss are shared out over all devices.
BATCH_AXES = ("data", "fsdp", "expert", "pipeline")
STAGE_BATCH_AXES = BATCH_AXES[:-1]  # rows of one micro-batch inside a stage

_SHARED: tuple[tuple[str, MeshAxes], ...] = (
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv", "tensor"),
    ("mlp", "tensor"),
    ("head_dim", None),
    ("layers", None),
    ("rows", None),
    ("gate", None),
    ("expert", "expert"),
    ("stage", "pipeline"),
    ("embed_act", None),
    ("batch", BATCH_AXES),
    ("sequence", "context"),
)
# Where weights rest: split over fsdp and pipeline as well. Where they compute: gathered over fsdp at the moment of use,
# and whole layers on their stage of the pipeline (models/pipeline.py).
REST_RULES: Rules = (("embed", ("fsdp", "pipeline")), *_SHARED)
COMPUTE_RULES: Rules = (("embed", None), *_SHARED)

# What a user would change when a dimension does not divide.
_SIZED_BY = {
    "vocab": "model.vocab_size",
    "heads": "model.heads",
    "kv": "model.kv_heads",
    "mlp": "model.width",
    "expert": "model.experts",
    "embed": "model.width",
    "batch": "training.batch_size",
    "sequence": "architecture.block_size",
}


def check_rules(rules: Rules, mesh: Mesh) -> dict[str, MeshAxes]:
    """Return the table as a dict; raise InputError for a repeated logical name or an unknown mesh axis."""
    table: dict[str, MeshAxes] = {}
    for name, axes in rules:
        if name in table:
            raise InputError(f"axis rules: the logical axis '{name}' is listed twice; keep one line.")
        for axis in _as_tuple(axes):
            if axis not in mesh.axis_names:
                known = ", ".join(map(str, mesh.axis_names))
                raise InputError(f"axis rules: '{name}' is placed on mesh axis '{axis}'; the mesh has {known}.")
        table[name] = axes
    return table


def shardings(tree: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """Return NamedShardings for `tree`, in the structure of the unboxed tree; `rules` defaults to REST_RULES.

    Leaves are `nn.LogicallyPartitioned` boxes of (abstract) arrays, `PartitionSpec`s of logical names or mesh axes, or
    plain arrays, which are replicated.
    """
    table = check_rules(REST_RULES if rules is None else rules, mesh)

    def place(path: Any, leaf: Any) -> NamedSharding:
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
        if isinstance(leaf, PartitionSpec):
            return NamedSharding(mesh, _spec(where, tuple(leaf), None, table, mesh))
        if isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, _spec(where, leaf.names, tuple(leaf.value.shape), table, mesh))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=_is_spec)


def validate_divisible(tree: Any, topology: Any) -> None:
    """Raise InputError, naming parameter, dimension and setting, if `tree` cannot be stored or computed with there."""
    placed = shardings(tree, topology.mesh, topology.rest_rules)
    shardings(tree, topology.mesh, topology.compute_rules)
    size = topology.mesh.shape.get("expert", 1)
    used = {axis for sharding in jax.tree.leaves(placed) for entry in sharding.spec for axis in _as_tuple(entry)}
    if size > 1 and "expert" not in used:
        raise InputError(
            f"topology.expert={size}, but this model has no experts to split (model.experts=0). Use topology.data or "
            "topology.fsdp for these devices, or set model.experts."
        )


def unbox(tree: Any) -> Any:
    """Replace boxes by their arrays, without `nn.unbox`'s constraint, which gathers fsdp shards."""
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, nn.Partitioned) else leaf, tree, is_leaf=_is_spec)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec | nn.Partitioned)


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _spec(
    where: str, names: Sequence[Any], shape: tuple[int, ...] | None, table: dict[str, MeshAxes], mesh: Mesh
) -> PartitionSpec:
    if shape is not None and len(names) != len(shape):
        raise InputError(
            f"parameter '{where}' has shape {shape} but {len(names)} axis names {tuple(names)}: name each axis."
        )
    entries: list[MeshAxes] = []
    used: dict[str, Any] = {}
    for position, name in enumerate(names):
        axes: tuple[str, ...] = ()
        for part in name if isinstance(name, tuple) else (name,):
            axes += _lookup(where, part, table, mesh)
        for axis in axes:
            if axis in used:
                raise InputError(
                    f"parameter '{where}': mesh axis '{axis}' would split two of its dimensions "
                    f"('{used[axis]}' and '{name}'). Rename one of the axes, or change its rule."
                )
            used[axis] = name
        if shape is not None:
            _check_divides(where, name, shape[position], axes, mesh)
        entries.append(axes[0] if len(axes) == 1 else (axes or None))
    return PartitionSpec(*entries)


def _lookup(where: str, name: Any, table: dict[str, MeshAxes], mesh: Mesh) -> tuple[str, ...]:
    if name is None:
        return ()
    if name in table:
        return _as_tuple(table[name])
    if name in mesh.axis_names:
        return (name,)
    hint = did_you_mean(str(name), list(table))
    raise InputError(
        f"parameter '{where}' names the logical axis '{name}', which no rule places.{hint} "
        f"Known: {', '.join(sorted(table))}."
    )


def _check_divides(where: str, name: Any, size: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if size % shards == 0:
        return
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    settings = " x ".join(f"topology.{axis}={mesh.shape[axis]}" for axis in axes)
    sized_by = _SIZED_BY.get(str(name))
    remedy = f" or {sized_by}" if sized_by else ""
    raise InputError(
        f"parameter '{where}': its axis '{name}' has {size} entries, which {settings} does not divide. "
        f"Change topology.{axes[0]}{remedy}."
    )


# --- logical axes in model code, under the ambient mesh and rules; without a mesh these do nothing ---


def rule_axes(name: str | None, size: int | None = None) -> tuple[str, ...]:
    """Return the mesh axes of the logical axis `name`, those of size 1 included; none if they do not divide `size`.

    For the specs of `shard_map`, which sums gradients over any axis that no spec names, even one of size 1.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rules = nn.get_logical_axis_rules()
    if name is None or mesh.empty or not rules:
        return ()
    axes = dict(reversed([(rule[0], rule[1]) for rule in rules])).get(name)  # the first rule of a name wins
    found = tuple(axis for axis in _as_tuple(axes) if axis in mesh.shape)
    return found if size is None or size % math.prod(mesh.shape[axis] for axis in found) == 0 else ()


def mesh_axes(name: str | None, size: int | None = None) -> tuple[str, ...]:
    """Return the mesh axes that split the logical axis `name`; none without a mesh, or if they do not divide `size`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in rule_axes(name, size) if mesh.shape[axis] > 1)


def shards(name: str | None) -> int:
    """Return the number of devices over which the logical axis `name` is split (1 without a mesh)."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh_axes(name))


def in_stage() -> bool:
    """Return whether a stage of a pipeline is being traced, where `shard_map` has taken some of the mesh's axes.

    A kernel must take the others too, even those of size 1: the compiler divides no kernel by itself there.
    """
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain the layout of `x` by its logical axes.

    A dimension that its mesh axes do not divide (such as a batch of one prompt) is left free: jax 0.10 would replicate
    it silently, and 0.11 may fail.
    """
    divisible = tuple(name if size % shards(name) == 0 else None for name, size in zip(names, x.shape, strict=True))
    return nn.with_logical_constraint(x, divisible)
