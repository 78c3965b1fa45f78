"""The analytic model: memory, collectives and roofline time of one step, for any mesh, micro-batch and remat.

    peak = max of  forward   state + G·[S > 1] + kept tensors + workspace
                   backward  state + G·(1 + [S > 1]) + workspace
                   update    state + G + the optimizer's own matrices

with G the gradients in float32 as they rest, S the micro-batches of a step; on an fsdp mesh the largest parameter is
there gathered as well, with its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.config.recipes import read_yaml
from bessemer.errors import InputError, nearest
from bessemer.models.layers import remat_names
from bessemer.plan.collectives import Collective, Layout, merged
from bessemer.plan.facts import Facts
from bessemer.plan.target import Target
from bessemer.storage.files import home
from bessemer.topology import CHIPS
from bessemer.training.setup.microbatch import SPARE, accumulation

# prices.yaml: what an hour of a chip costs, and how chips are joined beyond their own links. The user edits
# it.


SHIPPED = Path(__file__).with_name("prices.yaml")
KEYS = ("dollars_hour", "node", "outside_gb_s")


@dataclass(frozen=True)
class Terms:
    """One chip's line. `source` is the file that was read last for it."""

    dollars_hour: float | None
    node: int | None
    outside_gb_s: float
    source: str


def terms_of(chip: str, given: Path | None = None) -> Terms:
    """The shipped line of a chip, with the user's values (--prices, else BESSEMER_HOME/prices.yaml) in its place."""
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
            raise InputError(f"price table '{path}': unknown chip '{chip}'{_hint(chip)}.")
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


def _hint(chip: str) -> str:
    close = nearest(chip, list(CHIPS))
    return f"; did you mean '{close}'?" if close else ""


PASSES = 10.0
"""How often a kept tensor, or one of its kind that is not kept, travels between chip and memory in elementwise work.
Fitted to two measured steps on an H200 (docs/scale.md): depth 12 takes 421 ms and depth 20 1,436."""


@dataclass(frozen=True)
class Choice:
    """What a plan decides: mesh sizes by axis, sequences a device in one pass, what is recomputed."""

    axes: Mapping[str, int]
    rows: int
    remat: tuple[str, ...]

    @property
    def parallel(self) -> int:
        return self.axes["data"] * self.axes["fsdp"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; `peak` is what must fit."""

    parameters: float
    optimizer: float
    other: float
    gradients: float
    activations: float
    workspace: float
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
    memory = _memory(facts, choice, steps)
    found = merged(_collectives(facts, choice, steps, Layout(choice.axes, node_of(facts.target, terms))))
    work = step_flops(facts, choice)
    return Estimate(choice, steps, memory, tuple(found), *work, _traffic(facts, choice, steps))


def node_of(target: Any, terms: Terms) -> int:
    """Devices that the fast links join: a GPU's node, a TPU's slice."""
    return terms.node or target.devices // target.slices


def _memory(facts: Facts, choice: Choice, steps: int) -> Memory:
    axes, state, kept = choice.axes, facts.state(choice.axes), facts.kept(choice.remat)
    split = (axes["tensor"], axes["context"])
    held = state.parameters + state.optimizer + state.other
    recomputed = facts.one_layer(choice.remat) * choice.rows / axes["context"]
    activations = kept.activations(choice.rows, *split, axes["fsdp"]) + recomputed
    used = facts.compute_bytes / 4  # of a parameter's float32 bytes
    gathered = state.largest * (1 + 2 * used) if axes["fsdp"] > 1 else state.largest * used
    workspace = kept.workspace(choice.rows, *split) + gathered
    several = steps > 1
    forward = several * state.trained + activations + workspace
    backward = (1 + several) * state.trained + workspace
    update = state.trained + _update_bytes(facts, axes)
    above = max(forward, backward, update)
    gradients = {forward: several, backward: 1 + several, update: 1}[above] * state.trained
    return Memory(
        state.parameters, state.optimizer, state.other, gradients, activations, workspace, held + above
    )


def _update_bytes(facts: Facts, axes: Mapping[str, int]) -> float:
    """Muon: the update in float32 as it rests, and three stacks of a device's share in the compute dtype."""
    matrices = facts.muon_parameters / axes["tensor"]
    return matrices * (4 / axes["fsdp"] + 3 * facts.compute_bytes / (axes["fsdp"] * axes["data"]))


def step_flops(facts: Facts, choice: Choice) -> tuple[float, float]:
    """The model's formula with causal attention, a third more where blocks are recomputed, and the optimizer's.

    (all of one device, those of them in float8).
    """
    parts, axes = facts.step.plan.model, choice.axes
    devices = choice.parallel * axes["tensor"] * axes["context"]
    again = 4 / 3 if remat_names(choice.remat) == () else 1.0
    passes = facts.batch * facts.block * again / devices
    total = parts.flops_per_token_causal * passes + facts.update_flops / choice.parallel
    return total, facts.float8_flops * passes


def _traffic(facts: Facts, choice: Choice, steps: int) -> float:
    """Elementwise work on what is kept; weights read twice a pass, gradients added up, the state read and written."""
    state, kept = facts.state(choice.axes), facts.kept(("none",))
    split = (choice.axes["tensor"], choice.axes["context"])
    between = PASSES * kept.activations(choice.rows, *split)
    weights = facts.parameters / choice.axes["tensor"] * (2 * (4 + facts.compute_bytes) + 4)
    update = 2 * (state.parameters + state.optimizer) + 3 * state.trained
    return steps * (between + weights + 2 * state.trained) + update


def _collectives(facts: Facts, choice: Choice, steps: int, layout: Layout) -> list[Collective]:
    axes, width = choice.axes, facts.compute_bytes
    weights = facts.parameters / axes["tensor"]
    matrices = facts.muon_parameters / axes["tensor"]
    found: list[Collective] = []

    def add(kind: str, along: tuple[str, ...], count: int, payload: float) -> None:
        along = tuple(axis for axis in along if axes[axis] > 1)
        if along and payload:
            members = layout.members(along)
            found.append(Collective(kind, along, len(members), count, payload, layout.nodes(members)))

    add("all-gather", ("fsdp",), 2 * steps, 2 * steps * weights * width)
    add("reduce-scatter", ("fsdp",), steps, steps * weights * 4)
    add("all-reduce", ("data", "context"), steps, steps * weights / axes["fsdp"] * 4)
    add("all-gather", ("data",), 1, matrices / axes["fsdp"] * width)
    add("all-to-all", ("fsdp",), 2, 2 * matrices / (axes["fsdp"] * axes["data"]) * width)
    _activation_collectives(facts, choice, steps, add)
    return found


def _activation_collectives(facts: Facts, choice: Choice, steps: int, add: Any) -> None:
    """Tensor: four sums of the residual stream a layer. Context: keys and values gathered, gradients scattered."""
    shape = facts.shape
    if shape is None:
        return
    tokens = steps * choice.rows * facts.block * facts.compute_bytes
    stream = tokens / choice.axes["context"] * shape.width
    add("all-reduce", ("tensor",), (4 * shape.depth + 2) * steps, (4 * shape.depth + 2) * stream)
    keys = 2 * tokens * shape.kv_width / choice.axes["tensor"] * shape.depth
    add("all-gather", ("context",), 4 * shape.depth * steps, 2 * keys)
    add("reduce-scatter", ("context",), 2 * shape.depth * steps, keys)


# From work to time and money: three rooflines of one step, days, dollars.
#
#     compute = FLOPs / peak    memory = bytes / bandwidth    network = Σ collectives at full link speed
#     at best = the largest of them;   likely = max(compute / .72 + memory / .9, network)
#
# A large bf16 product reached 655–767 of an H200's 989 TFLOP/s, copies 4.3 of its 4.8 TB/s
# (benchmarks/LOG.md): that is where .72 and .9 are from. Latency, validation, checkpoints and lost hosts are
# not counted.


MATRIX_SHARE = 0.72
BANDWIDTH_SHARE = 0.9
DAY = 86_400


def step_time(target: Target, terms: Terms, made: Estimate, found: Sequence[Collective]) -> dict[str, Any]:
    """Seconds of one step by each roofline, which of them binds, and the likely time."""
    chip = target.chip
    seconds = {
        "compute": (made.flops - made.float8_flops) / chip.bf16_flops
        + made.float8_flops / chip.peak_flops("fp8"),
        "memory": made.traffic / chip.hbm_bytes_s,
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
    """The whole run at the likely step time; MFU by the causal FLOPs."""
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
