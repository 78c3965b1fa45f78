"""What a trainer is made of and says about itself: parts, state, sizes and counts; lines and bars on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import jax
from flax import linen as nn

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config
from bessemer.data import Tokenizer
from bessemer.job import RestoreableJob
from bessemer.topology import Topology
from bessemer.training import functions, goodput, model_parts
from bessemer.training.data_parts import DataParts, GivenParts
from bessemer.training.functions import Functions
from bessemer.training.model_parts import ModelParts
from bessemer.training.output import Output
from bessemer.training.progress import NoBar, ProgressBar, make_progress
from bessemer.training.settings import BaseTrainerConfig, LoggingSettings
from bessemer.training.state import LoopState, TrainState

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

C = TypeVar("C", bound=BaseTrainerConfig)
M = TypeVar("M", bound=nn.Module)


class TrainerView(RestoreableJob[C], Generic[C, M]):
    """The first base of BaseTrainer, which fills these in."""

    config: Config
    topology: Topology
    settings: C
    logging: LoggingSettings
    given: GivenParts
    derived: dict[str, Any]
    output: Output
    model_parts: ModelParts
    data: DataParts
    functions: Functions
    step: int
    data_offset: int
    loop_state: LoopState
    continues: bool
    _state: TrainState | None
    _checkpoints: Checkpoints | None

    @property
    def _whole(self) -> BaseTrainer[C, M]:
        """Itself, for functions that ask for all of a trainer: its bases know only a part."""
        return cast("BaseTrainer[C, M]", self)

    # --- state ------------------------------------------------------------------------------------------
    @property
    def state(self) -> TrainState:
        """The state tree; made at first use, so that a restore never allocates it twice."""
        if self._state is None:
            self._state = functions.initial_state(self._whole)
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    @property
    def arguments(self) -> Config:
        """All settings: `trainer.arguments["training.steps"]`. `trainer.settings` has the trainer's as attributes."""
        return self.config

    @property
    def dataset_train(self) -> Any:
        """The training data given from Python; None when training.dataset names it. `data.plan` has the rows."""
        return self.given.dataset_train

    @property
    def dataset_eval(self) -> Any:
        """The held-out data given from Python, or None. `data.validation` has the rows."""
        return self.given.dataset_eval

    @property
    def key(self) -> jax.Array:
        return self.functions.key

    @property
    def mesh(self) -> Any:
        return self.topology.mesh

    @property
    def model(self) -> M:
        return cast(M, self.model_parts.model)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model_parts.tokenizer

    @property
    def model_state(self) -> Any:
        """The parameters as they are now."""
        return self.full_params()

    def full_params(self, state: TrainState | None = None) -> Any:
        """The model's parameters, trained and frozen ones together, of `state` (default: the live one)."""
        return (self.state if state is None else state).whole()

    @property
    def has_recipe_data(self) -> bool:
        """Whether it trains on data that a recipe names, as opposed to the caller's."""
        return self.given.dataset_train is None and self.config.provenance["training/dataset"].startswith(
            "recipe"
        )

    # --- sizes ------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        return self.data.steps

    @property
    def training_batch_size(self) -> int:
        return self.data.batch_size

    @property
    def evaluation_batch_size(self) -> int:
        """Sequences in one forward pass of validation, all devices together."""
        return self.functions.micro

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.settings.block_size

    @property
    def is_process_zero(self) -> bool:
        return self.topology.is_process_zero

    is_enable = is_process_zero

    @property
    def done(self) -> bool:
        """All optimizer steps taken (or an early end decided by a callback)."""
        return self.step >= self.steps or self.loop_state.finished is not None

    @property
    def validates(self) -> bool:
        return self.data.validation is not None

    def starts_epoch(self, step: int) -> bool:
        return self.data.starts_epoch(step + self.data_offset)

    # --- counting ---------------------------------------------------------------------------------------
    def count_model_parameters(self, params: Any) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    def calculate_number_total_flops(self, params: Any = None, is_training: bool = True) -> float:
        """FLOPs of the whole horizon from the model's own formula; a forward pass alone is a third of training."""
        total = self.model_parts.flops_per_token * self.tokens_per_step * self.steps
        return total if is_training else total / 3

    def flops_share(self, causal: bool) -> float | None:
        """Share of the devices' peak that one token per second uses; None on a chip without a known peak."""
        return model_parts.flops_share(self._whole, causal)

    def wall_seconds(self) -> float:
        """Of all starts of the run so far, for time/goodput."""
        return goodput.wall_seconds(self._whole)

    def describe_step(self, step: int) -> dict[str, Any]:
        """What a row says about its step without reading the device: tokens, epoch, rates, FLOPs so far."""
        tokens = step * self.tokens_per_step
        return {
            "tokens": tokens,
            "epoch": self.data.plan.epoch(step + self.data_offset),
            "total_training_flops": tokens * self.model_parts.flops_per_token,
            **model_parts.peak_memory(),
        }

    def note_derived(self, name: str, value: Any, reason: str) -> None:
        """Remember a derived or chosen number with its reason: shown at the start, saved in derived.json."""
        self.derived[name] = {"value": value, "reason": reason}

    # --- showing ----------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        """One line to the screen and to log.txt, on process 0 only."""
        self.output.say(text)

    def create_progress_bar(self, total: int, desc: str = "", disabled: bool = False) -> ProgressBar:
        if disabled:
            return NoBar()
        return make_progress(self.logging.progress, self.output.console, self.output.say, total, desc)

    def log_metrics(
        self, metrics: Mapping[str, Any], pbar: ProgressBar | None, step: int, mode: str = "train"
    ) -> None:
        """Show `metrics`, any names and numbers, on the bar or lines of `pbar`; None: nowhere. The run calls it for the
        row of every report. `mode` says what the metrics are of, for an override."""
        if pbar is not None:
            pbar.update(step, dict(metrics))

    def log_weight_distribution(self, state: TrainState, step: int) -> list[dict[str, Any]]:
        """Histograms of every parameter, one row each, also appended to weights.jsonl."""
        from bessemer.training.callbacks.weight_distribution import append_weights

        path = self.run_directory.weights
        return append_weights(path, state.params, step, write=self.is_process_zero)
