"""The data of a run: tokenizer, the pure `batch(step)`, the held-out rows and the horizon."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bessemer.config import dotted
from bessemer.data import (
    Batch,
    BatchPlan,
    DataPlan,
    DatasetStyle,
    DataSettings,
    Rows,
    Sampling,
    Tokenizer,
    make_rows,
    open_dataset,
    rows_of,
    tokenizer_for,
    tokenizer_on,
)
from bessemer.data.plan.mixture import check_mixture
from bessemer.data.rows.rows import Fields, fields_of
from bessemer.data.stores.catalog import store_directory
from bessemer.errors import InputError
from bessemer.scaling import stage_starts
from bessemer.training.settings import BaseTrainerConfig, RunContext
from bessemer.training.setup.horizon import check_sizes, plan_horizon
from bessemer.training.setup.model import ModelParts
from bessemer.training.setup.schema import usual_style
from bessemer.training.validation import ValidationSet

Collator = Callable[[list[Any]], Mapping[str, Any]]
Stages = list[list[tuple[Sampling, Any]]]  # each stage's sources with their rows
# settings that only the preparation of a store reads
PREPARING = ("data/val_fraction", "data/text_key", "data/on_error", "data/dedup", "data/workers")
VALIDATION = ("validation", "val", "eval")  # names of the held-out slice in `BaseTrainer.batch`


@dataclass(frozen=True)
class DataParts:
    plan: BatchPlan
    validation: ValidationSet | None
    batch_size: int
    steps: int
    stage_starts: list[int]
    prefetch: int
    fields: dict[str, Any]
    held_out: int = 0  # examples that are judged in another way than by `validation`

    @property
    def validation_count(self) -> int:
        return self.held_out if self.validation is None else self.validation.count

    def starts_epoch(self, step: int) -> bool:
        return step == 0 or int(self.plan.epoch(step)) != int(self.plan.epoch(step - 1))


@dataclass(frozen=True)
class RowSource:
    """How a run opens rows.

    attach: adds the fields that the objective reads. distill: adds a stored teacher's columns to training rows.
    preparing: shows progress while a store is written.
    """

    context: RunContext[Any]
    tokenizer: Tokenizer | None
    collator: Collator
    preparing: Callable[[], AbstractContextManager[Any]]
    attach: Callable[[Any], Any]
    distill: Callable[[Any], Any]

    @property
    def settings(self) -> DataSettings:
        return self.context.config.make(DataSettings)

    def train(self) -> Stages:
        """Open every source of every stage, each once. A single mixture is that of all stages."""
        given, datasets = self.context.given, self.context.settings.datasets
        count = stage_count(self.context.settings)
        if given.dataset_train is not None:
            return [[(Sampling("given"), self.distill(self.from_caller(given.dataset_train)))]] * count
        opened: dict[Any, Any] = {}
        for sampling in (sampling for mixture in datasets for sampling in mixture):
            if sampling.identity not in opened:
                opened[sampling.identity] = self.distill(self.from_dataset(sampling, "train"))
        self.say_unused()
        stages = [[(sampling, opened[sampling.identity]) for sampling in mixture] for mixture in datasets]
        return stages * count if len(stages) == 1 else stages

    def held_out(self) -> list[tuple[Sampling, Any]]:
        """Open the held-out rows of the last stage's sources, or the caller's; empty when nothing is held out."""
        given, settings = self.context.given, self.context.settings
        if not settings.validate:
            return []
        if given.dataset_train is not None:
            rows = given.dataset_eval
            return [] if rows is None else [(Sampling("given"), self.from_caller(rows))]
        return [(sampling, self.from_dataset(sampling, "val")) for sampling in settings.datasets[-1]]

    def from_dataset(self, sampling: Sampling, split: str) -> Any:
        """Open a named dataset; prepare it first, with progress, if it is not a store yet."""
        assert self.tokenizer is not None
        with self.preparing() as progress:
            rows = open_dataset(
                sampling,
                self.tokenizer,
                split=split,
                block_size=self.context.settings.block_size,
                settings=self.settings,
                progress=progress,
            )
        return self.attach(rows)

    def from_caller(self, source: Any) -> Any:
        """Make rows of the caller's examples: with the caller's collator, or encoded as one stream."""
        settings = self.context.settings
        if not isinstance(self.collator, CollectFunction):
            return CollatedRows(source, self.collator, settings.block_size)
        datasets = settings.datasets
        style = datasets[0][0].row_style if datasets else usual_style(settings.objective)
        return self.attach(self.collator.rows(source, style, self.settings))

    def say_unused(self) -> None:
        """Name the settings that the caller set for data that was already prepared."""
        config, datasets = self.context.config, self.context.settings.datasets
        names = [dotted(key) for key in config.asked(*PREPARING)]
        samplings = [sampling for mixture in datasets for sampling in mixture]
        if names and all(store_directory(sampling) is not None for sampling in samplings):
            self.context.notes.say(f"note: {', '.join(names)} has no effect: the data is prepared already")


def choose_tokenizer(context: RunContext[Any]) -> Tokenizer | None:
    """Return the caller's tokenizer, or the one that data.tokenizer names or trains."""
    given, datasets = context.given, context.settings.datasets
    for mixture in datasets:
        check_mixture(mixture)  # before minutes of preparation, not after
    check_sizes(context)
    if given.tokenizer is not None:
        return given.tokenizer
    settings = context.config.make(DataSettings)
    if not datasets and given.dataset_train is None:
        raise InputError(
            "there is nothing to train on: set training.dataset to a text file, a glob, a prepared directory or a "
            "registered name such as python-stdlib."
        )
    if given.dataset_train is not None and settings.tokenizer == "auto":
        return None
    if settings.tokenizer.startswith("train:"):
        context.notes.say(f"tokenizer  {settings.tokenizer} (trained once on the data, then kept)")
    if given.dataset_train is not None:
        return tokenizer_on(given.dataset_train, settings)
    return tokenizer_for(settings, [sampling for mixture in datasets for sampling in mixture])


def build_data(context: RunContext[Any], parts: ModelParts, source: RowSource, stages: Stages) -> DataParts:
    """Plan the batches of the opened `stages`, the held-out rows and the horizon."""
    run, settings = context.settings, source.settings
    epoch_rows = sum(len(rows) for _, rows in stages[0])
    batch_size, steps = plan_horizon(context, parts, epoch_rows)
    starts = stage_boundaries(context, len(stages), batch_size * run.block_size, steps)
    plan = DataPlan(
        stages,
        batch_size,
        run.seed,
        boundaries=starts[1:],
        steps=steps,
        crossfade=settings.crossfade,
        crossfade_share=settings.crossfade_share,
        validation=source.held_out(),
        validation_count=run.validation_steps,
    )
    validation = None if plan.validation is None else ValidationSet(plan.validation, parts.tokenizer)
    return DataParts(plan, validation, batch_size, steps, starts, settings.prefetch, plan.fields)


def batch_fields(batch: Callable[..., Mapping[str, Any]], part: str = "train") -> Fields:
    """Return the fields of a row as `BaseTrainer.batch` returns them."""
    return fields_of(batch(part, step=0, rows=slice(0, 1)))


def validation_batch(data: DataParts, part: str, number: int, size: int, rows: slice | None) -> Mapping[str, Any]:
    """Return batch `number` of the held-out rows; `part` must name them. size: rows in one batch."""
    if part not in VALIDATION:
        raise InputError(f"batch('{part}'): there is no such slice; write 'train' or 'validation'.")
    if data.validation is None:
        raise InputError(
            "this run has no validation rows: give it held-out data (data.val_fraction, dataset_eval=…), and "
            "leave training.validation=true."
        )
    return data.validation.read(number, size, rows)


def check_batch_method(method: Callable[..., Any]) -> None:
    """Raise TypeError for an override of BaseTrainer.batch without the keywords step and rows."""
    try:
        inspect.signature(method).bind(None, "train", step=0, rows=None)
    except TypeError as error:
        raise TypeError(
            f"{method.__qualname__} must accept the keywords step and rows, with which the run asks for its batches: "
            f"def batch(self, slice='train', *, step=None, rows=None) ({error})"
        ) from None


def stage_count(settings: BaseTrainerConfig) -> int:
    """Return the number of mixtures, or for a single mixture the number of entries in training.tokens."""
    mixtures, tokens = settings.datasets, settings.total_tokens or []
    return len(mixtures) if len(mixtures) > 1 else max(1, len(tokens))


def stage_boundaries(context: RunContext[Any], stages: int, batch_tokens: int, steps: int) -> list[int]:
    """Return the first step of each stage. A horizon other than training.tokens is divided in its proportions."""
    tokens = context.settings.total_tokens or []
    if stages == 1:
        return [0]
    if len(tokens) != stages:
        raise InputError(
            f"training.dataset has {stages} stages but training.tokens has {len(tokens)} entries; give one number of "
            "tokens per stage, such as training.tokens=[1e9,1e8]."
        )
    if steps == sum(tokens) // batch_tokens:
        return stage_starts(tokens, batch_tokens)
    starts = [steps * sum(tokens[:number]) // sum(tokens) for number in range(stages)]
    if len({*starts, steps}) <= stages:
        raise InputError(
            f"{steps} steps are too few for {stages} stages in the proportions of training.tokens={tokens}: every "
            "stage needs at least one."
        )
    why = f"{steps} steps in the proportions of training.tokens; first steps"
    context.notes.derive("stages", starts, why)
    return starts


# --- examples that the caller passes from Python ---
FINGERPRINTED = 10_000  # examples that name a data set whose content only the caller's collator understands
REQUIRED = ("input_ids", "target_ids", "loss_mask")


@dataclass(frozen=True)
class CollectFunction:
    """Examples (texts, {"text"}, {"input_ids", "loss_mask"}) -> one padded row each, truncated if too long.

    `rows` encodes a whole dataset once, in any style, and counts what was skipped.
    """

    tokenizer: Tokenizer | None
    max_sequence_length: int
    truncation_mode: str = "keep_end"

    def __call__(self, examples: Any) -> Batch:
        rows = make_rows(
            examples,
            DatasetStyle.PADDED,
            self.max_sequence_length,
            tokenizer=self.tokenizer,
            truncation=self.truncation_mode,
        )
        return rows.get(np.arange(len(rows)))

    def rows(self, source: Any, style: DatasetStyle, settings: DataSettings) -> Rows:
        if self.tokenizer is None:
            raise InputError(
                "examples given from Python need a tokenizer (tokenizer=… or data.tokenizer) or a data_collator."
            )
        chosen = replace(settings, truncation=self.truncation_mode)
        return rows_of(source, self.tokenizer, style, self.max_sequence_length, settings=chosen)


class CollatedRows:
    """Rows of a random-access source, made by the caller's collator; row i is example i."""

    def __init__(self, source: Any, collator: Callable[[list[Any]], Mapping[str, Any]], block_size: int):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise InputError(
                f"a {type(source).__name__} has no length and no [i], so a run on it could not be resumed exactly; "
                "give a list, a dataset with random access, or write it to a store first."
            )
        self.source, self.collator, self.block_size = source, collator, block_size
        chosen = np.unique(np.linspace(0, len(source) - 1, min(len(source), FINGERPRINTED)).astype(int))
        digest = hashlib.sha256(f"{len(source)}".encode())
        for index in chosen:
            digest.update(repr(source[int(index)]).encode())
        self.fingerprint = digest.hexdigest()
        self.stats: dict[str, Any] = {"rows": len(source)}
        sample = self._collate(np.arange(1))
        self._check(sample)
        self.fields = fields_of(sample)

    def __len__(self) -> int:
        return len(self.source)

    def get(self, indices: np.ndarray) -> Batch:
        batch = self._collate(indices)
        if fields_of(batch) != self.fields or any(len(v) != len(indices) for v in batch.values()):
            raise InputError(
                f"the data_collator returned {_shapes(fields_of(batch))} for {len(indices)} examples, and "
                f"{_shapes(self.fields)} for the first one: it must return the same fields, shapes and types every "
                "time, one row per example."
            )
        return batch

    def _collate(self, indices: np.ndarray) -> Batch:
        return {
            name: np.asarray(value) for name, value in self.collator([self.source[int(i)] for i in indices]).items()
        }

    def _check(self, rows: Batch) -> None:
        missing = [name for name in REQUIRED if name not in rows]
        if missing:
            raise InputError(f"the data_collator returned {sorted(rows)}; {', '.join(missing)} is missing.")
        wrong = {name: array.shape for name, array in rows.items() if array.shape != (1, self.block_size)}
        if wrong:
            raise InputError(
                f"the data_collator must return arrays of (examples, {self.block_size}), the block size; got {wrong}."
            )


def _shapes(fields: Fields) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in fields.items())
