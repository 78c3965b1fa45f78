"""A stack of layers over the stages of `topology.pipeline`: consecutive layers on each, sequences passed on.

S stages, b sequences on every device, M = S · b micro-batches, each of one sequence per data-parallel group. At tick t,
stage s works on micro-batch t − s:

    tick       0    1    2    3   …
    stage 0   m0   m1   m2   m3
    stage 1    ·   m0   m1   m2        M + S − 1 ticks, of which each stage idles in S − 1

This is GPipe's schedule (Huang et al. 2019, arXiv 1811.06965): all forward passes, then all backward passes, which are
the transpose of the scan over ticks. A stage keeps its input of every tick and recomputes its layers on the way back,
one micro-batch at a time. 1F1B would keep S inputs of a stage instead of M, at the same bubble; it needs forward and
backward passes of different micro-batches in one tick, which automatic differentiation of a scan cannot order.

Weights rest split over the stages in equal parts, as over fsdp, under their own names: checkpoints, optimizers,
decoding and exports know nothing of stages. A pass begins by exchanging them, so that every stage holds its own layers
whole; their gradients return in the same way, after their sum over `topology.data`. All of that happens once per pass,
not per micro-batch. Weights that `topology.fsdp` splits are gathered for every micro-batch.

Layers may differ (windows, value embeddings, lookups): stages that do are branches of one `lax.switch`, and those that
do not are one program.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec

from bessemer.errors import InputError
from bessemer.models.layers import After, Connect, Step, run_layers, run_some
from bessemer.models.moe import Stats, Watch
from bessemer.topology.rules import STAGE_BATCH_AXES, shards

AXIS, REPLICAS = "pipeline", "data"
WITHIN = tuple(axis for axis in STAGE_BATCH_AXES if axis != REPLICAS)  # rows of a micro-batch, left to the compiler
FREE = PartitionSpec.UNCONSTRAINED


class Rows(NamedTuple):
    """What layers read beside the residual stream, (B, T) each, or (1, T) for all rows; keys: (B,)."""

    ids: Array
    positions: Array
    documents: Array | None
    keys: Array | None
    counted: Array | None
    replayed: Array | None  # (B, T, layers, k), the experts to use

    @property
    def watch(self) -> Watch:
        return Watch(self.counted, self.replayed)


Block = Callable[[Rows], tuple[Step, After]]
Finish = Callable[[dict[str, Array], Array, Array | None], Array]


@dataclass(frozen=True)
class Stack:
    """A stack of layers, as a family describes it.

    block: what a layer computes on given rows, and what follows a layer with lookups. It holds no arrays of its own.
    finish: (shared, output of the last layer, that of the middle one) → the output of the stack.
    kinds: the static part of each layer. mixes: whether layers read the embeddings. middle: whether `finish` reads the
    output of layer depth // 2.
    """

    block: Block
    kinds: Sequence[Hashable]
    scan: bool
    remat: Sequence[str]
    finish: Finish = lambda shared, x, middle: x
    mixes: bool = False
    middle: bool = False


def run_stack(
    stack: Stack,
    params: Sequence[dict[str, Any]],
    shared: dict[str, Array],
    x: Array,
    rows: Rows,
    stats: Stats,
    connect: Connect | None = None,
) -> tuple[Array, Stats]:
    """Return (output of the stack, stats). x: (B, T, D), the embeddings; shared: what `finish` reads; stats: zeros.

    connect: replaces what each layer hands on (`run_layers`); not with several stages.
    Rows that the stages do not divide, such as one prompt, go through all layers on every device.
    """
    stages, groups = shards("stage"), shards("batch") // shards("stage")
    if stages > 1 and len(x) % (groups * stages) == 0:
        return _pipelined(stack, params, shared, x, rows, stats)
    step, after = stack.block(rows)
    x, middle, stats = run_layers(
        step, after, params, stack.kinds, x, scan=stack.scan, remat=stack.remat, stats=stats, connect=connect
    )
    return stack.finish(shared, x, middle), stats


def stage_bounds(depth: int, stages: int) -> list[tuple[int, int]]:
    """Return (first layer, end) of each stage; the first ones have one more where the layers do not divide."""
    short, longer = divmod(depth, stages)
    firsts = [stage * short + min(stage, longer) for stage in range(stages + 1)]
    return list(pairwise(firsts))


def check_stages(kinds: Sequence[Hashable], layers: Sequence[Any], stages: int, pieces: int) -> None:
    """Raise InputError if the stages of a model differ and `pieces` devices share a row.

    kinds: the static part of each layer. layers: the shapes of its parameters.
    """
    forms = [(kind, _form(layer)) for kind, layer in zip(kinds, layers, strict=True)]
    _check_alike({tuple(forms[first:end]) for first, end in stage_bounds(len(forms), stages)}, stages, pieces)


def _form(layer: Any) -> tuple[Any, ...]:
    return tuple((path, leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(layer))


def _check_alike(programs: Collection[Any], stages: int, pieces: int) -> None:
    if len(programs) > 1 and pieces > 1:
        raise InputError(
            f"topology.pipeline={stages} with topology.context={pieces} takes stages that are alike: devices that "
            "attend to different windows would wait for each other forever. Here the stages differ in their number of "
            "layers, windows (model.window, model.sliding_layers) or value embeddings. Use another number of stages, "
            "model.window=L, or topology.context=1."
        )


def micro_batches(stages: int, rows: int) -> int:
    """Return M of a pass with `rows` sequences on each device."""
    return stages * rows


def bubble(stages: int, rows: int) -> float:
    """Return the share of a pass that a stage idles, (S − 1) / (M + S − 1). rows: sequences on each device."""
    return (stages - 1) / (micro_batches(stages, rows) + stages - 1)


# -- parameters of layers, one array (S, layers of a stage, …) per name ------------------------------------------------

Place = tuple[Any, tuple[tuple[Hashable, int], ...]]
"""A layer's tree, and for each leaf its name and its place in the stack of its stage."""


def _stacked(
    params: Sequence[dict[str, Any]], bounds: Sequence[tuple[int, int]]
) -> tuple[dict[Any, Array], list[tuple[Place, ...]]]:
    """Return name → (S, n, …), split over the stages, and the places of the layers of each stage.

    n is the most that a stage has of that name; the others are padded with zeros.
    """
    held: dict[Any, list[list[Array]]] = defaultdict(lambda: [[] for _ in bounds])
    places: list[tuple[Place, ...]] = []
    for stage, (first, end) in enumerate(bounds):
        layers: list[Place] = []
        for layer in params[first:end]:
            leaves, tree = jax.tree_util.tree_flatten_with_path(layer)
            found: list[tuple[Hashable, int]] = []
            for path, leaf in leaves:
                name = (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype))
                found.append((name, len(held[name][stage])))
                held[name][stage].append(leaf)
            layers.append((tree, tuple(found)))
        places.append(tuple(layers))

    def join(of_stages: list[list[Array]]) -> Array:
        most, one = max(map(len, of_stages)), next(leaf for leaves in of_stages for leaf in leaves)
        rows = [jnp.stack([*leaves, *[jnp.zeros_like(one)] * (most - len(leaves))]) for leaves in of_stages]
        return _split(jnp.stack(rows))

    return {name: join(of_stages) for name, of_stages in held.items()}, places


def _split(x: Array) -> Array:
    """Split the first axis over the stages; the others stay as they are."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(AXIS, *[FREE] * (x.ndim - 1)))


# -- the schedule ------------------------------------------------------------------------------------------------------


def _pipelined(
    stack: Stack, params: Sequence[dict[str, Any]], shared: dict[str, Array], x: Array, rows: Rows, stats: Stats
) -> tuple[Array, Stats]:
    stages, batch = shards("stage"), len(x)
    groups = shards("batch") // stages
    per = batch // (groups * stages)  # micro-batches that begin on a stage
    count = stages * per
    bounds = stage_bounds(len(params), stages)
    stacks, places = _stacked(params, bounds)
    seen = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stats)
    kinds = [tuple(stack.kinds[first:end]) for first, end in bounds]
    programs = list(dict.fromkeys(zip(kinds, places, strict=True)))
    _check_alike(programs, stages, shards("sequence"))
    which = [programs.index(program) for program in zip(kinds, places, strict=True)]
    stage = _stage([partial(_layers, stack, len(params), seen, *program) for program in programs])

    own = {
        "stacks": stacks,
        "shared": jax.tree.map(lambda leaf: _split(jnp.broadcast_to(leaf, (stages, *leaf.shape))), shared),
        "number": jnp.arange(stages),
        "first": jnp.array([first for first, _ in bounds], jnp.int32),
        "program": jnp.array(which, jnp.int32),
    }
    back = [(i + 1, i) for i in range(stages - 1)]
    on = [(i, i + 1) for i in range(stages - 1)]

    def local(own: dict[str, Any], x: Array, rows: Rows) -> tuple[Array, Stats]:
        """x: (groups of this replica, 1, per, T, D), the sequences that begin and end on this stage."""
        own = jax.tree.map(lambda leaf: leaf[0], own)
        number = own.pop("number")
        waiting = jnp.swapaxes(x[:, 0], 0, 1)  # (per, groups, T, D)

        def tick(carry: tuple[Any, Array, Stats], t: Array) -> tuple[tuple[Any, Array, Stats], None]:
            stream, waiting, total = carry
            slot = t % per
            head = jax.lax.dynamic_index_in_dim(waiting, slot, 0, keepdims=False)
            stream = jax.tree.map(lambda sent: jnp.where(number == 0, head, sent), stream)
            micro = t - number
            here = _each(partial(_of_micro_batch, jnp.clip(micro, 0, count - 1)), rows)
            stream, made, measured = stage(own, stream, here)
            busy = (micro >= 0) & (micro < count)
            total = jax.tree.map(lambda a, b: a + jnp.where(busy, b, 0), total, measured)
            # What waits moves toward the first stage, one place whenever its turn comes; results enter at the last one,
            # and so end on the stage where they began.
            moved = jnp.where(number == stages - 1, made, jax.lax.ppermute(head, AXIS, back))
            waiting = jax.lax.dynamic_update_index_in_dim(waiting, moved, slot, 0)
            return (jax.tree.map(lambda a: jax.lax.ppermute(a, AXIS, on), stream), waiting, total), None

        # idle ticks compute on any finite numbers
        stream = dict.fromkeys(("x", *["x0"] * stack.mixes, *["middle"] * stack.middle), waiting[0])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), seen)
        (_, done, total), _ = jax.lax.scan(tick, (stream, waiting, zeros), jnp.arange(count + stages - 1))
        done = jnp.roll(done, 1 - stages, axis=0)
        return jnp.swapaxes(done, 0, 1)[:, None], jax.tree.map(lambda leaf: leaf[None], total)

    # Over replicas as well: each adds up the gradients of its own micro-batches, and their sum is taken once.
    x = jax.lax.with_sharding_constraint(
        x.reshape(groups, stages, per, *x.shape[1:]), PartitionSpec(STAGE_BATCH_AXES, AXIS)
    )
    rows = _each(partial(_by_micro_batch, batch, groups), rows)
    specs = _each(_rows_spec, rows)
    run = jax.shard_map(
        local,
        in_specs=(PartitionSpec(AXIS), PartitionSpec(REPLICAS, AXIS), specs),
        out_specs=(PartitionSpec(REPLICAS, AXIS), PartitionSpec((AXIS, REPLICAS))),
        axis_names={AXIS, REPLICAS},
        check_vma=False,
    )
    made, total = run(own, x, rows)
    return made.reshape(batch, *made.shape[3:]), jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), total)


def _each(function: Callable[[Array], Any], rows: Rows) -> Any:
    return Rows(*[None if leaf is None else function(leaf) for leaf in rows])  # type: ignore[arg-type]


def _by_micro_batch(batch: int, groups: int, leaf: Array) -> Array:
    """(B, …) → (M, groups, …), whole on every stage. What holds for all rows becomes (1, 1, …)."""
    if leaf.shape[0] != batch:
        return leaf[None]
    leaf = jnp.swapaxes(leaf.reshape(groups, -1, *leaf.shape[1:]), 0, 1)
    return jax.lax.with_sharding_constraint(leaf, PartitionSpec(None, STAGE_BATCH_AXES))


def _rows_spec(leaf: Array) -> PartitionSpec:
    """Return the spec of (M, groups, …): every replica has its own groups."""
    return PartitionSpec(None, REPLICAS if leaf.shape[1] > 1 else None)


def _of_micro_batch(number: Array, leaf: Array) -> Array:
    return leaf[0] if len(leaf) == 1 else jax.lax.dynamic_index_in_dim(leaf, number, 0, keepdims=False)


Program = Callable[[dict[str, Any], dict[str, Array], Rows], tuple[dict[str, Array], Array, Stats]]


def _layers(
    stack: Stack,
    depth: int,
    seen: Any,
    kinds: Sequence[Hashable],
    places: Sequence[Place],
    own: dict[str, Any],
    stream: dict[str, Array],
    rows: Rows,
) -> tuple[dict[str, Array], Array, Stats]:
    """Run the layers of one stage: (stream to send on, output of the stack if they are the last, stats)."""
    params = [
        jax.tree.unflatten(tree, [own["stacks"][name][position] for name, position in leaves])
        for tree, leaves in places
    ]
    step, after = stack.block(rows)
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), seen)
    start = ((stream["x"], stream.get("x0", stream["x"]), stats), stream.get("middle"))
    (x, x0, stats), middle = run_some(
        step, after, params, kinds, start, scan=stack.scan, remat=stack.remat, first=own["first"], depth=depth
    )
    sent: dict[str, Any] = {"x": x, "x0": x0, "middle": middle}
    return {name: sent[name] for name in stream}, stack.finish(own["shared"], x, middle), stats


def _stage(programs: Sequence[Program]) -> Program:
    """Return a function that runs the program of a stage and keeps only its inputs for the backward pass.

    Differentiated as it stands, a switch would keep what any of its branches keeps.
    """

    def chosen(branches: Sequence[Callable[..., Any]], own: dict[str, Any], *args: Any) -> Any:
        return branches[0](*args) if len(branches) == 1 else jax.lax.switch(own["program"], branches, *args)

    @jax.custom_vjp
    def stage(own: dict[str, Any], stream: dict[str, Array], rows: Rows) -> Any:
        with _inside():
            return chosen(programs, own, own, stream, rows)

    def forward(*args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(args, is_leaf=lambda leaf: isinstance(leaf, CustomVJPPrimal))
        values = jax.tree.unflatten(tree, [leaf.value for leaf in leaves])
        return stage(*values), (values, [jnp.zeros(()) if leaf.perturbed else None for leaf in leaves])

    def backward(residuals: Any, cotangents: Any) -> Any:
        values, perturbed = residuals
        leaves, tree = jax.tree.flatten(values)
        moves = [mark is not None for mark in perturbed]
        cotangents = jax.tree.map(_instantiated, cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))

        def gradients(program: Program, leaves: list[Any], cotangents: Any) -> Any:
            def of(moving: list[Any]) -> Any:
                given = iter(moving)
                whole = [next(given) if move else leaf for move, leaf in zip(moves, leaves, strict=True)]
                return program(*jax.tree.unflatten(tree, whole))

            _, pull = jax.vjp(of, [leaf for move, leaf in zip(moves, leaves, strict=True) if move])
            return pull(cotangents)[0]

        with _inside():
            branches = [partial(gradients, program) for program in programs]
            found = iter(chosen(branches, values[0], leaves, cotangents))
        return jax.tree.unflatten(tree, [next(found) if move else None for move in moves])

    stage.defvjp(forward, backward, symbolic_zeros=True)
    return stage


def _instantiated(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, SymbolicZero) else leaf


BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^\s,]+))")
CALLS = re.compile(r"\b(?:calls|to_apply|body|condition)=([^\s,}]+)")
BEGINS = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


def check_branches(program: str) -> None:
    """Raise InputError if a compiled program (its text) would hang: if stages that differ exchange data with neighbors.

    Such an exchange, unlike the others, waits for all devices of the mesh, and the other stages run another branch.
    """
    bodies: dict[str, list[str]] = {"": []}
    name = ""
    for line in program.splitlines():
        if (begins := BEGINS.match(line)) and " = " not in line.split("(", 1)[0]:
            name = begins[1]
            bodies[name] = []
        elif "=" in line:
            bodies[name].append(line)
    lines = [line for body in bodies.values() for line in body]
    left = [word for line in lines for pair in BRANCHES.findall(line) for word in "".join(pair).split(",")]
    seen: set[str] = set()
    while left:
        name = left.pop().strip().lstrip("%")
        for line in bodies.get(name, []) if name not in seen else []:
            if " collective-permute(" in line or " collective-permute-start(" in line:
                raise InputError(
                    "topology.pipeline: on this mesh the compiler lets neighbors exchange data inside stages that "
                    "differ, and the step would hang. Make the stages alike (another number of stages, "
                    "model.window=L, architecture.value_embeddings=false), or use topology.data in place of "
                    "topology.fsdp or topology.tensor."
                )
            left += CALLS.findall(line)
        seen.add(name)


@contextmanager
def _inside() -> Iterator[None]:
    """Trace with the axis rules of one stage, whose rows are not split over the pipeline and those of one replica."""
    rules = [rule for rule in nn.get_logical_axis_rules() if rule[0] not in ("batch", "stage")]
    with nn.logical_axis_rules([("batch", WITHIN), *rules]):
        yield
