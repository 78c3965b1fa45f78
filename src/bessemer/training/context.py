"""What a run knows before anything is built. Setup functions take it in place of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from bessemer.config import Config
from bessemer.data import Tokenizer
from bessemer.job import RunDirectory
from bessemer.models.lora import LoraSettings
from bessemer.topology import Topology
from bessemer.training.settings import BaseTrainerConfig, GuardSettings, LoggingSettings

C = TypeVar("C", bound=BaseTrainerConfig)


class GivenParts(NamedTuple):
    """What the caller passes to a trainer instead of naming it in the configuration."""

    model: Any = None
    model_state: Any = None
    dataset_train: Any = None
    dataset_eval: Any = None
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None
    tokenizer: Tokenizer | None = None


@dataclass
class Notes:
    """How setup reports: `say` prints a line, `derive` records a derived number with its reason (derived.json).

    given: the names in `derived` that the caller set, which are not worth a line at the start.
    """

    say: Callable[[str], None]
    derived: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def derive(self, name: str, value: Any, reason: str, given: bool = False) -> None:
        self.derived[name] = {"value": value, "reason": reason}
        (self.given.add if given else self.given.discard)(name)


@dataclass(frozen=True)
class RunContext(Generic[C]):
    """The resolved settings, the mesh, the run directory and what the caller passed."""

    config: Config
    settings: C
    logging: LoggingSettings
    guard: GuardSettings
    lora: LoraSettings
    topology: Topology
    directory: RunDirectory
    given: GivenParts
    notes: Notes

    @property
    def has_recipe_data(self) -> bool:
        """Whether it trains on data that a recipe names, as opposed to the caller's."""
        return self.given.dataset_train is None and self.config.provenance["training/dataset"].is_recipe
