"""The trainer of a recipe without its data: everything `bessemer train` would derive, and nothing prepared.

A plan needs only two facts about the data, the vocabulary's size and (for a horizon in epochs) its length. Both are
read when the data is there already, and assumed, with a line that says so, when it is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from bessemer.config import Config, configuration, configure, dotted, resolve
from bessemer.config.recipes import Layer
from bessemer.data import (
    BatchPlan,
    DatasetStyle,
    DataSettings,
    Sampling,
    Tokenizer,
    find_source,
    open_dataset,
)
from bessemer.data.rows.preference import pair_fields
from bessemer.data.rows.rows import TEXT_TYPES, Fields
from bessemer.data.rows.store import is_store
from bessemer.data.stores.catalog import store_directory, store_place
from bessemer.data.stores.tokenizers import tokenizer_place, vocabulary_of
from bessemer.data.tokenize.tokenizer import FILE
from bessemer.errors import InputError
from bessemer.generate.load import FAMILY
from bessemer.job import ExecutionSpec
from bessemer.models.allocation import Allocation, compute_lzw_allocation
from bessemer.plan.absent import AbsentTopology, absent_functions, absent_topology
from bessemer.plan.target import Target
from bessemer.registry import jobs
from bessemer.topology import TopologySettings, make_topology
from bessemer.training.launch import Overrides
from bessemer.training.persistence.reference import logps_fields, wants_logps
from bessemer.training.persistence.teacher import target_fields
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import Functions, build_functions
from bessemer.training.setup.data import DataParts, stage_boundaries, stage_count
from bessemer.training.setup.horizon import plan_horizon, target_of
from bessemer.training.setup.init_recipe import planned_from
from bessemer.training.setup.initial_weights import begun_from
from bessemer.training.setup.model import ModelParts, build_model, fix_settings, note, with_model
from bessemer.training.setup.schema import schema_of, usual_style
from bessemer.training.trainer import BaseTrainer

VOCABULARY = 32_768
"""Assumed when neither the model nor a tokenizer says: the size the depth dial's reference has."""

OPEN = "???"


def planned_trainer(
    recipe: Any, overrides: Overrides = (), *, compiles: bool = True, target: Target | None = None
) -> BaseTrainer:
    """Resolve and build as `bessemer train` does, with assumptions in place of data. Nothing is written.

    `target`: for that hardware in place of the devices here; its functions then hold shapes, and no jitted step.
    """

    def resolved(between: tuple[Layer, ...] = ()) -> Config:
        return resolve(schema_of, recipe, overrides, allow_open=True, between=between)

    config = resolved()
    if FAMILY not in config:
        raise InputError(f"'{recipe}' is a job of phases: plan the recipes of its phases, one at a time.")
    config = begun_from(resolved, planned_from(resolved, config), "runs")
    close(config)
    with configuration(config):
        settings = configure(TopologySettings)
        topology = make_topology(settings) if target is None else absent_topology(settings, target)
        base: type[BaseTrainer] = jobs.get(config["job"])
        planned = type("Planned", (WithoutData, base), {"compiles": compiles})
        return cast(BaseTrainer, planned(ExecutionSpec("plan", root=Path("runs"), topology=topology)))


def close(config: Config) -> None:
    """A recipe may leave its dataset open; anything else that is open is refused as `train` would."""
    for key, value in config.values.items():
        if isinstance(value, str) and value == OPEN and key != "training/dataset":
            origin = config.provenance[key].detail
            raise InputError(f"{origin} leaves '{dotted(key)}' open: give {dotted(key)}=… .")
    if config["training/dataset"] == OPEN:
        config.set("training/dataset", [], "left open by the recipe")


class WithoutData(BaseTrainer):
    """Mixed in before a trainer's class: the same build, but no source is opened that is not prepared."""

    compiles = True
    epochs: float | None = None

    def __init__(self, spec: ExecutionSpec):
        self.said: list[str] = []
        super().__init__(spec)

    def say(self, text: str) -> None:
        self.said.append(text)

    def configure_model(self) -> ModelParts:
        own = super().configure_model
        if own.__func__ is not BaseTrainer.configure_model:  # type: ignore[attr-defined]
            return own()  # a trainer that makes its own model knows best
        return build_model(self, planned_tokenizer(self))

    def configure_dataloaders(self) -> DataParts:
        return planned_data(self)

    def configure_functions(self) -> Functions:
        if isinstance(self.topology, AbsentTopology):
            return absent_functions(self)
        if not self.compiles:
            assume_micro_batch(self)
        return build_functions(self)


def planned_tokenizer(trainer: BaseTrainer) -> Tokenizer | None:
    """The tokenizer, where it exists; else the vocabulary's size is assumed and noted."""
    settings = configure(DataSettings)
    samplings = [sampling for mixture in trainer.settings.datasets for sampling in mixture]
    trains, named = settings.tokenizer.startswith("train:"), settings.tokenizer != "auto"
    if samplings or (named and not trains):
        place = tokenizer_place(settings, samplings)
        if not trains or (place / FILE).is_file():
            return Tokenizer.load(place)
    if "model/vocab_size" in trainer.config and trainer.config["model/vocab_size"] < 1:
        size, why = VOCABULARY, "assumed: neither model.vocab_size nor a tokenizer is given"
        if trains:
            size = vocabulary_of(settings.tokenizer)
            why = f"assumed: data.tokenizer={settings.tokenizer}, not trained yet"
        trainer.config.set("model/vocab_size", size, why)
        trainer.note_derived("model.vocab_size", size, why)
    return None


def planned_data(trainer: WithoutData) -> DataParts:
    """Batch and horizon; `plan` is empty, as no batch will be asked for."""
    settings, block = configure(DataSettings), trainer.settings.block_size
    rows = epoch_rows(trainer, settings)
    if rows is None and target_of(trainer.config).given == "epochs":
        raise InputError(
            "training.epochs needs the length of the data, which is not prepared yet: prepare it with `bessemer data "
            "prepare`, or plan with training.tokens=N or training.steps=N."
        )
    assume_allocation(trainer)
    batch_size, steps = plan_horizon(trainer, rows or 0)
    stages = stage_count(trainer)
    starts = stage_boundaries(trainer, stages, batch_size * block, steps)
    if rows is not None and stages == 1:
        trainer.epochs = steps * batch_size / rows
    fields = planned_fields(trainer)
    return DataParts(cast(BatchPlan, None), None, batch_size, steps, starts, settings.prefetch, fields)


def planned_fields(trainer: BaseTrainer) -> Fields:
    """Return the fields that the rows of the objective will have."""
    block = trainer.settings.block_size
    kinds = getattr(trainer, "row_types", TEXT_TYPES)  # a trainer that makes its own rows says what they hold
    fields: Fields = {name: ((block,), np.dtype(kind)) for name, kind in kinds.items()}
    if usual_style(trainer.settings.objective) is DatasetStyle.CONTRASTIVE:
        fields |= pair_fields(block)
    if wants_logps(trainer.settings.objective):
        fields |= logps_fields(block)
    if trainer.teacher is not None and not trainer.teacher.live:
        fields |= target_fields(block, trainer.teacher.top_k)
    return fields


def epoch_rows(trainer: BaseTrainer, settings: DataSettings) -> int | None:
    """Rows of the first stage, if all of its sources are prepared."""
    if not trainer.settings.datasets or trainer.tokenizer is None:
        return None
    total = 0
    for sampling in trainer.settings.datasets[0]:
        if not is_prepared(sampling, trainer.tokenizer, settings):
            return None
        block = trainer.settings.block_size
        total += len(open_dataset(sampling, trainer.tokenizer, block_size=block, settings=settings))
    return total


def is_prepared(sampling: Sampling, tokenizer: Tokenizer, settings: DataSettings) -> bool:
    if store_directory(sampling) is not None:
        return True
    return is_store(store_place(sampling, find_source(sampling.name), tokenizer, settings=settings))


def assume_micro_batch(trainer: BaseTrainer) -> None:
    """Where finding the largest micro-batch would need the compiler, take what a CPU would take."""
    if trainer.config["training/per_device_batch_size"] != -1:
        return
    sizes = microbatch.candidates(trainer.data.batch_size, trainer.topology.data_parallel)
    block = trainer.settings.block_size
    size = next((n for n in sizes if n * block <= microbatch.CPU_TOKENS), sizes[-1])
    why = f"assumed: at most {microbatch.CPU_TOKENS} tokens a pass, as nothing was compiled"
    trainer.config.set("training/per_device_batch_size", size, why)
    trainer.note_derived("training.per_device_batch_size", size, why)


# Lookup rows before there is data: an even share for every token, noted as assumed.


def assume_allocation(trainer: BaseTrainer) -> None:
    """A training run shares rows out by its data; sizes and counts do not depend on how, only on how many."""
    model: Any = trainer.model
    if not getattr(model, "lookup_after_layers", ()) or model.allocation is not None:
        return
    shape = model.shape.lookup
    k = compute_lzw_allocation([], model.vocab_size, shape.rows, model.lookup_k_max)
    tokenizer = trainer.tokenizer.hash if trainer.tokenizer else None
    allocation = Allocation.of(k, np.ones(model.vocab_size, np.int64), tokenizer)
    fix_settings(trainer, model)
    trainer.model_parts = with_model(
        trainer, model.clone(allocation=allocation, lookup_rows=allocation.rows, lookup_d_up=shape.d_up)
    )
    note(trainer, allocation, "an even share, assumed: training uses LZW over its tokens")
