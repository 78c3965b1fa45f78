"""Settings that the caller gave and that do nothing as the others are: said at the start, since nothing is ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bessemer.config import dotted
from bessemer.config.values import plain
from bessemer.training.horizon import asked

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

NEEDS = {
    "lora/": "lora/rank",
    "architecture/lookup/": "architecture/lookup/after_layers",
    "guard/spike_": "guard/spike_sigma",
    "guard/max_rollbacks": "guard/spike_sigma",
    "eval/core_bundle": "eval/core_interval",
}
"""What settings that begin so rest on: another one that is not 0 or empty."""

OF_STAGES = ("data/crossfade", "optimization/stage_reset")


def idle(trainer: BaseTrainer) -> Iterator[str]:
    config = trainer.config
    given = [
        key for key in asked(config, config.values) if plain(config[key]) != plain(config.schema[key].default)
    ]
    for key in given:
        for beginning, needed in NEEDS.items():
            if key.startswith(beginning) and not config[needed]:
                yield f"{dotted(key)} has no effect, as {dotted(needed)} is {config[needed]}"
        if key.startswith(OF_STAGES) and len(trainer.stages) < 2:
            yield f"{dotted(key)} has no effect, as the run has one stage"
