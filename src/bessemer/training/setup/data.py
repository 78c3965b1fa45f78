"""The data of a run: tokenizer, the pure `batch(step)`, the held-out rows, and how many steps it makes."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.config import configure, dotted
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
from bessemer.training.feed import device_batch
from bessemer.training.persistence.reference import attach_logps
from bessemer.training.persistence.teacher import with_targets
from bessemer.training.setup.horizon import asked, check_sizes, plan_horizon
from bessemer.training.setup.model import allocate
from bessemer.training.setup.schema import usual_style
from bessemer.training.validation import ValidationSet

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


PREPARING = ("data/val_fraction", "data/text_key", "data/on_error", "data/dedup", "data/workers")
"""Settings that are used while a store is made, and by nobody once it is there."""


VALIDATION = ("validation", "val", "eval")
"""Names of the held-out slice in `BaseTrainer.batch`."""


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


def choose_tokenizer(trainer: BaseTrainer) -> Tokenizer | None:
    """Given, or named by data/tokenizer: a directory, a file, or `train:VOCAB` on the training sources."""
    for mixture in trainer.settings.datasets:
        check_mixture(mixture)  # before minutes of preparation, not after
    check_sizes(trainer)
    if trainer.given.tokenizer is not None:
        return trainer.given.tokenizer
    settings = configure(DataSettings)
    if not trainer.settings.datasets and trainer.given.dataset_train is None:
        raise InputError(
            "there is nothing to train on: set training.dataset to a text file, a glob, a prepared directory or a "
            "registered name such as python-stdlib."
        )
    if trainer.given.dataset_train is not None and settings.tokenizer == "auto":
        return None
    if settings.tokenizer.startswith("train:"):
        trainer.say(f"tokenizer  {settings.tokenizer} (trained once on the data, then kept)")
    if trainer.given.dataset_train is not None:
        return tokenizer_on(trainer.given.dataset_train, settings)
    return tokenizer_for(
        settings, [sampling for mixture in trainer.settings.datasets for sampling in mixture]
    )


def build_data(trainer: BaseTrainer) -> DataParts:
    settings = configure(DataSettings)
    stages = train_rows(trainer, settings)
    allocate(trainer, stages[0])
    epoch_rows = sum(len(rows) for _, rows in stages[0])
    batch_size, steps = plan_horizon(trainer, epoch_rows)
    starts = stage_boundaries(trainer, len(stages), batch_size * trainer.settings.block_size, steps)
    held_out = validation_mixture(trainer, settings) if trainer.settings.validate else ()
    plan = DataPlan(
        stages,
        batch_size,
        trainer.settings.seed,
        boundaries=starts[1:],
        steps=steps,
        crossfade=settings.crossfade,
        crossfade_share=settings.crossfade_share,
        validation=held_out,
        validation_count=trainer.settings.validation_steps,
    )
    validation = None if plan.validation is None else ValidationSet(plan.validation, trainer.tokenizer)
    return DataParts(plan, validation, batch_size, steps, starts, settings.prefetch, plan.fields)


def with_fields(trainer: BaseTrainer, data: DataParts) -> DataParts:
    """`data` with the fields of a row as `trainer.batch` returns them.

    A trainer that samples what it trains on, or plans without data, has no row to look at and knows its fields.
    """
    if trainer.rolls_out or data.plan is None:
        return data
    trainer.data = data
    return replace(data, fields=fields_of(trainer.batch("train", step=0, rows=slice(0, 1))))


def host_batch(trainer: BaseTrainer, part: str, step: int | None, rows: slice | None) -> Mapping[str, Any]:
    """See BaseTrainer.batch."""
    if part == "train":
        return trainer.data.plan.batch(trainer.step + trainer.data_offset if step is None else step, rows)
    if part not in VALIDATION:
        raise InputError(f"batch('{part}'): there is no such slice; write 'train' or 'validation'.")
    if trainer.data.validation is None:
        raise InputError(
            "this run has no validation rows: give it held-out data (data.val_fraction, dataset_eval=…), and "
            "leave training.validation=true."
        )
    return trainer.data.validation.read(step or 0, trainer.functions.validation_rows, rows)


def check_batch_method(method: Callable[..., Any]) -> None:
    """TypeError for an override of BaseTrainer.batch that cannot be told which batch the run needs."""
    try:
        inspect.signature(method).bind(None, "train", step=0, rows=None)
    except TypeError as error:
        raise TypeError(
            f"{method.__qualname__} must accept the keywords step and rows, with which the run asks for its batches: "
            f"def batch(self, slice='train', *, step=None, rows=None) ({error})"
        ) from None


def train_rows(trainer: BaseTrainer, settings: DataSettings) -> list[list[tuple[Sampling, Any]]]:
    """Rows of every source of every stage; a source used twice is opened once. A single mixture is that of all."""
    count = stage_count(trainer)
    if trainer.given.dataset_train is not None:
        rows = with_targets(
            trainer.context, trainer.teacher, given_rows(trainer, trainer.given.dataset_train)
        )
        return [[(Sampling("given"), rows)]] * count
    opened: dict[Any, Any] = {}
    for sampling in (sampling for mixture in trainer.settings.datasets for sampling in mixture):
        if sampling.identity not in opened:
            opened[sampling.identity] = with_targets(
                trainer.context, trainer.teacher, open_rows(trainer, settings, sampling, "train")
            )
    say_unused(trainer)
    stages = [
        [(sampling, opened[sampling.identity]) for sampling in mixture]
        for mixture in trainer.settings.datasets
    ]
    return stages * count if len(stages) == 1 else stages


def say_unused(trainer: BaseTrainer) -> None:
    """Name what the caller asked of data that was prepared before; then it was decided."""
    samplings = [sampling for mixture in trainer.settings.datasets for sampling in mixture]
    names = [dotted(key) for key in asked(trainer.config, PREPARING)]
    if names and all(store_directory(sampling) is not None for sampling in samplings):
        trainer.say(f"note: {', '.join(names)} has no effect: the data is prepared already")


def open_rows(trainer: BaseTrainer, settings: DataSettings, sampling: Sampling, split: str) -> Any:
    """Rows of a named dataset; prepared first, with progress, when it is not a store yet."""
    assert trainer.tokenizer is not None
    with trainer.output.preparing(sampling.name) as progress:
        rows = open_dataset(
            sampling,
            trainer.tokenizer,
            split=split,
            block_size=trainer.settings.block_size,
            settings=settings,
            progress=progress,
        )
    return attach_logps(trainer.settings.objective, rows)


def given_rows(trainer: BaseTrainer, source: Any) -> Any:
    """Rows of what the caller brings: through his collator, or encoded as one stream."""
    collect = trainer.data_collator
    if not isinstance(collect, CollectFunction):
        return CollatedRows(source, collect, trainer.settings.block_size)
    style = (
        trainer.settings.datasets[0][0].row_style
        if trainer.settings.datasets
        else usual_style(trainer.settings.objective)
    )
    return attach_logps(trainer.settings.objective, collect.rows(source, style, configure(DataSettings)))


def stage_count(trainer: BaseTrainer) -> int:
    """As many as there are mixtures, or numbers of tokens for a single mixture."""
    mixtures, tokens = trainer.settings.datasets, trainer.settings.total_tokens or []
    return len(mixtures) if len(mixtures) > 1 else max(1, len(tokens))


def stage_boundaries(trainer: BaseTrainer, stages: int, batch_tokens: int, steps: int) -> list[int]:
    """First step of each stage. Several stages need one horizon each; a horizon of another kind (training.steps=…) is
    divided as training.tokens are."""
    tokens = trainer.settings.total_tokens or []
    if stages == 1:
        return [0]
    if len(tokens) != stages:
        raise InputError(
            f"training.dataset has {stages} stages but training.tokens has {len(tokens)} entries; give one number of "
            "tokens a stage, such as training.tokens=[1e9,1e8]."
        )
    if steps == sum(tokens) // batch_tokens:
        return stage_starts(tokens, batch_tokens)
    starts = [steps * sum(tokens[:number]) // sum(tokens) for number in range(stages)]
    if len({*starts, steps}) <= stages:
        raise InputError(
            f"{steps} steps are too few for {stages} stages in the proportions of training.tokens={tokens}: every "
            "stage needs at least one."
        )
    trainer.note_derived(
        "stages", starts, f"{steps} steps in the proportions of training.tokens; first steps"
    )
    return starts


def validation_mixture(trainer: BaseTrainer, settings: DataSettings) -> list[tuple[Sampling, Any]]:
    """Held-out rows of the last stage's sources, or what was given; empty when nothing is held out."""
    if trainer.given.dataset_train is not None:
        held_out = trainer.given.dataset_eval
        return [] if held_out is None else [(Sampling("given"), given_rows(trainer, held_out))]
    return [
        (sampling, open_rows(trainer, settings, sampling, "val"))
        for sampling in trainer.settings.datasets[-1]
    ]


def make_device_batch(trainer: BaseTrainer, data_step: int) -> dict[str, Any]:
    """Batch `data_step` on the devices, (S, B, T); this process reads only its own rows."""
    data, functions = trainer.data, trainer.functions
    return device_batch(
        lambda first, end: trainer.batch("train", step=data_step, rows=slice(first, end)),
        data.fields,
        functions.micro,
        functions.accumulate_steps,
        trainer.topology.batch_sharding(1),
    )


# Examples that the caller brings: into rows by our own collate, or by a function of the caller's.


FINGERPRINTED = 10_000
"""Examples that name a data set whose content only the caller's collator understands."""

REQUIRED = ("input_ids", "target_ids", "loss_mask")


@dataclass(frozen=True)
class CollectFunction:
    """Examples (texts, {"text"}, {"input_ids", "loss_mask"}) -> one padded row each, too long ones truncated.

    `rows` makes rows of a whole data set, in any style: encoded once, with counts of what was left out.
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
    """Any random-access source through the caller's collator; row i is example i."""

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
            name: np.asarray(value)
            for name, value in self.collator([self.source[int(i)] for i in indices]).items()
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
