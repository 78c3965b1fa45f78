"""The trainer of a recipe without its data, on hardware that need not be here either.

A plan has everything that `bessemer train` would derive, and nothing is prepared. It needs the vocabulary's size and,
for a horizon in epochs, the length of the data. They are read if the data is prepared, and otherwise assumed, with a
note. A job of phases has a plan per phase, each with the model that it will start from.

Hardware that is not here is named as in `v5e:4x4`, `2xv6e:16x16` or `h200:8`: its mesh and the functions of a step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from bessemer.config import Config, configuration, dotted, resolve
from bessemer.config.recipes import Layer, nest
from bessemer.data import BatchPlan, DatasetStyle, DataSettings, Sampling, Tokenizer, find_source, open_dataset
from bessemer.data.rows.build import pair_fields
from bessemer.data.rows.rows import TEXT_TYPES, Fields, is_store
from bessemer.data.sources.hub import must_download
from bessemer.data.stores.catalog import store_directory, store_place, tokenizer_place, vocabulary_of
from bessemer.data.tokenize.tokenizer import FILE
from bessemer.errors import InputError
from bessemer.generate.load import FAMILY, flat
from bessemer.job import ExecutionSpec
from bessemer.models.allocation import Allocation, compute_lzw_allocation
from bessemer.models.lookup import has_lookup
from bessemer.registry import jobs
from bessemer.topology import AXES, CHIPS, Chip, Topology, TopologySettings, chip_of, make_topology, planned_for
from bessemer.topology.mesh import fill_sizes
from bessemer.training.launch import Overrides
from bessemer.training.persistence.reference import logps_fields, wants_logps
from bessemer.training.persistence.teacher import target_fields
from bessemer.training.phases import PASSED, PhasesConfig
from bessemer.training.settings import BaseTrainerConfig, RunContext
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import (
    Functions,
    RunPlan,
    StepHooks,
    abstract_state,
    build_functions,
    check_mesh,
    make_optimizer,
    record_micro_batch,
)
from bessemer.training.setup.data import DataParts, stage_boundaries, stage_count
from bessemer.training.setup.horizon import plan_horizon, target_of
from bessemer.training.setup.init_recipe import planned_from
from bessemer.training.setup.initial_weights import INIT, has_weights, inherit_settings, inherited
from bessemer.training.setup.microbatch import KEY as MICRO
from bessemer.training.setup.model import ModelParts, build_model, with_allocation
from bessemer.training.setup.schema import apply_objective_defaults, schema_of, usual_style
from bessemer.training.trainer import BaseTrainer

# --- hardware that is not here ---


NAME = re.compile(r"(?:(?P<slices>\d+)x(?=[a-z]))?(?P<chip>[a-z][a-z0-9 _-]*?):(?P<grid>\d+(?:x\d+)*)")
FLAT = ("TPU v5e", "TPU v6e")  # a torus of two dimensions; the other TPUs have three
TWO_DEVICES = ("TPU v7x",)  # JAX shows two devices a chip
LARGEST = {"TPU v4": 4096, "TPU v5e": 256, "TPU v5p": 8960, "TPU v6e": 256, "TPU v7x": 9216}  # chips per slice


@dataclass(frozen=True)
class Target:
    """Chips of one kind: `slices` times a `grid` of them. A GPU's grid is a plain count."""

    name: str
    chip: Chip
    slices: int
    grid: tuple[int, ...]

    @property
    def platform(self) -> str:
        return "tpu" if self.chip.name.startswith("TPU") else "gpu"

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.grid)

    @property
    def devices(self) -> int:
        """Return the number of JAX devices of all slices."""
        return self.chips * (2 if self.chip.name in TWO_DEVICES else 1)

    @property
    def compiler_name(self) -> str:
        """Return libtpu's name of one slice."""
        kind = self.chip.name.removeprefix("TPU ")
        return f"{'tpu7x' if kind == 'v7x' else kind}:{'x'.join(map(str, self.grid))}"


def parse_target(name: str) -> Target:
    """Return the hardware that `name` stands for, or raise an InputError that explains the names."""
    found = NAME.fullmatch(name.strip().lower())
    if found is None:
        raise InputError(f"--topology '{name}' is not understood. {_forms()}")
    chip = chip_of(found["chip"]) or chip_of(f"tpu {found['chip']}")
    if chip is None:
        raise InputError(f"--topology '{name}': the chip '{found['chip']}' is not in the table. {_forms()}")
    slices, grid = int(found["slices"] or 1), tuple(int(size) for size in found["grid"].split("x"))
    target = Target(name, chip, slices, grid)
    if target.chips < 1:
        raise InputError(f"--topology '{name}' has no chips.")
    return _torus(target) if target.platform == "tpu" else _count(target)


def _torus(target: Target) -> Target:
    dimensions = 2 if target.chip.name in FLAT else 3
    chips, most = math.prod(target.grid), LARGEST[target.chip.name]
    if chips > most:
        raise InputError(
            f"--topology '{target.name}': a slice of {target.chip.name} has at most {most} chips, not {chips}. Name "
            f"several slices, for example {-(-chips // most)}x{_short(target)}:{most}."
        )
    if len(target.grid) == 1:
        return replace(target, grid=balanced(chips, dimensions))
    if len(target.grid) != dimensions:
        shape = "x".join(map(str, balanced(chips, dimensions)))
        raise InputError(
            f"--topology '{target.name}': {target.chip.name} has a torus of {dimensions} dimensions, for example "
            f"{_short(target)}:{shape}."
        )
    return target


def _count(target: Target) -> Target:
    if len(target.grid) > 1 or target.slices > 1:
        raise InputError(
            f"--topology '{target.name}': GPUs are counted, for example {_short(target)}:{target.chips}; how many "
            "share a node is in prices.yaml."
        )
    return target


def _short(target: Target) -> str:
    return target.chip.name.removeprefix("TPU ").lower().replace(" ", "-")


def balanced(count: int, dimensions: int) -> tuple[int, ...]:
    """Return the most cubic torus of `count` chips, smallest side first: 16 → (4, 4), 32 → (2, 4, 4)."""
    if dimensions == 1:
        return (count,)
    sides = [side for side in range(1, count + 1) if count % side == 0 and side**dimensions <= count]
    rest = balanced(count // sides[-1], dimensions - 1)
    return (sides[-1], *rest)


def _forms() -> str:
    known = ", ".join(chip.lower().removeprefix("tpu ").replace(" ", "-") for chip in CHIPS)
    return (
        "A name is CHIP:COUNT or, for a TPU, CHIP:AxB or CHIP:AxBxC with the number of slices in front: h200:8, "
        f"v5e:4x4, v5p:2x2x4, 2xv6e:16x16. Chips: {known}."
    )


# --- its mesh and functions ---
@dataclass(frozen=True)
class AbsentTopology(Topology):
    """The mesh of a target. It has shardings and shapes; programs are traced for its platform."""

    target: Target = field(kw_only=True)

    @property
    def platform(self) -> str:
        return self.target.platform

    @property
    def device_kind(self) -> str:
        return self.target.chip.name

    @property
    def float8(self) -> bool:
        return self.target.chip.fp8_flops is not None

    @property
    def device_count(self) -> int:
        return math.prod(self.mesh.shape.values())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Set no mesh, so that the program of one device is traced. compiled.py compiles the whole."""
        with planned_for(self.platform), nn.logical_axis_rules(list(self.compute_rules)):
            yield

    def describe(self) -> dict[str, Any]:
        return {
            "axes": {axis: int(size) for axis, size in self.mesh.shape.items()},
            "platform": self.platform,
            "device_kind": self.device_kind,
            "chip": self.target.chip.name,
            "chips": self.target.chips,
            "devices": self.device_count,
            "slices": self.target.slices,
            "grid": list(self.target.grid),
            "jax": jax.__version__,
        }


def absent_topology(settings: TopologySettings, target: Target) -> AbsentTopology:
    sizes = fill_sizes(settings, target.devices)
    mesh: Any = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return AbsentTopology(mesh, target.chip, settings, target=target)


def absent_functions(plan: RunPlan, hooks: StepHooks) -> Functions:
    """Return what `build_functions` does, without a device and without jitted steps."""
    topology, batch_size = plan.context.topology, plan.data.batch_size
    check_mesh(plan)
    optimizer = make_optimizer(plan, hooks)
    abstract, placed = abstract_state(plan, hooks, optimizer)
    per_device = fit_micro_batch(plan.context, batch_size)
    key = jax.eval_shape(lambda: jax.random.key(0))
    accumulate = microbatch.accumulation(batch_size, per_device, topology.data_parallel)
    micro = per_device * topology.data_parallel
    return Functions(optimizer, abstract, placed, key, None, None, accumulate, micro, 1)


def fit_micro_batch(context: RunContext[Any], batch: int) -> int:
    """Return the caller's micro-batch, or the recipe's lowered until it divides this mesh's share of the batch; -1 is
    the whole share, which the plan then lowers until it fits."""
    config, parallel = context.config, context.topology.data_parallel
    asked = int(config[MICRO])
    if asked != -1 and config.asked(MICRO):
        microbatch.accumulation(batch, asked, parallel)
        return asked
    if batch % parallel:
        raise InputError(
            f"a step of {batch:,} sequences cannot be shared by {parallel:,} data-parallel devices "
            "(topology.data × topology.pipeline × topology.fsdp × topology.expert): make training.batch_size a "
            f"multiple of {parallel:,}, or use fewer and put the rest on topology.tensor or topology.context."
        )
    size, why = batch // parallel, f"the largest that divides {batch // parallel} sequences per device"
    if asked != -1:
        size, why = microbatch.lowered(asked, batch, parallel)
    if size != asked:
        record_micro_batch(context, size, why)
    return size


# --- the trainer ---


VOCABULARY = 32_768  # assumed when neither the model nor a tokenizer says: the size the depth dial's reference has
OPEN = "???"


def planned_trainer(
    recipe: Any, overrides: Overrides = (), *, compiles: bool = True, target: Target | None = None
) -> WithoutData:
    """Resolve and build as `bessemer train` does, with assumptions in place of data. Nothing is written.

    target: the hardware, in place of the devices here; the functions then hold shapes and no jitted step.
    """

    def resolved(between: tuple[Layer, ...] = ()) -> Config:
        return resolve(schema_of, recipe, overrides, allow_open=True, between=between)

    config = resolved()
    if FAMILY not in config:
        raise InputError(f"'{recipe}' is a job of several runs: plan each of them (plan.phases.planned_phases).")
    config = close(inherit_settings(resolved, planned_from(resolved, config), "runs", needs_weights=False))
    settings = config.make(TopologySettings)
    topology = make_topology(settings) if target is None else absent_topology(settings, target)
    base: type[BaseTrainer] = jobs.get(config["job"])
    planned = type("Planned", (WithoutData, base), {"compiles": compiles})
    with configuration(config):
        return cast(WithoutData, planned(ExecutionSpec("plan", root=Path("runs"), topology=topology)))


def close(config: Config) -> Config:
    """Return the configuration without data and without CORE's tasks if the recipe leaves them open; raise InputError
    for other open settings."""
    if config.get("eval/core_bundle") == OPEN:
        config = config.replace({"eval/core_bundle": "", "eval/core_interval": 0}, "left open by the recipe")
    for key, value in config.values.items():
        if isinstance(value, str) and value == OPEN and key != "training/dataset":
            origin = config.provenance[key].detail
            raise InputError(f"{origin} leaves '{dotted(key)}' open: give {dotted(key)}=… .")
    if config["training/dataset"] != OPEN:
        return config
    return config.replace({"training/dataset": []}, "left open by the recipe")


@runtime_checkable
class MakesRows(Protocol):
    """A trainer that makes its own rows, as in RL, and knows their fields."""

    row_types: Mapping[str, Any]
    added_fields: Fields  # not one number per token


class WithoutData(BaseTrainer):
    """Mixin before a trainer's class: builds the same run without opening data that is not prepared."""

    compiles = True
    epochs: float | None = None
    requested_rows: int  # the micro-batch before it is derived; -1: open

    def __init__(self, spec: ExecutionSpec):
        self.lines: list[str] = []
        super().__init__(spec)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def check_initial_weights(self) -> None:
        """Compare weights with the configuration if there are any; shapes come from the configuration."""
        init = self.settings.init
        if init is None or has_weights(Path(init)):
            super().check_initial_weights()
        else:
            self.say(f"{init} holds no weights, only their configuration: enough for a plan, not for a run.")

    def configure_model(self) -> ModelParts:
        own = super().configure_model
        if own.__func__ is not BaseTrainer.configure_model:  # type: ignore[attr-defined]
            return own()  # a trainer that makes its own model knows best
        tokenizer = planned_tokenizer(self.context)
        self.context = apply_objective_defaults(self.context)
        self.settings = self.context.settings
        return build_model(self.context, self.model_class(), tokenizer)

    def configure_dataloaders(self) -> DataParts:
        self.model_parts = assume_allocation(self.context, self.model_parts)
        kinds = self.row_types if isinstance(self, MakesRows) else TEXT_TYPES
        fields = planned_fields(self.settings, kinds)
        fields |= self.added_fields if isinstance(self, MakesRows) else {}
        if wants_logps(self.config):
            fields |= logps_fields(self.settings.block_size)
        if self.teacher is not None and not self.teacher.live:
            fields |= target_fields(self.settings.block_size, self.teacher.top_k)
        data, self.epochs = planned_data(self.context, self.model_parts, fields)
        return data

    def configure_functions(self) -> Functions:
        self.requested_rows = self.config[microbatch.KEY]
        if isinstance(self.topology, AbsentTopology):
            return absent_functions(self.plan, self.hooks)
        if not self.compiles:
            assume_micro_batch(self.context, self.data.batch_size)
        return build_functions(self.plan, self.hooks)


def planned_tokenizer(context: RunContext[Any]) -> Tokenizer | None:
    """Return the tokenizer, where it exists; else assume the vocabulary's size and record that."""
    config, settings = context.config, context.config.make(DataSettings)
    samplings = [sampling for mixture in context.settings.datasets for sampling in mixture]
    trains, named = settings.tokenizer.startswith("train:"), settings.tokenizer != "auto"
    sized = config.get("model/vocab_size", -1) > 0 and not any(store_directory(s) for s in samplings)
    if not named and sized:  # a config.json without a tokenizer beside it; the size is all that a plan needs
        return None
    elsewhere = trains and any(must_download(sampling.name) for sampling in samplings)  # a plan fetches nothing
    if (samplings or (named and not trains)) and not elsewhere:
        place = tokenizer_place(settings, samplings)
        if not trains or (place / FILE).is_file():
            return Tokenizer.load(place)
    if "model/vocab_size" in config and config["model/vocab_size"] < 1:
        size, why = VOCABULARY, "assumed: neither model.vocab_size nor a tokenizer is given"
        if trains:
            size = vocabulary_of(settings.tokenizer)
            why = f"assumed: data.tokenizer={settings.tokenizer}, not trained yet"
        config.set("model/vocab_size", size, why)
        context.notes.derive("model.vocab_size", size, why)
    return None


def planned_data(context: RunContext[Any], parts: ModelParts, fields: Fields) -> tuple[DataParts, float | None]:
    """Return batch and horizon with an empty `plan`, as no batch will be read, and the epochs if known."""
    settings = context.config.make(DataSettings)
    rows = epoch_rows(context.settings, parts.tokenizer, settings)
    if rows is None and target_of(context.config).given == "epochs":
        raise InputError(
            "training.epochs needs the length of the data, which is not prepared yet: prepare it with `bessemer data "
            "prepare`, or plan with training.tokens=N or training.steps=N."
        )
    batch_size, steps = plan_horizon(context, parts, rows or 0)
    stages = stage_count(context.settings)
    starts = stage_boundaries(context, stages, batch_size * context.settings.block_size, steps)
    epochs = steps * batch_size / rows if rows is not None and stages == 1 else None
    empty = cast(BatchPlan, None)
    return DataParts(empty, None, batch_size, steps, starts, settings.prefetch, fields), epochs


def planned_fields(settings: BaseTrainerConfig, kinds: Mapping[str, Any]) -> Fields:
    """Return the fields that the rows of the objective will have."""
    block = settings.block_size
    fields: Fields = {name: ((block,), np.dtype(kind)) for name, kind in kinds.items()}
    if usual_style(settings.objective) is DatasetStyle.CONTRASTIVE:
        fields |= pair_fields(block)
    return fields


def epoch_rows(settings: BaseTrainerConfig, tokenizer: Tokenizer | None, data: DataSettings) -> int | None:
    """Return the rows of the first stage, if all of its sources are prepared."""
    if not settings.datasets or tokenizer is None:
        return None
    total = 0
    for sampling in settings.datasets[0]:
        if not is_prepared(sampling, tokenizer, data):
            return None
        total += len(open_dataset(sampling, tokenizer, block_size=settings.block_size, settings=data))
    return total


def is_prepared(sampling: Sampling, tokenizer: Tokenizer, settings: DataSettings) -> bool:
    if store_directory(sampling) is not None:
        return True
    if must_download(sampling.name):
        return False
    return is_store(store_place(sampling, find_source(sampling.name), tokenizer, settings=settings))


def assume_micro_batch(context: RunContext[Any], batch_size: int) -> None:
    """Set an open micro-batch to what a CPU would take, since the largest would need the compiler."""
    if context.config[microbatch.KEY] != -1:
        return
    sizes = microbatch.candidates(batch_size, context.topology.data_parallel)
    size = microbatch.within_tokens(sizes, context.settings.block_size)
    why = f"assumed: at most {microbatch.CPU_TOKENS} tokens a pass, as nothing was compiled"
    record_micro_batch(context, size, why)


def assume_allocation(context: RunContext[Any], parts: ModelParts) -> ModelParts:
    """Give a model with lookup layers an even share of rows per token; sizes depend only on their number."""
    model: Any = parts.model
    if not has_lookup(model) or model.allocation is not None:
        return parts
    k = compute_lzw_allocation([], model.vocab_size, model.shape.lookup.rows, model.lookup_k_max)
    tokenizer = parts.tokenizer.hash if parts.tokenizer else None
    allocation = Allocation.of(k, np.ones(model.vocab_size, np.int64), tokenizer)
    origin = "an even share, assumed: training uses LZW over its tokens"
    return with_allocation(context, parts, allocation, origin)


# --- jobs of phases ---


TOKENIZER = "data/tokenizer"


class PlannedPhase(NamedTuple):
    """A phase as a recipe of its own. overrides: words that it gets from the job."""

    name: str
    recipe: dict[str, Any]
    overrides: list[str]


def planned_phases(recipe: Any, overrides: Overrides = ()) -> list[PlannedPhase]:
    """Return the phases of a job in order; none if the recipe is a run.

    A phase after the first has the model and the tokenizer of the one before, as its weights would bring them.
    """
    config = resolve(schema_of, recipe, overrides, allow_open=True)
    if FAMILY in config or config["job"] != "phases":
        return []
    settings = config.make(PhasesConfig)
    words = [f"{dotted(key)}={config[key]}" for key in config.given() if key.startswith(PASSED) and key != "plugins"]
    before: Config | None = None
    found = []
    for name, phase in settings.phases.items():
        if phase is None:
            continue
        own = flat(nest({key: value for key, value in phase.items() if key != "recipe"}, f"phases.{name}"))
        made = {"extends": phase["recipe"], **own}
        if before is not None:
            values = inherited(before.tree(), resolve(schema_of, made, allow_open=True))
            made = {"extends": phase["recipe"], **values, TOKENIZER: before[TOKENIZER], **own, INIT: None}
        before = resolve(schema_of, made, words, allow_open=True)
        found.append(PlannedPhase(name, made, words))
    return found
