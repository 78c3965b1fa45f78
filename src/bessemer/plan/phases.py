"""Plans of a job of phases: one per phase, each with the model that it will start from."""

from __future__ import annotations

from typing import Any, NamedTuple

from bessemer.config import Config, dotted, resolve
from bessemer.config.recipes import nest
from bessemer.generate.load import FAMILY, flat
from bessemer.training.launch import Overrides
from bessemer.training.phases import PASSED, PhasesConfig
from bessemer.training.setup.initial_weights import INIT, inherited
from bessemer.training.setup.schema import schema_of

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
