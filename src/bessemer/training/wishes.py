"""What an objective asks of the rest of a run: rows of a style, documents that do not see each other.

They are traits of its registration (`style`, `document_mask`). A style given for a dataset and a value given for the
setting win; what is filled in here is said with its reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bessemer.data import DatasetStyle, Sampling, check_mixture, shares_of
from bessemer.errors import InputError
from bessemer.registry import objectives

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

MASK = "architecture/document_mask"
DATASET = "training/dataset"


def usual_style(objective: str) -> DatasetStyle:
    """Return the style of rows of data that is named without one."""
    return objectives.entry(objective).traits.get("style", DatasetStyle.PMD)


def styled(datasets: list[list[Sampling]], style: DatasetStyle) -> list[list[Sampling]]:
    """Return the datasets with `style` for those that are named without one."""
    return [
        [dataclasses.replace(sampling, style=sampling.style or style) for sampling in mixture]
        for mixture in datasets
    ]


def grant_wishes(trainer: BaseTrainer) -> None:
    """Before the model is made."""
    entry, config = objectives.entry(trainer.settings.objective), trainer.config
    style = usual_style(trainer.settings.objective)
    for mixture in trainer.settings.datasets:
        check_mixture(mixture)
        note_shares(trainer, mixture)
    if any(sampling.style is None for mixture in trainer.settings.datasets for sampling in mixture):
        trainer.settings.datasets = styled(trainer.settings.datasets, style)
        # The origin stays the user's: who reads the configuration again must find the data as it was trained on.
        config.values[DATASET] = trainer.settings.datasets
        if style is not DatasetStyle.PMD:
            why = f"objective {entry.name}: windows of PMD would cut examples apart"
            trainer.note_derived("training.dataset style", style.name, why)
    if entry.traits.get("document_mask") and MASK in config and not config.is_set(MASK):
        config.set(MASK, True, f"objective {entry.name}")
        why = f"objective {entry.name}: examples of one row do not see each other"
        trainer.note_derived("architecture.document_mask", True, why)
    if style is DatasetStyle.CONTRASTIVE and MASK in config and not config[MASK]:
        raise InputError(
            "architecture.document_mask=false would let the answers of a row see each other, and objective "
            f"{entry.name} compares them: leave the setting out."
        )


def note_shares(trainer: BaseTrainer, mixture: Sequence[Sampling]) -> None:
    """Print what rates that do not sum to 1 come to."""
    shares = shares_of(mixture)
    if shares == [sampling.rate for sampling in mixture] or len(mixture) == 1:
        return
    named = zip(mixture, shares, strict=True)
    value = ", ".join(f"{share:.1%} {sampling.name}" for sampling, share in named)
    rates = " : ".join(f"{sampling.rate:g}" for sampling in mixture)
    trainer.note_derived("training.dataset shares", value, f"rates {rates}")
