"""KLDivergenceTrainer: pretraining, then training on other data with a KL penalty to the first model.

    L = CE + β_k · D(policy, reference)        in stage k; β is 0 in the first

The two-stage form of training/stages.py; lists of any length make more stages. Formula and estimators of D are in
objectives/kl.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from bessemer.config import Config, field
from bessemer.data.plan.mixture import Sampling
from bessemer.data.rows.rows import DatasetStyle
from bessemer.data.stores.catalog import store_directory
from bessemer.errors import InputError
from bessemer.objectives.kl import KLConfig
from bessemer.registry import jobs, objectives
from bessemer.training import stages
from bessemer.training.settings import BaseTrainerConfig
from bessemer.training.setup import schema
from bessemer.training.state import TrainState
from bessemer.training.trainer import BaseTrainer

NO_STEERING = (
    "the penalty is β·(policy loss − reference loss), whose gradient is β·∇CE: the reference does not steer the update "
    "(optimization.kl.estimator=exact does)"
)


DEFAULT_DATA = [[Sampling("fineweb", 1.0, DatasetStyle.PMD)]] * 2
EMBEDDED_DATA = [[Sampling("python-stdlib")], [Sampling("python-reference")]]
EMBEDDED_TOKENIZER = "train:8192"


@dataclass
class KLDivergenceTrainerConfig(BaseTrainerConfig):
    """Settings of a run in stages; by default two stages of the same data."""

    job: str = field("job", default="KLDivergenceTrainer", help="trainer class")
    objective: str = field("objective", default="kl", help="which loss: a name from the objectives registry")
    total_tokens: list[int] | None = field(
        "training/tokens",
        default_factory=lambda: [1_000_000_000, 100_000_000],
        minimum=1,
        help="horizon: tokens of each stage",
    )
    datasets: list[list[Sampling]] = field(
        "training/dataset",
        default_factory=lambda: [list(mixture) for mixture in DEFAULT_DATA],
        help="what to train on, one list of samplings per stage",
    )


class KLDivergenceTrainState(TrainState):
    """beta: weight of the penalty in the present stage; 0 in the first."""

    beta: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.float32))

    def against(self) -> dict[str, Any]:
        """The stage's weight goes with its reference."""
        held = super().against()
        return held and {**held, "beta": self.beta}


C = TypeVar("C", bound=KLDivergenceTrainerConfig)
M = TypeVar("M", bound=nn.Module)


@jobs.register("KLDivergenceTrainer")
class KLDivergenceTrainer(BaseTrainer[C, M], Generic[C, M]):
    """Trains in stages; later ones are penalized for moving away from the model of earlier ones."""

    state_class = KLDivergenceTrainState

    @classmethod
    def config_class(cls) -> type[Any]:
        return schema.generic_argument(cls, BaseTrainer, 0) or KLDivergenceTrainerConfig

    @classmethod
    def choose_defaults(cls, config: Config) -> None:
        """Use the corpora that come with Python if no data is named and the default store is not prepared here."""
        mixtures = config["training/dataset"]
        if config.is_set("training/dataset") or mixtures != DEFAULT_DATA or store_directory(mixtures[0][0]):
            return
        why = f"there is no store '{mixtures[0][0].name}' here, and these come with Python"
        config.set("training/dataset", EMBEDDED_DATA, why)
        if not config.is_set("data/tokenizer"):
            config.set("data/tokenizer", EMBEDDED_TOKENIZER, "trained on that text")
        config.notes.append(
            f"training.dataset is not set and {why}: python-stdlib, then python-reference, with "
            f"data.tokenizer={config['data/tokenizer']}"
        )

    def plan_stages(self) -> tuple[stages.Stage, ...]:
        kl, starts = self.kl_settings(), self.data.stage_starts
        if len(starts) == 1 and self.settings.init is None and any(kl.beta):
            raise InputError(
                "a single stage from fresh weights has nothing to be regularized toward: give training.tokens (and "
                "training.dataset) one entry per stage, or the weights to begin with (init=RUN)."
            )
        betas = stages.one_each("optimization.kl.beta", kl.beta, len(starts), 0.0)
        refresh = stages.one_each("optimization.kl.refresh", kl.refresh, len(starts), False)
        if kl.estimator == "nll" and any(betas):
            self.note_derived("optimization.kl.estimator", "nll", NO_STEERING)
        return stages.plan(starts, self.steps, betas=betas, refresh=refresh)

    def kl_settings(self) -> KLConfig:
        """Of the objective, which is `kl` or one of your own whose settings extend KLConfig."""
        entry = objectives.entry(self.settings.objective)
        if not (entry.settings and issubclass(entry.settings[0], KLConfig)):
            raise InputError(
                f"job=KLDivergenceTrainer is for objective=kl, but objective={entry.name}. Leave that setting out, or "
                "use job=BaseTrainer."
            )
        return self.config.make(entry.settings[0])

    def describe_step(self, step: int) -> dict[str, Any]:
        stage = stages.current(self.stages, step)
        return {**super().describe_step(step), "stage": stage.number, "beta": stage.beta}
