"""The analytic model: memory, collectives and roofline time of one step, for any mesh, micro-batch and remat.

    peak = max of  forward   state + G·[S > 1] + kept tensors + workspace + scratch
                   backward  state + G·(1 + [S > 1]) + workspace + scratch
                   update    state + G + the optimizer's own matrices
                   rollout   state + KV cache + matrices in compute precision      (runs that sample)

G: float32 gradients as they rest. S: micro-batches of a step. With fsdp the largest parameter is also gathered,
with its gradient. With stages, kept tensors are those of models/pipeline.py (`_stage_memory`). Scratch is what cuDNN's
attention works in, where documents mask it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from bessemer.config.recipes import read_yaml
from bessemer.errors import InputError, nearest
from bessemer.kernels.attention import document_slots, flash_scratch
from bessemer.models.gpt import GPT
from bessemer.models.layers import remat_names
from bessemer.models.pipeline import bubble, micro_batches
from bessemer.models.shape import Shape
from bessemer.models.transformer import Transformer
from bessemer.plan.collectives import Collective, Layout, merged
from bessemer.plan.kept import Kept, kept_tensors
from bessemer.plan.trainer import Target
from bessemer.storage.files import home
from bessemer.topology import AXES, CHIPS, placement, shardings, unbox
from bessemer.topology.rules import BATCH_AXES
from bessemer.training.setup.compiled import Functions, RunPlan, StepHooks
from bessemer.training.setup.microbatch import SPARE, accumulation
from bessemer.training.setup.model import precision_of

SLOTS = "grpo/slots"
DOCUMENTS = "segment_ids"  # the field of a batch


# --- what a model and its step need, whatever the mesh ---
@dataclass(frozen=True)
class StateBytes:
    """Bytes of one device, at rest."""

    parameters: int
    optimizer: int
    frozen: int
    other: int  # average, reference, counters
    trained: int  # of parameters with a gradient, in float32
    largest: int  # of the largest parameter gathered over fsdp but not over tensor, in float32


@dataclass(frozen=True)
class PlannedStep:
    """A planned run with the functions of its step, which hold only shapes if the hardware is absent."""

    plan: RunPlan
    hooks: StepHooks
    functions: Functions

    @property
    def model(self) -> Any:
        return self.plan.model.model


@dataclass
class Facts:
    """What a planned step needs on any mesh."""

    step: PlannedStep
    target: Target
    _state: dict[tuple[int, ...], StateBytes] = field(default_factory=dict)
    _kept: dict[tuple[str, ...], Kept] = field(default_factory=dict)

    @cached_property
    def shape(self) -> Shape | None:
        return self.step.model.shape if isinstance(self.step.model, Transformer) else None

    @property
    def block(self) -> int:
        return int(self.step.plan.context.settings.block_size)

    @property
    def batch(self) -> int:
        """Return the sequences of one step."""
        return int(self.step.plan.data.batch_size)

    @property
    def precision(self) -> str:
        return precision_of(self.step.model)

    @cached_property
    def compute_bytes(self) -> int:
        """Return the bytes per weight in compute precision."""
        model = self.step.model
        if not isinstance(model, Transformer):
            return 4
        with self.step.plan.context.topology.scope():  # in the precision of the target
            return int(jax.numpy.dtype(model.compute_dtype).itemsize)

    @property
    def remat(self) -> tuple[str, ...]:
        return tuple(self.step.model.remat) if isinstance(self.step.model, Transformer) else ("none",)

    @cached_property
    def float8_flops(self) -> float:
        """Return the FLOPs per token that run in float8: 6 × the matrices of blocks, but not their stacks of experts,
        and of the head with fp8_head."""
        model, counts = self.step.model, self.step.plan.model.counts
        if self.precision != "fp8":
            return 0.0
        head = counts["head"] * (isinstance(model, GPT) and model.fp8_head)
        return 6.0 * (counts["matrix"] - _stacks(self) + head)

    @cached_property
    def update_flops(self) -> float:
        functions = self.step.functions
        return float(functions.optimizer.update_flops(functions.abstract_state.params))

    @cached_property
    def muon_parameters(self) -> int:
        """Return the parameters that Muon updates with matrix products, spread over the mesh."""
        functions = self.step.functions
        rows = functions.optimizer.describe(functions.abstract_state.params)
        name = self.step.plan.context.settings.optimizer or self.step.hooks.optimizer()
        return sum(row.parameters for row in rows if row.group == "matrix") if name == "muon" else 0

    @cached_property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.step.functions.abstract_state.params))

    def kept(self, remat: tuple[str, ...] | None = None) -> Kept:
        """Return what a micro-batch keeps for its backward pass."""
        wanted = self.remat if remat is None else remat
        if wanted not in self._kept:
            context, state = self.step.plan.context, self.step.functions.abstract_state
            with context.topology.scope():
                self._kept[wanted] = kept_tensors(
                    state, self.step.model, self.step.plan.data.fields, self.block, wanted
                )
        return self._kept[wanted]

    def one_layer(self, remat: tuple[str, ...]) -> float:
        """Return the bytes per row while one block is recomputed: a layer's share of what is kept without remat."""
        if remat_names(remat) is None:
            return 0.0
        whole = self.kept(("none",))
        return whole.activations(whole.rows) / whole.rows / (self.shape.depth if self.shape else 1)

    @cached_property
    def masked_by_documents(self) -> bool:
        """Return whether cuDNN's attention sees the documents of its rows."""
        model = self.step.model
        if not isinstance(model, Transformer) or not model.document_mask or DOCUMENTS not in self.step.plan.data.fields:
            return False
        with self.step.plan.context.topology.scope():
            return model.chosen_kernels()["attention"][0] == "cudnn"

    def attention_scratch(self, choice: Choice) -> float:
        """Return the bytes that cuDNN's attention works in: it has a slot for every document where the mesh splits
        neither rows nor heads and the most documents per row are known, else one for every row."""
        model, shape = self.step.model, self.shape
        if not self.masked_by_documents or shape is None:
            return 0.0
        rows = choice.rows if choice.stages == 1 else 1
        alone = all(size == 1 for size in choice.axes.values())
        slots = document_slots(rows, model.document_slots(rows)) if alone and model.max_documents else rows
        split = choice.axes["tensor"] * choice.axes["context"]
        return flash_scratch(slots, self.block, shape.heads, shape.head_dim) / split

    def rollout_bytes(self, axes: Mapping[str, int]) -> float:
        """Return the bytes of sampling completions on one device: the KV caches of the rows being written and of their
        prompts, and the matrices that do not rest in compute precision; 0 for a run that does not sample."""
        config, model = self.step.plan.context.config, self.step.model
        if not self.step.hooks.rolls_out or not isinstance(model, Transformer) or SLOTS not in config:
            return 0.0
        with self.step.plan.context.topology.scope():  # in the precision of the target
            dtype = model.compute_dtype
            cache = jax.eval_shape(lambda: model.init_cache(int(config[SLOTS]), self.block, dtype))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        split = math.prod(axes[axis] for axis in (*BATCH_AXES, "tensor"))
        wide = [leaf for leaf in self.leaves.elements() if leaf.part in ("parameters", "frozen")]
        name = jax.numpy.dtype(dtype).name
        cast = sum(leaf.held(axes, name) for leaf in wide if len(leaf.shape) > 1 and leaf.dtype != name)
        return 2 * held / split + cast

    @cached_property
    def leaves(self) -> Counter[Leaf]:
        """Return the arrays of the state, with equal ones of all layers counted together."""
        return Counter(state_leaves(self.step))

    def state(self, axes: Mapping[str, int]) -> StateBytes:
        """Return the bytes at rest on a mesh of these sizes; InputError if it does not divide the model."""
        sizes = tuple(axes[name] for name in AXES)
        if sizes not in self._state:
            held: dict[str, int] = {"parameters": 0, "optimizer": 0, "frozen": 0, "other": 0}
            trained = largest = 0
            for leaf, count in self.leaves.items():
                size = leaf.held(axes)
                if leaf.part == "in use":
                    largest = max(largest, size)
                    continue
                held[leaf.part] += count * size
                trained += count * leaf.held(axes, "float32") if leaf.part == "parameters" else 0
            self._state[sizes] = StateBytes(**held, trained=trained, largest=largest)
        return self._state[sizes]


@dataclass(frozen=True)
class Leaf:
    """One array of the state: its part, its shape, and the mesh axes that split each dimension."""

    part: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]

    def held(self, axes: Mapping[str, int], dtype: str | None = None) -> int:
        """Return the bytes on one device, as stored or in another dtype; InputError if a size does not divide."""
        count = 1
        for size, names in zip(self.shape, self.spec, strict=True):
            shards = math.prod(axes[name] for name in names)
            if size % shards:
                raise InputError(f"{self.part}: {size} is not divided by {' × '.join(names)} = {shards}.")
            count *= size // shards
        return count * jax.numpy.dtype(dtype or self.dtype).itemsize


def leaves_of(part: str, tree: Any, placed: Any) -> list[Leaf]:
    """Return the arrays of `tree`. Specs name mesh axes whatever their sizes, so they hold for every mesh."""
    rows = placement(tree, placed)
    return [Leaf(part, tuple(row["shape"]), str(row["dtype"]), _axes(row["spec"])) for row in rows]


def _axes(spec: list[Any]) -> tuple[tuple[str, ...], ...]:
    return tuple(() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec)


def state_leaves(step: PlannedStep) -> list[Leaf]:
    state, placed = step.functions.abstract_state, step.functions.state_shardings
    found = leaves_of("parameters", state.params, placed.params)
    found += leaves_of("optimizer", state.opt_state, placed.opt_state)
    found += leaves_of("frozen", state.frozen, placed.frozen)
    rest = [tree.replace(params=None, opt_state=None, frozen=None) for tree in (state, placed)]
    found += leaves_of("other", *rest)
    boxed, topology = step.plan.model.boxed, step.plan.context.topology
    in_use = shardings(boxed, topology.mesh, topology.compute_rules)
    return found + leaves_of("in use", unbox(boxed), in_use)


# --- prices.yaml, which users edit: what an hour of a chip costs, and the network beyond its own links ---
SHIPPED = Path(__file__).with_name("prices.yaml")
KEYS = ("dollars_hour", "node", "outside_gb_s")


@dataclass(frozen=True)
class Terms:
    """One chip's entry. `source` is the file that was read last for it."""

    dollars_hour: float | None
    node: int | None
    outside_gb_s: float
    source: str


def terms_of(chip: str, given: Path | None = None) -> Terms:
    """Return the shipped entry of a chip with the values of --prices, else of BESSEMER_HOME/prices.yaml, over it."""
    line, source = dict(_read(SHIPPED)[chip]), "the shipped prices.yaml, to be edited"
    own = given or home() / "prices.yaml"
    if given is not None or own.is_file():
        replaced = _read(own).get(chip)
        if replaced:
            line, source = line | replaced, str(own)
    return Terms(line["dollars_hour"], line["node"], float(line["outside_gb_s"]), source)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    table = read_yaml(path, "price table")
    for chip, line in table.items():
        if chip not in CHIPS:
            close = nearest(chip, list(CHIPS))
            hint = f"; did you mean '{close}'?" if close else ""
            raise InputError(f"price table '{path}': unknown chip '{chip}'{hint}.")
        if not isinstance(line, dict):
            raise InputError(f"price table '{path}': '{chip}' must hold a mapping of {', '.join(KEYS)}.")
        for key, value in line.items():
            _check(path, chip, key, value)
    return table


def _check(path: Path, chip: str, key: str, value: Any) -> None:
    if key not in KEYS:
        raise InputError(f"price table '{path}', {chip}: unknown key '{key}'; known: {', '.join(KEYS)}.")
    empty = value is None and key != "outside_gb_s"
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not empty and not (number and (key != "node" or isinstance(value, int))):
        raise InputError(f"price table '{path}', {chip}: {key}={value!r} must be a number above 0.")


# --- the estimate ---
# How often a tensor travels between chip and memory in elementwise work. Fitted to two measured steps on an H200
# (docs/scale.md): depth 12 takes 421 ms and depth 20 1,436 ms.
PASSES = 10.0
# How often dense connections move an output that they read: forward, backward, and its gradient read and written.
CONNECTION_PASSES = 4.0


@dataclass(frozen=True)
class Choice:
    """What a plan decides: mesh sizes by axis, sequences per device in one pass, what is recomputed."""

    axes: Mapping[str, int]
    rows: int
    remat: tuple[str, ...]

    @property
    def parallel(self) -> int:
        return math.prod(self.axes[axis] for axis in BATCH_AXES)

    @property
    def stages(self) -> int:
        return self.axes["pipeline"]

    @property
    def ticks(self) -> int:
        """Return the micro-batches that a device works on in one pass, idle ones included."""
        return self.rows if self.stages == 1 else micro_batches(self.stages, self.rows) + self.stages - 1

    @property
    def bubble(self) -> float:
        """Return the share of a pass in which a stage is idle."""
        return bubble(self.stages, self.rows)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; `peak` is what must fit."""

    parameters: float
    optimizer: float
    frozen: float
    other: float
    gradients: float
    activations: float
    workspace: float
    attention: float  # what cuDNN works in, where documents mask attention; no compiler counts it
    rollout: float  # while completions are sampled, when gradients, activations and workspace are empty
    peak: float


@dataclass(frozen=True)
class Estimate:
    choice: Choice
    accumulate: int
    memory: Memory
    collectives: tuple[Collective, ...]
    flops: float  # of one device in one step
    float8_flops: float  # those of them that run in float8
    traffic: float  # bytes between one device and its memory in one step

    def fits(self, limit: float) -> bool:
        return self.memory.peak <= SPARE * limit


def estimate(facts: Facts, choice: Choice, terms: Terms) -> Estimate:
    steps = accumulation(facts.batch, choice.rows, choice.parallel)
    memory = peak_memory(facts, choice, steps)
    found = merged(_collectives(facts, choice, steps, Layout(choice.axes, node_of(facts.target, terms))))
    work = step_flops(facts, choice)
    return Estimate(choice, steps, memory, tuple(found), *work, _traffic(facts, choice, steps))


def node_of(target: Any, terms: Terms) -> int:
    """Return the number of devices that the fast links join: a GPU's node, a TPU's slice."""
    return terms.node or target.devices // target.slices


def peak_memory(facts: Facts, choice: Choice, steps: int) -> Memory:
    axes, state, kept = choice.axes, facts.state(choice.axes), facts.kept(choice.remat)
    split = (axes["tensor"], axes["context"])
    held = state.parameters + state.optimizer + state.frozen + state.other
    recomputed = facts.one_layer(choice.remat) * choice.rows / axes["context"]
    if choice.stages > 1:
        activations = _stage_memory(facts, choice, kept, recomputed)
    else:
        activations = kept.activations(choice.rows, *split, axes["fsdp"]) + recomputed
    activations += _exchange_buffers(facts, choice)
    used = facts.compute_bytes / 4  # of a parameter's float32 bytes
    gathered = state.largest * (1 + 2 * used) if axes["fsdp"] > 1 else state.largest * used
    workspace = kept.workspace(choice.rows, *split) + gathered + recomputed  # the gradients of that block
    several = steps > 1
    scratch = facts.attention_scratch(choice)
    forward = several * state.trained + activations + workspace + scratch
    backward = (1 + several) * state.trained + workspace + scratch
    # Muon: the update in float32 as it rests, and three stacks of a device's share in the compute dtype
    matrices = facts.muon_parameters / axes["tensor"]
    own = matrices * (4 / axes["fsdp"] + 3 * facts.compute_bytes / (axes["fsdp"] * axes["data"]))
    update = state.trained + own
    above = max(forward, backward, update)
    gradients = {forward: several, backward: 1 + several, update: 1}[above] * state.trained
    rollout = facts.rollout_bytes(axes)
    resting = (state.parameters, state.optimizer, state.frozen, state.other)
    return Memory(*resting, gradients, activations, workspace, scratch, rollout, held + max(above, rollout))


def step_flops(facts: Facts, choice: Choice) -> tuple[float, float]:
    """Return (FLOPs of one device, those of them in float8): the model's formula with causal attention, a third more if
    blocks are recomputed, and the optimizer's."""
    parts, axes = facts.step.plan.model, choice.axes
    devices = choice.parallel * axes["tensor"] * axes["context"]
    again = 4 / 3 if remat_names(choice.remat) == () else 1.0
    again += 1 / 3 if choice.stages > 1 else 0.0  # a stage recomputes its layers
    passes = facts.batch * facts.block * again / devices
    total = parts.flops_per_token_causal * passes + facts.update_flops / choice.parallel
    return total, facts.float8_flops * passes


def _traffic(facts: Facts, choice: Choice, steps: int) -> float:
    """Return bytes: elementwise work on what is kept, weights read twice per pass, gradients added, state updated.

    Dense connections read the outputs of all layers before.
    """
    state, kept = facts.state(choice.axes), facts.kept(("none",))
    split = (choice.axes["tensor"], choice.axes["context"])
    between = PASSES * kept.activations(choice.rows, *split)
    weights = facts.parameters / choice.axes["tensor"] * (2 * (4 + facts.compute_bytes) + 4)
    update = 2 * (state.parameters + state.optimizer) + 3 * state.trained
    tokens = choice.rows * facts.block / choice.axes["context"]
    outputs = facts.shape.connected * facts.shape.width if facts.shape else 0
    connections = CONNECTION_PASSES * tokens * outputs * facts.compute_bytes
    return steps * (between + connections + weights + 2 * state.trained) + update


def _layer_parameters(facts: Facts) -> float:
    """Return the parameters of layers, which the pipeline axis divides among the stages."""
    shape = facts.shape
    return (
        0.0
        if shape is None
        else max(0.0, facts.parameters - 2.0 * shape.padded_vocab * shape.width - shape.bigram_parameters)
    )


def _streams(facts: Facts) -> int:
    """Return the tensors (T, D) that a stage sends on: the residual stream, and what gpt's layers read beside it."""
    shape = facts.shape
    return 1 if shape is None else 1 + shape.residual_mix + (shape.backout and shape.depth > 2)


def _stage_memory(facts: Facts, choice: Choice, kept: Kept, recomputed: float) -> float:
    """Return the bytes of a pass through stages: a stage's weights whole and their gradients, in float32; its inputs of
    all ticks; its layers for one micro-batch; and the sequences that wait, their results, and the gradients of both."""
    axes, stages = choice.axes, choice.stages
    one = facts.block / axes["context"] * (facts.shape.width if facts.shape else 0) * facts.compute_bytes
    weights = _layer_parameters(facts) / stages / axes["fsdp"] / axes["tensor"] * 4
    layers = kept.activations(1, axes["tensor"], axes["context"], axes["fsdp"]) / stages + recomputed / choice.rows
    return 2 * weights + choice.ticks * _streams(facts) * one + layers + 4 * choice.rows * one


def _stacks(facts: Facts) -> float:
    """Return the parameters in stacks of experts, which the expert axis splits."""
    shape = facts.shape
    if shape is None or shape.experts is None:
        return 0.0
    return float(shape.depth * shape.experts.count * shape.mlp_matrices * shape.width * shape.experts.width)


def _exchange_buffers(facts: Facts, choice: Choice) -> float:
    """Return the bytes that room for the worst case adds: a device has room for the rows of all X devices of the expert
    axis, X · N · k, and keeps the inputs and hidden values of all of them for its backward pass. A stage keeps those of
    its own layers, for one micro-batch."""
    shape, axes = facts.shape, choice.axes
    if shape is None or shape.experts is None or axes["expert"] == 1:
        return 0.0
    sequences = choice.rows if choice.stages == 1 else 1
    rows = (axes["expert"] - 1) * sequences * facts.block / axes["context"] * shape.experts.active
    width = 2 * shape.width + shape.mlp_matrices * shape.experts.width / axes["tensor"]
    layers = shape.depth / choice.stages if remat_names(choice.remat) is None else 1
    return layers * rows * width * facts.compute_bytes


def _collectives(facts: Facts, choice: Choice, steps: int, layout: Layout) -> list[Collective]:
    axes, width = choice.axes, facts.compute_bytes
    stacks = _stacks(facts) / axes["tensor"]
    dense = facts.parameters / axes["tensor"] - stacks
    weights = dense + stacks / axes["expert"]
    matrices = facts.muon_parameters / axes["tensor"]
    found: list[Collective] = []

    def add(kind: str, along: tuple[str, ...], count: int, payload: float) -> None:
        along = tuple(axis for axis in along if axes[axis] > 1)
        if along and payload:
            members = layout.members(along)
            found.append(Collective(kind, along, len(members), count, payload, layout.nodes(members)))

    if choice.stages > 1:
        _stage_collectives(facts, choice, steps, add)
    else:
        add("all-gather", ("fsdp",), 2 * steps, 2 * steps * weights * width)
        add("reduce-scatter", ("fsdp",), steps, steps * weights * 4)
        add("all-reduce", ("data", "expert", "context"), steps, steps * dense / axes["fsdp"] * 4)
        add("all-reduce", ("data", "context"), steps, steps * stacks / axes["expert"] / axes["fsdp"] * 4)
    split = axes["fsdp"] * axes["pipeline"]
    add("all-gather", ("data",), 1, matrices / split * width)
    add("all-to-all", ("pipeline", "fsdp"), 2, 2 * matrices / (split * axes["data"]) * width)
    _activation_collectives(facts, choice, steps, add)
    return found


def _stage_collectives(facts: Facts, choice: Choice, steps: int, add: Any) -> None:
    """Once per pass: layers to their stage and their gradients back, summed over replicas; tables gathered. Per tick:
    weights that fsdp splits, and what goes to the next stage and back, with the sequences that wait."""
    axes, width, shape = choice.axes, facts.compute_bytes, facts.shape
    layers = _layer_parameters(facts) / axes["tensor"]
    tables = facts.parameters / axes["tensor"] - layers
    stacks = _stacks(facts) / axes["tensor"] / choice.stages
    dense = layers / choice.stages - stacks
    own = dense + stacks / axes["expert"]
    turns = steps * choice.ticks
    add("all-to-all", ("pipeline",), 2 * steps, 2 * steps * own / axes["fsdp"] * 4)
    add("all-gather", ("fsdp",), 2 * turns, 2 * turns * own * width)
    add("reduce-scatter", ("fsdp",), turns, turns * own * 4)
    add("all-reduce", ("expert", "context"), turns, turns * dense / axes["fsdp"] * 4)
    add("all-reduce", ("context",), turns, turns * stacks / axes["expert"] / axes["fsdp"] * 4)
    add("all-reduce", ("data",), steps, steps * own / axes["fsdp"] * 4)
    add("all-gather", ("pipeline", "fsdp"), 2 * steps, 2 * steps * tables * width)
    add("reduce-scatter", ("pipeline", "fsdp"), steps, steps * tables * 4)
    add("all-reduce", ("data", "expert", "context"), steps, steps * tables / axes["fsdp"] / choice.stages * 4)
    if shape is not None:
        sent = 2 * turns * (_streams(facts) + 1)
        add("collective-permute", ("pipeline",), sent, sent * facts.block / axes["context"] * shape.width * width)


def _activation_collectives(facts: Facts, choice: Choice, steps: int, add: Any) -> None:
    """Experts: two exchanges of tokens per layer, and two for their gradients; tensor: two sums of the residual stream,
    and two. Those of the forward pass come again where blocks are recomputed, as in stages, which also send in idle
    ticks. Context: keys and values gathered, gradients scattered."""
    shape = facts.shape
    if shape is None:
        return
    staged = choice.stages > 1
    again = 2 * (staged + (remat_names(choice.remat) == ()))
    # of one sequence through the layers of a stage at every tick, or of all sequences through all layers
    turns, layers = (steps * choice.ticks, shape.depth / choice.stages) if staged else (steps, shape.depth)
    sequence = facts.block / choice.axes["context"] * facts.compute_bytes
    stream = (turns if staged else steps * choice.rows) * sequence * shape.width
    moves = (4 + again) * layers
    if shape.experts is not None:
        add("all-to-all", ("expert",), round(moves * turns), moves * stream * shape.experts.active)
    add("all-reduce", ("tensor",), round(moves * turns), moves * stream)
    # of embeddings, and of the gradient at the head
    add("all-reduce", ("tensor",), 2 * steps, 2 * steps * choice.rows * sequence * shape.width)
    keys = 2 * steps * choice.rows * facts.block * facts.compute_bytes * shape.kv_width / choice.axes["tensor"]
    add("all-gather", ("context",), 4 * shape.depth * steps, 2 * keys * shape.depth)
    add("reduce-scatter", ("context",), 2 * shape.depth * steps, keys * shape.depth)


# --- time and cost: three rooflines of one step ---
#
#     compute = FLOPs / peak    memory = bytes / bandwidth    network = Σ collectives at full link speed
#     at best = the largest of them;   likely = max(compute / .72 + memory / .9, network)
#
# A large bf16 product reached 655–767 of an H200's 989 TFLOP/s, copies 4.3 of its 4.8 TB/s (benchmarks/LOG.md), hence
# .72 and .9. Latency, validation, checkpoints and lost hosts are not counted.
MATRIX_SHARE = 0.72
BANDWIDTH_SHARE = 0.9
DAY = 86_400


def step_time(target: Target, terms: Terms, made: Estimate, found: Sequence[Collective]) -> dict[str, Any]:
    """Return the seconds of one step by each roofline, which of them binds, and the likely time."""
    chip, working = target.chip, 1 - made.choice.bubble
    compute = (made.flops - made.float8_flops) / chip.bf16_flops + made.float8_flops / chip.peak_flops("fp8")
    seconds = {
        "compute": compute / working,
        "memory": made.traffic / chip.hbm_bytes_s / working,
        "network": sum(one.seconds(chip.link_bytes_s, terms.outside_gb_s * 1e9) for one in found),
    }
    busy = seconds["compute"] / MATRIX_SHARE + seconds["memory"] / BANDWIDTH_SHARE
    return {
        **seconds,
        "best": max(seconds.values()),
        "bound_by": max(seconds, key=lambda name: seconds[name]),
        "likely": max(busy, seconds["network"]),
    }


def run_time(
    step: dict[str, Any], steps: int, tokens: int, flops_per_token: float, target: Target, precision: str
) -> dict[str, Any]:
    """Return the time of the run at the likely step time; MFU is by the causal FLOPs."""
    seconds = step["likely"] * steps
    speed = tokens / seconds
    return {
        "step_seconds": step["likely"],
        "step_seconds_at_best": step["best"],
        "roofline": {name: step[name] for name in ("compute", "memory", "network")},
        "bound_by": step["bound_by"],
        "seconds": seconds,
        "days": seconds / DAY,
        "tokens_per_s": speed,
        "mfu_causal": speed * flops_per_token / (target.chip.peak_flops(precision) * target.devices),
    }


def run_cost(seconds: float, target: Target, terms: Terms) -> dict[str, Any]:
    price = terms.dollars_hour
    return {
        "dollars_per_chip_hour": price,
        "chip_hours": seconds / 3600 * target.chips,
        "dollars": None if price is None else seconds / 3600 * target.chips * price,
        "source": terms.source,
    }
